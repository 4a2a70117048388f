"""From the times at which tokens arrived to the figures that are reported.

Knows nothing of where the times came from. Terms:

TTFT     from arrival (not sending: a queue in front counts) to the first response
ITL      each single gap between two responses of a request
TPOT     (E2E - TTFT) / (output tokens - 1); a request of one token has none
E2E      from arrival to the last response
goodput  requests a second of those that meet every given limit

A percentile is interpolated linearly between the two nearest values; a single value is its own p50 and has
no others.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Trace:
    """One request as its user saw it; all times in seconds on one clock."""

    arrival: float
    responses: tuple[tuple[float, int], ...]  # time and number of new tokens, at least one
    prompt_tokens: int

    def __post_init__(self) -> None:
        assert self.responses, "a trace is made of a request that was answered"

    @property
    def output_tokens(self) -> int:
        return sum(tokens for _, tokens in self.responses)

    @property
    def ttft(self) -> float:
        return self.responses[0][0] - self.arrival

    @property
    def e2e(self) -> float:
        return self.responses[-1][0] - self.arrival

    @property
    def tpot(self) -> float | None:
        tokens = self.output_tokens
        return (self.e2e - self.ttft) / (tokens - 1) if tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for (earlier, _), (later, _) in pairwise(self.responses)]


@dataclass(frozen=True)
class Goal:
    """Limits in seconds that a good request meets; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def is_met(self, trace: Trace) -> bool:
        measured = ((trace.ttft, self.ttft), (trace.tpot, self.tpot), (trace.e2e, self.e2e))
        return all(limit is None or value is None or value <= limit for value, limit in measured)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of the values lie; of at least one value."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summarize(
    traces: Sequence[Trace], *, start: float | None = None, goal: Goal | None = None
) -> dict[str, float]:
    """The figures of one run, by name; the name ends with the unit.

    ``start`` is when the run began, the first arrival if absent. A single request also gets the
    speed of its prefill and of its decoding, each of the tokens after the first response.
    """
    began = min(trace.arrival for trace in traces) if start is None else start
    wall = max(trace.responses[-1][0] for trace in traces) - began
    output = sum(trace.output_tokens for trace in traces)
    prompt = sum(trace.prompt_tokens for trace in traces)
    figures = {
        "wall_s": wall,
        "requests_per_s": len(traces) / wall,
        "output_tokens_per_s": output / wall,
        "total_tokens_per_s": (prompt + output) / wall,
        "responses_per_request": sum(len(trace.responses) for trace in traces) / len(traces),
    }
    distributions = {
        "ttft": [trace.ttft for trace in traces],
        "tpot": [tpot for trace in traces if (tpot := trace.tpot) is not None],
        "itl": [gap for trace in traces for gap in trace.gaps],
        "e2e": [trace.e2e for trace in traces],
    }
    for name, values in distributions.items():
        if len(values) > 1:
            figures[f"{name}_mean_ms"] = 1000 * statistics.fmean(values)
        if values:
            for percent in PERCENTILES if len(values) > 1 else PERCENTILES[:1]:
                figures[f"{name}_p{percent}_ms"] = 1000 * percentile(values, percent)
    if goal is not None:
        figures["goodput_requests_per_s"] = sum(map(goal.is_met, traces)) / wall
    if len(traces) == 1:
        figures |= _single_stream(traces[0])
    return figures


def _single_stream(trace: Trace) -> dict[str, float]:
    figures = {"prefill_tokens_per_s": trace.prompt_tokens / trace.ttft}
    decoding = trace.e2e - trace.ttft
    if decoding > 0:
        after_first = trace.output_tokens - trace.responses[0][1]
        figures["decode_tokens_per_s"] = after_first / decoding
    return figures
