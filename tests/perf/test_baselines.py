"""Policies that reserve, or batch statically, on the engine itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import baselines
from perf.engine import load
from perf.workloads import RequestSpec

# One long request beside short ones of 16 tokens in all; memory for 96 tokens.
SPECS = [RequestSpec((5,) * 8, length) for length in (8, 40, 8, 8, 8, 8)]


@pytest.fixture(scope="module")
def figures(tiny_model: Path) -> dict[str, dict[str, float]]:
    settings = {
        "model": str(tiny_model), "dtype": "float32", "num_blocks": 25, "block_size": 4,
        "max_num_seqs": 2, "max_model_len": 64, "enable_prefix_caching": False,
    }  # fmt: skip
    engine = load(settings).engine
    return {name: baselines.run(engine, SPECS, name) for name in baselines.POLICIES}


def test_static_batches_compute_past_the_end_and_take_more_steps(
    figures: dict[str, dict[str, float]],
) -> None:
    # Batches of two: the second row of the first one is idle for 32 of its steps.
    idle, steps = figures["static"]["idle_slot_steps_percent"], figures["static"]["steps"]
    assert idle == round(100 * 32 / (32 + sum(spec.output_len for spec in SPECS)), 2)
    assert steps > figures["paged"]["steps"]
    assert figures["paged"]["idle_slot_steps_percent"] == 0


def test_reservations_keep_others_out_and_lie_empty(figures: dict[str, dict[str, float]]) -> None:
    assert figures["reserved-max"]["batch_mean"] == 1  # 64 of 96 tokens each
    assert figures["paged"]["batch_mean"] > 1.5
    waste = {name: each["kv_waste_percent"] for name, each in figures.items()}
    assert waste["paged"] < waste["reserved-exact"] < waste["reserved-max"]
