"""Other engines under the same workloads, each in its own environment, as workers of perf.interleave.

A peer's module runs with the Python of the environment that holds the peer, and imports of this package
only what needs nothing but the standard library. How each is set up, and its best settings as its own
documents have them, is told at the top of its module.

    python -m perf.interleave engine --workloads W1,W2 --variant trident \\
        --peer "vllm=$VLLM/bin/python -m perf.peers.vllm_peer --model FOLDER"
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from perf import worker, workloads
from perf.metrics import Trace, summarize
from perf.workloads import RequestSpec

MAX_LEN = 4608  # tokens of the longest request of any workload, rounded up
THREADS = 2


class Peer(Protocol):
    """What a module makes of an engine."""

    def add(self, key: int, spec: RequestSpec) -> None:
        """Takes a request in, at once: greedy, of exactly ``output_len`` tokens."""

    def step(self) -> list[tuple[int, int]]:
        """Does some work; how many new tokens came for which requests."""


def run(peer: Peer, specs: Sequence[RequestSpec]) -> tuple[list[Trace], float]:
    """Sends the requests at their times; the traces, and when it began.

    Raises RuntimeError if more or fewer tokens come than were asked for.
    """
    responses: list[list[tuple[float, int]]] = [[] for _ in specs]
    left = [spec.output_len for spec in specs]
    start, upcoming, running = time.perf_counter(), 0, 0
    while upcoming < len(specs) or running:
        now = time.perf_counter() - start
        while upcoming < len(specs) and specs[upcoming].arrival <= now:
            peer.add(upcoming, specs[upcoming])
            upcoming, running = upcoming + 1, running + 1
        if not running:
            time.sleep(max(0.0, specs[upcoming].arrival - now))
            continue
        for key, tokens in peer.step():
            responses[key].append((time.perf_counter(), tokens))
            left[key] -= tokens
            running -= left[key] <= 0
    if any(left):
        raise RuntimeError(f"{-sum(left)} tokens too many came")
    traces = [
        Trace(start + spec.arrival, tuple(came), len(spec.prompt))
        for spec, came in zip(specs, responses)
    ]
    return traces, start


def main(description: str, make: Callable[[argparse.Namespace], Peer], *options: str) -> None:
    """A peer's program: a worker, with a required option for each of ``options``."""
    parser = argparse.ArgumentParser(description=description)
    for name in options:
        parser.add_argument(f"--{name}", required=True)
    worker.add_option(parser)
    given = parser.parse_args()
    peer = make(given)
    run(peer, workloads.warm_up())

    def measure(name: str, repetition: int) -> dict[str, float]:
        traces, start = run(peer, workloads.make(name, repetition))
        return summarize(traces, start=start)

    worker.answer(measure)
