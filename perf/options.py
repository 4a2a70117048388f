"""Options that the benchmarks have in common, and the loop over workloads and repetitions."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from perf import report, workloads

Measure = Callable[[str, int], dict[str, float]]
"""Runs a workload, by name and repetition, once and gives its figures."""

DEFAULT_REPETITIONS = 5


def add_workload_options(parser: argparse.ArgumentParser, *, default: str) -> None:
    """Which workloads, and how often."""
    parser.add_argument(
        "--workloads", type=_names, default=_names(default), metavar="NAMES",
        help=f"of {', '.join(workloads.NAMES)} (default: {default})",
    )  # fmt: skip
    parser.add_argument(
        "--repetitions", type=int, default=DEFAULT_REPETITIONS, metavar="N",
        help=f"runs of each, the workloads taking turns (default: {DEFAULT_REPETITIONS})",
    )  # fmt: skip


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The model and the settings of its engine."""
    parser.add_argument("--model", metavar="DIR", help="its folder (default: the default model)")
    parser.add_argument(
        "--dtype", default="bfloat16", help="type to compute in (default: bfloat16)"
    )
    parser.add_argument(
        "--set", action="append", default=[], type=_setting, metavar="NAME=VALUE",
        help="any other engine setting, as in model.json; may be repeated",
    )  # fmt: skip


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Which server, or with what environment its own one runs."""
    parser.add_argument("--url", metavar="HOST:PORT", help="a running server (default: start one)")
    parser.add_argument(
        "--model-name", default="llm", metavar="NAME", help="the model there (default: llm)"
    )
    parser.add_argument(
        "--server-env", action="append", default=[], type=_setting, metavar="NAME=VALUE",
        help="environment of the server that is started; may be repeated",
    )  # fmt: skip


def add_output_option(parser: argparse.ArgumentParser) -> None:
    """Where the result goes besides standard output."""
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the result here")


def model_settings(given: argparse.Namespace) -> dict[str, Any]:
    """The engine's settings that were asked for, the model's folder included."""
    from trident_llm.model.default_model import fetch_default_model

    home = os.environ.get("TRIDENT_HOME") or "~/.cache/trident"
    model = given.model or str(fetch_default_model(Path(home).expanduser()))
    return {"model": model, "dtype": given.dtype, **dict(given.set)}


def repeat(
    measure: Measure, names: Sequence[str], repetitions: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Runs every workload ``repetitions`` times, in turns; the spread of its figures."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for repetition in range(repetitions):
        for name in names:
            run = measure(name, repetition)
            runs[name].append(run)
            report.say(
                f"[{repetition + 1}/{repetitions}] {name}: {run['wall_s']:.2f} s, "
                f"{run['output_tokens_per_s']:.1f} tokens/s"
            )
    spreads = {name: report.spread(each) for name, each in runs.items()}
    for name, figures in spreads.items():
        report.say(report.table(name, figures))
    return spreads


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in workloads.NAMES:
            known = ", ".join(workloads.NAMES)
            raise argparse.ArgumentTypeError(f"unknown workload {name}; there are {known}")
    return names


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not {text!r}")
    return name, value
