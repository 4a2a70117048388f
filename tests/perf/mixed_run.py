"""A few small requests of different lengths, one of them late, and what every way to run them gives."""

from __future__ import annotations

import pytest

from perf.metrics import Trace
from perf.workloads import RequestSpec

SPECS = [
    RequestSpec(tuple(range(10, 10 + length)), output, arrival)
    for length, output, arrival in ((40, 5, 0.0), (3, 32, 0.0), (17, 1, 0.15))
]


def check(traces: list[Trace], start: float) -> None:
    assert [trace.output_tokens for trace in traces] == [5, 32, 1]
    assert [trace.prompt_tokens for trace in traces] == [40, 3, 17]
    assert [trace.arrival - start for trace in traces] == pytest.approx([0.0, 0.0, 0.15])
    for trace in traces:
        assert trace.ttft > 0  # also that of the late request counts from its own arrival
        assert all(gap >= 0 for gap in trace.gaps)
    assert len(traces[1].responses) > 1
