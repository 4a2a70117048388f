"""Two results of one benchmark as ratios with their spread.

    python -m perf.compare before.json after.json

A ratio is after / before of the medians. Its range comes from the extremes of both: it holds every
ratio that a pair of single runs can give, so a range that leaves out 1 is a difference, one that holds 1
may be none. Results made one after the other also differ by what else the machine did: where that
matters, use perf.interleave.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perf import report


@dataclass(frozen=True)
class Ratio:
    """How one figure changed."""

    workload: str
    figure: str
    before: float  # median
    after: float  # median
    ratio: float
    least: float
    greatest: float

    @property
    def is_clear(self) -> bool:
        """Whether no pair of runs contradicts the direction of the ratio."""
        return self.least > 1.0 or self.greatest < 1.0


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Ratio]:
    """The ratios of all figures that both results have.

    Raises ValueError if they come from different benchmarks or have no workload in common.
    """
    if before["benchmark"] != after["benchmark"]:
        raise ValueError(
            f"these are results of {before['benchmark']} and of {after['benchmark']}; "
            "compare two of one benchmark"
        )
    ratios = [
        _ratio(name, figure, old, figures_after[figure])
        for name, figures, figures_after in _common(before, after)
        for figure, old in figures.items()
        if figure in figures_after
    ]
    if not ratios:
        raise ValueError("the two results have no workload in common")
    return ratios


def _ratio(
    workload: str, figure: str, before: Mapping[str, float], after: Mapping[str, float]
) -> Ratio:
    return Ratio(
        workload, figure, before["median"], after["median"],
        ratio=after["median"] / before["median"],
        least=after["min"] / before["max"],
        greatest=after["max"] / before["min"],
    )  # fmt: skip


def _common(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    for part in ("workloads", "levels"):
        for name, figures in before.get(part, {}).items():
            if name in after.get(part, {}):
                yield name, figures, after[part][name]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m perf.compare", description="Tell how the figures of two results differ."
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    given = parser.parse_args(arguments)
    try:
        before, after = (json.loads(path.read_text()) for path in (given.before, given.after))
        ratios = compare(before, after)
    except (OSError, ValueError) as error:
        parser.exit(1, f"error: {error}\n")
    if before["machine"]["cpu"] != after["machine"]["cpu"]:
        report.say("these results come from different processors")
    for ratio in ratios:
        mark = "" if ratio.is_clear else "  (within the spread)"
        report.say(
            f"{ratio.workload:<16}{ratio.figure:<26}{ratio.before:>10g} -> {ratio.after:<10g}"
            f"x{ratio.ratio:.3f} [{ratio.least:.3f}..{ratio.greatest:.3f}]{mark}"
        )
    print(json.dumps({"benchmark": "compare", "ratios": [asdict(ratio) for ratio in ratios]}))


if __name__ == "__main__":
    main()
