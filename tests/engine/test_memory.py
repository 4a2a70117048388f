"""What a step allocates: attention reads the KV where it lies, so a long context costs no copy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.engine.harness import Harness, make_engine
from trident_llm.core.errors import ConfigError
from trident_llm.model import executor


def allocated_bytes(harness: Harness) -> int:
    """Bytes that torch allocated during one step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        harness.step()
    return sum(max(0, event.self_cpu_memory_usage) for event in profiled.events())


def test_a_decode_step_allocates_the_same_whatever_the_context(tiny_model: Path) -> None:
    harness = Harness(make_engine(tiny_model, num_blocks=64, max_num_batched_tokens=256))
    harness.add(list(range(3, 11)), max_tokens=230)
    harness.step()
    harness.step()
    short = allocated_bytes(harness)
    assert short > 0
    while harness.outcomes["r1", 0].num_deltas < 220:
        harness.step()
    long = allocated_bytes(harness)
    # One layer's keys and values of the context, which a gather would copy.
    gathered = 2 * 220 * 2 * 16 * torch.float32.itemsize
    assert long - short < gathered / 4


def test_a_pool_that_is_refused_although_it_seemed_to_fit(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another program has taken the memory meanwhile, or a limit is set on addresses."""
    monkeypatch.setattr(executor, "_free_bytes", lambda device: 2**62)
    with pytest.raises(ConfigError, match=r"KV pool of \d+ blocks was refused .* lower num_blocks"):
        make_engine(tiny_model, num_blocks=2**42)
