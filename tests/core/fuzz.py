"""The state machine for as long as is wanted: ``python -m tests.core.fuzz --operations 1000000``.

Every round has a seed of its own, which is told; ``--seed`` begins with that one and so repeats it.
The last line on standard output is the result as JSON; a fault ends the run with its traceback.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from perf import report
from tests.core.test_scheduler_machine import SchedulerMachine, run_machine

EXAMPLES_PER_ROUND = 100


def main() -> None:
    parser = argparse.ArgumentParser(description="random operations on the scheduler and its pool")
    parser.add_argument("--operations", type=int, default=1_000_000, help="how many, at least")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--output", type=Path, help="a file for the result")
    arguments = parser.parse_args()
    began = time.monotonic()
    totals, seed = SchedulerMachine.totals, arguments.seed
    while totals["operations"] < arguments.operations:
        for depth in (0, 1, 2):
            report.say(f"seed {seed}, {depth} steps ahead")
            run_machine(depth, max_examples=EXAMPLES_PER_ROUND, seed=seed)
        seconds = time.monotonic() - began
        report.say(f"{totals['operations']:,} operations, {seconds:.0f} s")
        seed += 1
    seconds = time.monotonic() - began
    settings = {"operations": arguments.operations, "seed": arguments.seed}
    figures = {**totals, "seconds": round(seconds), "per_s": round(totals["operations"] / seconds)}
    report.publish(report.result("fuzz-core", settings, figures), arguments.output)


if __name__ == "__main__":
    main()
