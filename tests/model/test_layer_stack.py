"""All layers in one call: bit for bit what the operations give one by one."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.paged import PagedRun, Sequence
from tests.model.test_decoder import Make, make, prompt
from trident_llm.model.config import ModelConfig
from trident_llm.model.decoder import Decoder

__all__ = ["make"]

stack = pytest.importorskip("trident_kernels.cpu.stack")
pytestmark = pytest.mark.skipif(
    not stack.native_bf16_dot() or not stack.has_barrier(), reason="this CPU has no such call"
)

MAX_LEN = 900  # several segments of keys
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biases": ("qwen2", {}),
    "normalised heads": ("qwen3", {"head_dim": 32}),
    "a window": ("mistral", {"sliding_window": 40}),
    "one head per group": ("llama", {"num_key_value_heads": 4}),
    "one layer": ("llama", {"num_hidden_layers": 1}),
}


def load(folder: Path, int8: bool = False) -> Decoder:
    decoder = Decoder.load(
        folder,
        ModelConfig.from_folder(folder),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        max_len=MAX_LEN,
        int8=int8,
    )
    assert decoder._stack is not None
    return decoder


def mixed_steps(decoder: Decoder, stacked: bool) -> list[torch.Tensor]:
    """Logits and then the cache: prefill, chunks, steps of one row, of few long ones and of many."""
    kept = decoder._stack
    decoder._stack = kept if stacked else None
    run = PagedRun(decoder, num_blocks=1000)
    long, short = Sequence(prompt(700)), Sequence(prompt(9, seed=2))
    many = [Sequence(prompt(5 + n, seed=n)) for n in range(13)]
    results = [
        run.step([long, short], [300, 9], all_logits=True),
        run.step([long], [1]),
    ]
    short.ids.append(3)
    results.append(run.step([long, short, *many], [399, 1, *(len(s.ids) for s in many)]))
    for token in (5, 11):
        sequences = [long, short, *many]
        for sequence in sequences:
            sequence.ids.append(token)
        results.append(run.step(sequences))
    long.ids.append(7)
    results += [run.step([long]), run.kv.data]
    decoder._stack = kept
    return results


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("int8", [False, True])
def test_the_same_bits(make: Make, variant: str, int8: bool) -> None:
    family, options = VARIANTS[variant]
    _, folder = make(family, max_position_embeddings=1024, **options)
    decoder = load(folder, int8)
    one_call, by_operation = (mixed_steps(decoder, stacked) for stacked in (True, False))
    for got, expected in zip(one_call, by_operation, strict=True):
        assert torch.equal(got, expected)


def test_threads_change_no_bit(make: Make) -> None:
    _, folder = make("llama", max_position_embeddings=1024)
    decoder = load(folder)
    expected = mixed_steps(decoder, True)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert stack.threads() == 1
        results = mixed_steps(decoder, True)
    finally:
        torch.set_num_threads(before)
    for got, wanted in zip(results, expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("wanted", [[], [7, 0, 3] * 40], ids=["none", "more than tokens"])
def test_any_tokens_may_be_wanted(make: Make, wanted: list[int], int8: bool) -> None:
    _, folder = make("llama", max_position_embeddings=1024)
    decoder = load(folder, int8)
    hidden, caches = [], []
    for kept in (decoder._stack, None):
        decoder._stack = kept
        run = PagedRun(decoder)
        batch = run._batch([Sequence(prompt(20))], [20], False)
        batch = replace(batch, logits_indices=torch.tensor(wanted, dtype=torch.int64))
        with torch.inference_mode():
            hidden.append(decoder.hidden(batch, run.kv))
        caches.append(run.kv.data)
    assert hidden[0].shape == (len(wanted), decoder.config.hidden_size)
    assert torch.equal(*hidden) and torch.equal(*caches)


def test_what_cannot_run_in_one_call_runs_by_operation(make: Make) -> None:
    _, folder = make("llama", intermediate_size=90)
    decoder = Decoder.load(
        folder,
        ModelConfig.from_folder(folder),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        max_len=60,
    )
    assert decoder._stack is None
    assert len(PagedRun(decoder).greedy([prompt(8)], 4)[0]) == 4


def test_no_one_call_where_threads_do_not_run_at_once() -> None:
    """OpenMP that gives fewer threads than were asked for is noticed, and nothing hangs."""
    program = (
        "import torch; torch.set_num_threads(2); from trident_kernels.cpu import stack;"
        "print(stack.threads(), stack.runs_together(stack.threads()))"
    )
    for variables, expected in (({"OMP_THREAD_LIMIT": "1"}, "2 False"), ({}, "2 True")):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={"PATH": "/usr/bin:/bin", "NUMBA_NUM_THREADS": "2", **variables},
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == expected
