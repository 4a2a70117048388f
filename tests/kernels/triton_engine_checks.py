"""The engine on the Triton kernels: the same ids as on plain torch, with chunks and preemption.

Run by test_triton.py in a process of its own. All rows, batches and sampling are the engine's own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import trident_kernels as ops
from tests.engine.harness import Harness, make_engine
from tests.engine.test_engine import prompts
from tests.model.test_decode_graphs import rerunning
from trident_kernels.triton import activation, attention, norm, rope

# numpy, in the interpreter, on infinities that are meant; older interpreters use it in old ways.
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore:Conversion of an array:DeprecationWarning"
)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the kernels that ran."""
    names: set[str] = set()
    for module in (activation, attention, norm, rope):

        def noted(kernel, *args, launch=module.launch, **rest):  # type: ignore[no-untyped-def]
            names.add(kernel.fn.__name__)
            launch(kernel, *args, **rest)

        monkeypatch.setattr(module, "launch", noted)
    return names


@pytest.mark.parametrize("graphs", [False, True])
def test_ids_equal_those_of_plain_torch(
    tiny_model: Path, started: set[str], graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        (prompt, {"max_tokens": 6, "temperature": 0.0 if i % 2 else 0.8, "top_p": 0.9, "seed": i})
        for i, prompt in enumerate(prompts(6, longest=30))
    ]
    settings = {"num_blocks": 14, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    engine = make_engine(tiny_model, launch_depth=1, cuda_graphs=graphs, **settings)
    if graphs and not torch.cuda.is_available():
        engine._executor.runner.record_graphs([2, 4], rerunning([]))  # type: ignore[attr-defined]
    harness = Harness(engine)
    names = [harness.add(prompt, **params) for prompt, params in requests]
    harness.run()
    assert harness.engine.scheduler.stats.num_preemptions > 0
    assert {"_rms_norm", "_silu_and_mul", "_rope_and_write_kv", "_paged_attention"} <= started

    monkeypatch.setattr(ops, "HAS_TRITON_KERNELS", False)
    monkeypatch.setattr(ops, "_CPU_DTYPES", frozenset())
    started.clear()
    alone = Harness(make_engine(tiny_model, num_blocks=64, enable_prefix_caching=False))
    for name, (prompt, params) in zip(names, requests):
        assert harness.outcomes[name, 0].token_ids == alone.generate(prompt, **params).token_ids
    assert not started
