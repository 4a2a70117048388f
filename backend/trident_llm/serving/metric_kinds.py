"""Counters, gauges and histograms of Triton's metrics, each of which saves round trips to the server.

Owned by one thread, as :mod:`trident_llm.serving.metrics` says, which decides what is counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
    2.5,
)  # fmt: skip


class Counter:
    """A number that only grows; what is added is kept until it is pushed."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._pending = 0.0
        self._total = 0

    def add(self, amount: float = 1.0) -> None:
        """Counts; the server hears of it with the next push."""
        self._pending += amount

    def advance_to(self, total: int) -> None:
        """The counter follows a total that somebody else counts."""
        self._pending += total - self._total
        self._total = total

    def push(self) -> None:
        """Tells the server what has come since the last push."""
        amount, self._pending = self._pending, 0.0
        if amount:
            self._metric.increment(amount)


class Gauge:
    """A number that is told only when it has changed."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._shown: float | None = None

    def show(self, value: float) -> None:
        """Tells the server at once."""
        if value != self._shown:
            self._metric.set(value)
            self._shown = value


class Histogram:
    """One round trip per value: for values that come once a request."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._pending: list[float] = []

    def observe(self, value: float) -> None:
        """Takes one value; the server hears of it with the next push."""
        self._pending.append(value)

    def push(self) -> None:
        """Tells the server what has come since the last push."""
        pending, self._pending = self._pending, []
        for value in pending:
            self._metric.observe(value)


class TokenHistogram:
    """A histogram for values that come with every token.

    The server takes a histogram's values one by one, which would double the traffic of a token. So the
    series of a Prometheus histogram (``_bucket`` with ``le``, ``_count``, ``_sum``) are kept as counters,
    whose push costs the same for one token as for thousands. Queries read them like any histogram.
    """

    def __init__(self, families: Families, name: str, description: str) -> None:
        self._bounds = TOKEN_BUCKETS
        bounds = [*(_number(bound) for bound in self._bounds), "+Inf"]
        buckets = families.family(f"{name}_bucket", f"{description}, values up to le")
        self._buckets = [Counter(families.metric(buckets, le=bound)) for bound in bounds]
        self._count = Counter(families.counter(f"{name}_count", f"{description}, how many"))
        self._sum = Counter(families.counter(f"{name}_sum", f"{description}, summed up"))
        self._pending = [0] * len(bounds)

    def observe(self, value: float, count: int) -> None:
        """Takes ``count`` equal values."""
        self._pending[bisect_left(self._bounds, value)] += count
        self._sum.add(value * count)

    def push(self) -> None:
        """Tells the server what has come since the last push."""
        if not any(self._pending):
            return
        total = 0
        for counter, pending in zip(self._buckets, self._pending):
            total += pending
            counter.add(total)
        self._pending = [0] * len(self._pending)
        self._count.add(total)
        # The widest first, so that a scrape in between never sees a bucket above the next wider one.
        for counter in (self._sum, self._count, *reversed(self._buckets)):
            counter.push()


def _number(bound: float) -> str:
    """A bound as Prometheus writes it: 1 and 0.25."""
    return f"{bound:g}"


class Families:
    """Makes metrics; a family must outlive its metrics, so all are kept here."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._families: list[Any] = []
        self._metrics: list[Any] = []

    def family(self, name: str, description: str, kind: str = "COUNTER") -> Any:
        """The server's own family; ``kind`` is COUNTER, GAUGE or HISTOGRAM."""
        kinds = pb_utils.MetricFamily
        made = kinds(name=name, description=description, kind=getattr(kinds, kind))
        self._families.append(made)
        return made

    def metric(self, family: Any, **labels: str) -> Any:
        """One metric of a family, with these labels besides those of all."""
        made = family.Metric(labels={**self._labels, **labels})
        self._metrics.append(made)
        return made

    def counter(self, name: str, description: str) -> Any:
        """A family's only counter, as the server has it."""
        return self.metric(self.family(name, description))

    def gauge(self, name: str, description: str) -> Gauge:
        """A family's only gauge."""
        return Gauge(self.metric(self.family(name, description, "GAUGE")))

    def histogram(self, name: str, description: str, buckets: Sequence[float]) -> Histogram:
        """A family's only histogram; ``buckets`` are upper bounds."""
        family = self.family(name, description, "HISTOGRAM")
        made = family.Metric(labels=dict(self._labels), buckets=list(buckets))
        self._metrics.append(made)
        return Histogram(made)

    def drop(self) -> None:
        """Lets go of all, metrics first."""
        self._metrics.clear()
        self._families.clear()
