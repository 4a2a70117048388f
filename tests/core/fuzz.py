"""The state machine for as long as is wanted: ``python -m tests.core.fuzz --operations 1000000``.

Every round has a seed of its own, which is told; ``--seed`` begins with that one and so repeats it.
"""

from __future__ import annotations

import argparse
import time

from tests.core.test_scheduler_machine import SchedulerMachine, run_machine

EXAMPLES_PER_ROUND = 100


def main() -> None:
    parser = argparse.ArgumentParser(description="random operations on the scheduler and its pool")
    parser.add_argument("--operations", type=int, default=1_000_000, help="how many, at least")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    arguments = parser.parse_args()
    began = time.monotonic()
    seed = arguments.seed
    while SchedulerMachine.num_operations < arguments.operations:
        print(f"seed {seed}: ", end="", flush=True)
        for depth in (0, 1, 2):
            run_machine(depth, max_examples=EXAMPLES_PER_ROUND, seed=seed)
        done, seconds = SchedulerMachine.num_operations, time.monotonic() - began
        print(f"{done:,} operations, {seconds:.0f} s", flush=True)
        seed += 1


if __name__ == "__main__":
    main()
