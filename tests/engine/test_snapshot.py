"""What a snapshot says of requests, blocks and steps is what the scheduler has; and it is bounded."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.engine.harness import Harness, make_engine
from trident_llm.engine import snapshot
from trident_llm.engine.snapshot import counts, detail


@pytest.fixture(scope="module")
def harness(tiny_model: Path) -> Harness:
    return Harness(
        make_engine(
            tiny_model, num_blocks=64, block_size=8, max_num_seqs=4, max_num_batched_tokens=32,
            launch_depth=0,
        )
    )  # fmt: skip


def test_requests_are_told_with_their_progress(harness: Harness) -> None:
    engine = harness.engine
    prompt = list(range(5, 25))
    first = harness.add(prompt, max_tokens=6)
    harness.step()
    harness.step()
    twins = harness.add(prompt, max_tokens=6, n=2, temperature=1.0)
    late = harness.add(list(range(40, 60)), max_tokens=9, n=4)
    harness.step()
    told = detail(engine)
    one, two, three = told["requests"]
    assert [one["id"], two["id"], three["id"]] == [first, twins, late]
    assert (one["state"], one["num_output_tokens"], one["max_tokens"]) == ("running", 3, 6)
    assert one["num_computed_tokens"] == len(prompt) + 2  # the newest is not an input yet
    assert (two["state"], two["num_seqs"], two["max_tokens"]) == ("running", 2, 12)
    assert two["num_cached_tokens"] == 16  # two full blocks of the first one's
    assert (three["state"], three["num_blocks"]) == ("waiting", 0)  # no four rows are left
    assert one["seconds"] >= two["seconds"] >= 0

    totals = counts(engine)
    states: Counter[str] = Counter()
    for state, count in told["blocks"]["runs"]:
        states[state] += count
    assert states["held"] + states["shared"] == totals["num_held_blocks"]
    assert states["free"] + states["cached"] == totals["num_free_blocks"]
    assert states["shared"] >= 2
    assert sum(states.values()) == totals["num_blocks"]

    harness.run()
    told = detail(engine)
    assert told["requests"] == []
    assert {state for state, _ in told["blocks"]["runs"]} == {"free", "cached"}


def test_steps_are_told_by_their_sizes(harness: Harness) -> None:
    engine = harness.engine
    harness.run()
    engine.recent_steps.clear()
    harness.add(list(range(70, 80)), max_tokens=3)
    harness.add(list(range(80, 85)), max_tokens=2)
    before = counts(engine)["scheduled_tokens"]
    harness.run()
    steps = detail(engine)["steps"]
    assert [step[1:] for step in steps] == [(0, 2, 15), (2, 0, 2), (1, 0, 1)]
    assert [step[0] for step in steps] == list(range(steps[0][0], steps[0][0] + 3))
    assert sum(tokens for *_, tokens in steps) == counts(engine)["scheduled_tokens"] - before


def test_a_snapshot_is_bounded_and_holds_no_prompt(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "MAX_REQUESTS", 5)
    for _ in range(9):
        harness.add([111, 112, 113], max_tokens=2)
    harness.step()
    told = detail(harness.engine)
    assert len(told["requests"]) == 5
    assert [entry["state"] for entry in told["requests"]] == ["running"] * 4 + ["waiting"]
    assert counts(harness.engine)["num_requests"] == 9
    assert "112" not in json.dumps(told["requests"])
    harness.run()
    for _ in range(3):
        harness.generate([1, 2], max_tokens=200)
    assert len(detail(harness.engine)["steps"]) == harness.engine.recent_steps.maxlen
