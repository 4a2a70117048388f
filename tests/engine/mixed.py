"""Thousands of mixed requests in a pool so small that they preempt each other all the time.

``python -m tests.engine.mixed --requests 10000`` makes a tiny model, runs each request alone in a
large pool without a prefix cache, then all of them together in a small one; every text, finish reason
and token must be the same.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.engine.harness import Harness, make_engine

SMALL = {
    "num_blocks": 24, "block_size": 4, "max_num_seqs": 12, "max_num_batched_tokens": 48,
    "max_model_len": 88, "num_threads": 1,
}  # fmt: skip
LARGE = {"num_blocks": 400, "block_size": 16, "enable_prefix_caching": False, "num_threads": 1}
AT_ONCE = 40  # known to the engine, most of them waiting


def request(number: int) -> tuple[list[int], dict[str, Any]]:
    """One request of the mix; always the same for a number."""
    rng = random.Random(number)
    shared = [random.Random(rng.randrange(5)).randrange(3, 480) for _ in range(1)]
    shared += [7 + rng.randrange(5)] * rng.choice([0, 0, 8, 16])
    prompt = shared + [rng.randrange(3, 480) for _ in range(rng.randint(1, 30))]
    params: dict[str, Any] = {
        "max_tokens": rng.randint(1, 30),
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.3]),
        "seed": number,
        "ignore_eos": rng.random() < 0.8,
        "salt": rng.choice(["", "", "a"]),
    }
    if params["temperature"] and rng.random() < 0.2:
        params["n"] = 2
    if rng.random() < 0.2:
        params["top_k"] = 20
    if rng.random() < 0.2:
        params["repetition_penalty"] = 1.2
    return prompt, params


def outcomes(harness: Harness, name: str, params: dict[str, Any]) -> list[Any]:
    found = [harness.outcomes[name, index] for index in range(params.get("n", 1))]
    assert all(outcome.error is None for outcome in found), found
    return [(o.token_ids, o.text, o.finish_reason) for o in found]


def compare(model: Path, count: int, *, depth: int = 0, progress: bool = False) -> int:
    """Runs ``count`` requests alone and together; how many preemptions there were."""
    alone = Harness(make_engine(model, **LARGE))
    expected = []
    for number in range(count):
        prompt, params = request(number)
        name = alone.add(prompt, **params)
        alone.run()
        expected.append(outcomes(alone, name, params))
        if progress and number % 1000 == 999:
            print(f"{number + 1:,} alone", flush=True)
    together = Harness(make_engine(model, launch_depth=depth, **SMALL))
    names: list[str] = []
    while len(together.finished) < count:
        while len(names) < count and len(names) - len(together.finished) < AT_ONCE:
            prompt, params = request(len(names))
            names.append(together.add(prompt, **params))
        ended = len(together.finished)
        together.step()
        now = len(together.finished)
        if progress and now // 1000 > ended // 1000:
            done = together.engine.scheduler.stats.num_preemptions
            print(f"{now:,} together, {done:,} preemptions", flush=True)
    together.run()
    for number, name in enumerate(names):
        assert outcomes(together, name, request(number)[1]) == expected[number], number
    return together.engine.scheduler.stats.num_preemptions


def main() -> None:
    parser = argparse.ArgumentParser(description="a small pool gives the same texts as a large one")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--depth", type=int, default=0, help="steps launched ahead")
    arguments = parser.parse_args()
    from tests.conftest import write_tiny_model

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder))
        num = compare(Path(folder), arguments.requests, depth=arguments.depth, progress=True)
    seconds = time.monotonic() - began
    print(f"{arguments.requests:,} requests, {num:,} preemptions: all equal, {seconds:.0f} s")


if __name__ == "__main__":
    main()
