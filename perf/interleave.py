"""Settings compared within one run, each round running all of them in turn.

    python -m perf.interleave engine --variant default --variant passive:OMP_WAIT_POLICY=passive
    python -m perf.interleave serving --variant default --variant spin:GOMP_SPINCOUNT=1000
    python -m perf.interleave engine --workloads W2 --variant bf16 --variant int8:quantization=int8

A setting in capitals is one of the environment, another one of the engine. Other engines take their turns
too where they are given, see perf.peers.

What else a machine does, and how fast its memory is, changes over minutes; here it hits all variants
alike. Every round is a pair of runs for each variant and the first one; the ratio that is told is the
median of the rounds' ratios. The order rotates from round to round.
"""

from __future__ import annotations

import argparse
import math
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from perf import options, report
from perf.worker import Worker

Runs = list[dict[str, float]]
"""The figures of each round."""

_FIGURES = (
    "wall_s", "output_tokens_per_s", "decode_tokens_per_s", "ttft_p50_ms", "itl_p50_ms",
    "itl_p99_ms",
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A named environment, and settings of the engine."""

    name: str
    environment: Mapping[str, str]
    settings: Mapping[str, str]


def parse_variant(text: str) -> Variant:
    """NAME, or NAME:KEY=VALUE with more of KEY=VALUE after commas.

    >>> parse_variant("b:X=1,Y=2:3,block_size=4")
    Variant(name='b', environment={'X': '1', 'Y': '2:3'}, settings={'block_size': '4'})
    """
    name, _, settings = text.partition(":")
    pairs = [setting.partition("=") for setting in settings.split(",") if setting]
    if not name or not all(equals for _, equals, _ in pairs):
        raise argparse.ArgumentTypeError(f"must be NAME:KEY=VALUE,..., not {text!r}")
    return Variant(
        name,
        {key: value for key, _, value in pairs if key.isupper()},
        {key: value for key, _, value in pairs if not key.isupper()},
    )


def ratios(baseline: Runs, runs: Runs) -> dict[str, dict[str, float]]:
    """Per figure the spread of the rounds' ratios to the baseline."""
    return {
        figure: report.spread_of([run[figure] / base[figure] for base, run in zip(baseline, runs)])
        for figure in _FIGURES
        if figure in baseline[0] and figure in runs[0]
    }


def _worker(benchmark: str, variant: Variant, rest: Sequence[str]) -> Worker:
    rest = [*rest, *(f"--set={name}={value}" for name, value in variant.settings.items())]
    if benchmark == "engine":
        return Worker.of_ours(["perf.engine", *rest], variant.environment, pause=True)
    # The environment is the server's alone; the client that measures is the same for all. A server
    # is not stopped in between: its parts watch each other and take time for a sign of death.
    extra = [f"--server-env={name}={value}" for name, value in variant.environment.items()]
    return Worker.of_ours(["perf.serving", *rest, *extra], {}, pause=False)


@dataclass(frozen=True)
class PeerCommand:
    """Another engine: how it is started, and what it is asked to run."""

    name: str
    command: tuple[str, ...]
    workloads: tuple[str, ...]  # all, if empty


def parse_peer(text: str) -> PeerCommand:
    """NAME=COMMAND, or NAME:W1+W4=COMMAND for an engine that is to run only these workloads.

    >>> parse_peer("x:W1=env A=1 python -m m").command
    ('env', 'A=1', 'python', '-m', 'm')
    """
    name, equals, command = text.partition("=")
    name, _, only = name.partition(":")
    if not name or not equals or not command:
        raise argparse.ArgumentTypeError(f"must be NAME=COMMAND, not {text!r}")
    return PeerCommand(name, tuple(shlex.split(command)), tuple(only.split("+")) if only else ())


def run(
    benchmark: str,
    variants: Sequence[Variant],
    peers: Sequence[PeerCommand],
    names: Sequence[str],
    rounds: int,
    seconds: float,
    rest: Sequence[str],
) -> dict[str, dict[str, Runs]]:
    """The figures of all rounds, per variant and workload; no round begins after so many seconds."""
    contestants: list[Variant | PeerCommand] = [*variants, *peers]
    only = {peer.name: peer.workloads or names for peer in peers}
    results: dict[str, dict[str, Runs]] = {
        each.name: {name: [] for name in names if name in only.get(each.name, names)}
        for each in contestants
    }
    with ExitStack() as stack:
        workers = {}
        for each in contestants:
            if isinstance(each, PeerCommand):
                worker = Worker(each.command, {}, pause=True)
            else:
                worker = _worker(benchmark, each, rest)
            stack.callback(worker.close)
            worker.wait_until_ready()
            workers[each.name] = worker
        deadline = time.monotonic() + seconds
        for number in range(rounds):
            if number and time.monotonic() > deadline:
                report.say(f"no time for more than {number} of {rounds} rounds")
                break
            first = number % len(contestants)
            for name in names:
                for each in [*contestants[first:], *contestants[:first]]:
                    if name not in results[each.name]:
                        continue
                    figures = workers[each.name].measure(name, number)
                    results[each.name][name].append(figures)
                    report.say(
                        f"[{number + 1}/{rounds}] {name} {each.name}: "
                        f"{figures['wall_s']:.2f} s, {figures['output_tokens_per_s']:.1f} tokens/s"
                    )
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m perf.interleave",
        description="Compare settings in turns; options it does not know go to the benchmark.",
    )
    parser.add_argument("benchmark", choices=("engine", "serving"))
    parser.add_argument(
        "--variant", action="append", required=True, type=parse_variant,
        metavar="NAME:KEY=VALUE,...", help="settings of environment (in capitals) or engine; the first is what others are held to",
    )  # fmt: skip
    parser.add_argument(
        "--peer", action="append", default=[], type=parse_peer, metavar="NAME=COMMAND",
        help="another engine, by the command of its module in perf.peers without --worker",
    )  # fmt: skip
    parser.add_argument(
        "--busy", type=int, default=0, metavar="N",
        help="so many other processes keep a core busy all the time (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=math.inf, metavar="S",
        help="begin no round after so many seconds (default: no limit)",
    )  # fmt: skip
    options.add_workload_options(parser, default="W1")
    options.add_output_option(parser)
    given, rest = parser.parse_known_args(arguments)
    with ExitStack() as stack:
        for _ in range(given.busy):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        results = run(
            given.benchmark,
            given.variant,
            given.peer,
            given.workloads,
            given.repetitions,
            given.seconds,
            rest,
        )
    baseline = results[given.variant[0].name]
    content: dict[str, Any] = {
        "busy_processes": given.busy,
        "rounds": len(next(iter(baseline.values()))),
        "variants": {},
    }
    for each in [*given.variant, *given.peer]:
        mine = results[each.name]
        against = {name: ratios(baseline[name], runs) for name, runs in mine.items()}
        content["variants"][each.name] = {
            "environment": dict(each.environment) if isinstance(each, Variant) else {},
            "settings": dict(each.settings) if isinstance(each, Variant) else {},
            "ratios": against,
            "workloads": {
                name: {k: v for k, v in report.spread(runs).items() if k in _FIGURES}
                for name, runs in mine.items()
            },
        }
        for name, by_figure in against.items():
            for figure, cell in by_figure.items():
                report.say(
                    f"{each.name:<20}{name:<10}{figure:<22}x{cell['median']:.3f} "
                    f"[{cell['min']:.3f}..{cell['max']:.3f}]"
                )
    report.publish(report.result(f"interleave {given.benchmark}", {}, content), given.output)


if __name__ == "__main__":
    main()
