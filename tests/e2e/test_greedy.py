"""Greedy ids over gRPC equal those of Hugging Face transformers in float32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e.server import RunningServer

pytestmark = pytest.mark.e2e

NUM_TOKENS = 16
TEXT = (
    "The history of computing is longer than the history of electronic computers. People counted "
    "with pebbles, with beads on wires, with gears and cards; they made tables of logarithms and "
    "checked them by hand. What changed in the last century is not that machines count, but that "
    "they follow a list of instructions which they hold themselves, and that the list can be "
    "changed as easily as the numbers. "
)


def make_prompts(folder: Path) -> list[list[int]]:
    """20 prompts of 1 to 600 tokens; some share long prefixes."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT * 8).ids
    rng = random.Random(0)
    lengths = [
        1,
        2,
        15,
        16,
        17,
        31,
        32,
        33,
        64,
        100,
        129,
        200,
        255,
        256,
        300,
        350,
        420,
        512,
        577,
        600,
    ]
    prompts = []
    for number, length in enumerate(lengths):
        start = 0 if number % 2 else rng.randrange(40)
        prompts.append(ids[start : start + length])
    assert [len(prompt) for prompt in prompts] == lengths
    return prompts


@pytest.fixture(scope="module")
def prompts(default_model: Path) -> list[list[int]]:
    return make_prompts(default_model)


@pytest.fixture(scope="module")
def expected(default_model: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32)
    results = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        results.append(tuple(output[0, len(prompt) :].tolist()))
    return results


SAMPLING = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}


def test_alone_and_then_from_the_prefix_cache(
    small_pool_server: RunningServer, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    with small_pool_server.client() as client:
        for prompt, ids in zip(prompts, expected):
            assert client.generate(prompt, **SAMPLING).token_ids == ids
        again = client.generate(prompts[-1], **SAMPLING)
        assert again.token_ids == expected[-1]
        assert again.usage.cached_tokens is not None
        assert again.usage.cached_tokens >= 592 - 16


def test_all_in_flight_twice_over_with_preemption(
    small_pool_server: RunningServer, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    before = small_pool_server.idle_stats()
    # Long outputs too, so that sequences outgrow the pool together.
    with small_pool_server.client() as client:
        results = client.generate(prompts * 2, **{**SAMPLING, "max_tokens": 60})
        for result, ids in zip(results, expected * 2):
            assert result.token_ids is not None
            assert result.token_ids[:NUM_TOKENS] == ids
        # Beyond what transformers gave: the same request alone.
        for number in (0, 3, 9):
            alone = client.generate(prompts[number], **{**SAMPLING, "max_tokens": 60})
            assert alone.token_ids == results[number].token_ids == results[number + 20].token_ids
    after = small_pool_server.idle_stats()
    assert after["num_preemptions"] > before["num_preemptions"]
    assert after["prefix_hits"] > before["prefix_hits"]
