"""Results: made, written, compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perf import compare, interleave, options, report


def result(benchmark: str = "engine", **figures: float) -> dict[str, Any]:
    spreads = {
        name: report.spread_of([value * 0.9, value, value * 1.2]) for name, value in figures.items()
    }
    return report.result(benchmark, {"model": "m"}, {"workloads": {"W1": spreads}})


def test_spread() -> None:
    assert report.spread([{"a": 3.0, "b": 1.0}, {"a": 1.23456}, {"a": 2.0}]) == {
        "a": {"median": 2.0, "min": 1.235, "max": 3.0},
        "b": {"median": 1.0, "min": 1.0, "max": 1.0},
    }


def test_a_result_says_where_it_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = result(wall_s=2.0)
    assert content["machine"]["cores"] >= 1 and content["machine"]["cpu"]
    assert content["commit"] and content["command"] and content["date"]
    assert content["versions"]["torch"]
    report.publish(content, tmp_path / "new" / "result.json")
    assert json.loads(capsys.readouterr().out) == content
    assert json.loads((tmp_path / "new" / "result.json").read_text()) == content


def test_ratios_carry_the_spread_of_both() -> None:
    (slower,) = compare.compare(result(wall_s=2.0), result(wall_s=3.0))
    assert (slower.workload, slower.figure, slower.ratio) == ("W1", "wall_s", 1.5)
    assert slower.least == pytest.approx(2.7 / 2.4)
    assert slower.greatest == pytest.approx(3.6 / 1.8)
    assert slower.is_clear
    (same,) = compare.compare(result(wall_s=2.0), result(wall_s=2.1))
    assert not same.is_clear


def test_results_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="results of engine and of serving"):
        compare.compare(result(), result("serving"))
    with pytest.raises(ValueError, match="no workload in common"):
        compare.compare(result(a=1.0), {**result(), "workloads": {}})


def test_compare_prints_json_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, wall in (("a.json", 2.0), ("b.json", 1.0)):
        (tmp_path / name).write_text(json.dumps(result(wall_s=wall)))
    compare.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    captured = capsys.readouterr()
    assert json.loads(captured.out)["ratios"][0]["ratio"] == 0.5
    assert "x0.500" in captured.err


def test_interleaved_ratios_are_of_the_same_round() -> None:
    # The machine got twice as slow in the second round: the variant is 10 % faster in both.
    baseline, runs = [{"wall_s": 1.0}, {"wall_s": 2.0}], [{"wall_s": 0.9}, {"wall_s": 1.8}]
    assert interleave.ratios(baseline, runs) == {"wall_s": {"median": 0.9, "min": 0.9, "max": 0.9}}


def test_workloads_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    order: list[tuple[str, int]] = []

    def measure(name: str, repetition: int) -> dict[str, float]:
        order.append((name, repetition))
        return {"wall_s": 1.0 + repetition, "output_tokens_per_s": 5.0}

    figures = options.repeat(measure, ["W1", "W2"], 2)
    assert order == [("W1", 0), ("W2", 0), ("W1", 1), ("W2", 1)]
    assert figures["W2"]["wall_s"] == {"median": 1.5, "min": 1.0, "max": 2.0}
