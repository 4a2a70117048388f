"""A benchmark that stays alive and runs workloads when told: what interleaved comparisons need.

The protocol, lines of text: the worker says "ready"; it is told "NAME REPETITION" and answers with a
JSON object of figures; at the end of its input it leaves. Owns both ends of it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence


def add_option(parser: argparse.ArgumentParser) -> None:
    """The option that makes a benchmark a worker."""
    parser.add_argument(
        "--worker", action="store_true",
        help="run what standard input names, a workload and a repetition a line",
    )  # fmt: skip


def answer(measure: Callable[[str, int], dict[str, float]]) -> None:
    """Runs what standard input asks for until it ends."""
    print("ready", flush=True)
    for line in sys.stdin:
        name, repetition = line.split()
        print(json.dumps(measure(name, int(repetition))), flush=True)


class Worker:
    """A worker process. Between two runs it is stopped, if it may be, so that it takes no time."""

    @classmethod
    def of_ours(
        cls, arguments: Sequence[str], environment: Mapping[str, str], *, pause: bool
    ) -> Worker:
        """A module of ours and its arguments."""
        return cls([sys.executable, "-m", *arguments], environment, pause=pause)

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, pause: bool
    ) -> None:
        self._pause = pause
        self._process = subprocess.Popen(
            [*command, "--worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip

    def wait_until_ready(self) -> None:
        """Raises RuntimeError if it ends first."""
        self._read_until(lambda line: line == "ready\n")
        self._signal(signal.SIGSTOP)

    def measure(self, name: str, repetition: int) -> dict[str, float]:
        """The figures of one run."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        print(name, repetition, file=self._process.stdin, flush=True)
        figures: dict[str, float] = json.loads(self._read_until(lambda line: line[0] == "{"))
        self._signal(signal.SIGSTOP)
        return figures

    def close(self) -> None:
        """Lets it leave, and waits."""
        self._signal(signal.SIGCONT)
        self._process.communicate()

    def _read_until(self, is_it: Callable[[str], bool]) -> str:
        """The next line that is it; an engine of others may print what it likes before."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if is_it(line):
                return line
        raise RuntimeError(f"the benchmark ended with status {self._process.wait()}")

    def _signal(self, number: int) -> None:
        if self._pause and self._process.poll() is None:
            self._process.send_signal(number)
