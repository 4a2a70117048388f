from __future__ import annotations

import pytest

from perf.metrics import Goal, Trace, percentile, summarize

# Arrives at 10.0; one token after 0.5 s, two after 0.6 s, one after 1.0 s.
FIRST = Trace(10.0, ((10.5, 1), (10.6, 2), (11.0, 1)), prompt_tokens=100)
ONE_TOKEN = Trace(11.0, ((12.0, 1),), prompt_tokens=10)


def test_the_times_of_one_request() -> None:
    assert FIRST.ttft == pytest.approx(0.5)
    assert FIRST.e2e == pytest.approx(1.0)
    assert FIRST.gaps == pytest.approx([0.1, 0.4])
    assert FIRST.tpot == pytest.approx(0.5 / 3)  # four tokens: three after the first
    assert ONE_TOKEN.tpot is None
    assert ONE_TOKEN.gaps == []


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1.0), (50, 2.5), (90, 3.7), (99, 3.97), (100, 4.0)]
)
def test_percentiles_lie_between_the_nearest_values(percent: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(expected)


def test_the_figures_of_a_run() -> None:
    figures = summarize([FIRST, ONE_TOKEN], start=9.0)
    assert figures["wall_s"] == pytest.approx(3.0)
    assert figures["requests_per_s"] == pytest.approx(2 / 3)
    assert figures["output_tokens_per_s"] == pytest.approx(5 / 3)
    assert figures["total_tokens_per_s"] == pytest.approx(115 / 3)
    assert figures["responses_per_request"] == 2.0
    assert figures["ttft_p50_ms"] == pytest.approx(750)
    assert figures["itl_mean_ms"] == pytest.approx(250)
    assert figures["e2e_p99_ms"] == pytest.approx(1000)
    assert "itl_p99_ms" in figures and "decode_tokens_per_s" not in figures
    assert "tpot_p50_ms" in figures and "tpot_p99_ms" not in figures  # only one request has it


def test_a_run_begins_with_the_first_arrival_unless_said_otherwise() -> None:
    assert summarize([FIRST, ONE_TOKEN])["wall_s"] == pytest.approx(2.0)


def test_a_single_stream_tells_its_speeds() -> None:
    figures = summarize([FIRST])
    assert figures["prefill_tokens_per_s"] == pytest.approx(200)
    assert figures["decode_tokens_per_s"] == pytest.approx(3 / 0.5)


@pytest.mark.parametrize(
    ("goal", "good"),
    [
        (Goal(), 2),
        (Goal(ttft=0.6), 1),
        (Goal(ttft=1.1, tpot=0.1), 1),  # the request of one token has no TPOT to miss
        (Goal(e2e=0.9), 0),
    ],
)
def test_goodput_counts_requests_that_meet_every_limit(goal: Goal, good: int) -> None:
    figures = summarize([FIRST, ONE_TOKEN], start=10.0, goal=goal)
    assert figures["goodput_requests_per_s"] == pytest.approx(good / 2)
