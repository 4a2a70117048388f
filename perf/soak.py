"""Load of every kind on a real server for as long as wanted, and what must hold all the while.

    python -m perf.soak --minutes 30

Each request is first answered alone. Then many at a time are sent, of all kinds: short and long, with a
common prefix, of several sequences, beams, structured, scored, badly formed, left in the middle and timed
out. Every answer must be the one that the request got alone. Now and then the load pauses: then all blocks
must be free, the pool's accounts exact, and every request counted by exactly one outcome. Memory must not
grow after the first half.

The exit status is 1 if anything of this did not hold; the result, the last line, says what.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perf import options, report
from perf.mix import WEIGHTS, Answer, Mismatch, MixedRequest, make_requests
from perf.server import Server
from trident_client import AsyncClient, TridentError, Unavailable

AUDIT_SECONDS = 60.0
LOOK_SECONDS = 10.0
# What may be allocated late, once: a library's own caches, a response that grew its buffer.
GROWTH_LIMIT_MIB = 64.0
GROWTH_LIMIT = 1.05
# In float32 oneDNN keeps what it compiled for the newest 1,024 shapes of a product, some 300 MiB: that is
# no leak, but would hide one.
_ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
_SETTINGS = {"num_blocks": "250", "max_num_seqs": "16", "max_waiting": "48"}
_OUTCOMES = re.compile(
    r"^(?:vllm:request_success_total|trident:request_errors_total|trident:control_requests_total)"
    r"\{.*\} (\S+)$",
    re.MULTILINE,
)


class Soak:
    """One run; what it found is in its attributes."""

    def __init__(self, server: Server, requests: Sequence[MixedRequest], seed: int) -> None:
        self._server = server
        self._requests = requests
        self._rng = random.Random(seed)
        self._expected: dict[str, Answer] = {}
        self._open = asyncio.Event()  # closed while the load pauses
        self._ended = False
        self.counts: Counter[str] = Counter()  # by kind and what became of it
        self.problems: list[str] = []
        self.audits: list[dict[str, float]] = []
        self.memory_mib: list[tuple[float, float]] = []  # seconds since the load began, MiB

    async def take_answers(self, client: AsyncClient) -> None:
        """Answers each request alone."""
        for number, request in enumerate(self._requests, start=1):
            if request.has_answer:
                self._expected[request.name] = await request.alone(client)
            if number % 10 == 0:
                report.say(f"[{number}/{len(self._requests)}] answered alone")

    async def run(self, client: AsyncClient, seconds: float, workers: int) -> None:
        """The load, for ``seconds``, from so many callers at once."""
        began = time.monotonic()
        self._open.set()
        callers = [asyncio.create_task(self._call(client)) for _ in range(workers)]
        next_audit = began + min(AUDIT_SECONDS, seconds / 2)
        while (now := time.monotonic()) < began + seconds:
            self._look(now - began)
            if now >= next_audit:
                await self._audit(client)
                next_audit = time.monotonic() + AUDIT_SECONDS
            await asyncio.sleep(min(LOOK_SECONDS, seconds / 10))
        self._ended = True
        await asyncio.gather(*callers)
        await self._audit(client)
        self._look(time.monotonic() - began)

    async def _call(self, client: AsyncClient) -> None:
        kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
        by_kind = {
            kind: [request for request in self._requests if request.kind == kind] for kind in kinds
        }
        while not self._ended:
            await self._open.wait()
            (kind,) = self._rng.choices(kinds, weights)
            request = self._rng.choice(by_kind[kind])
            self.counts["in flight"] += 1
            try:
                expected = self._expected.get(request.name)
                became = await request.send(client, expected, self._rng)
            except Unavailable as error:
                became = "refused: the queue was full" if error.field == "queue" else str(error)
                if error.field != "queue":
                    self._report(f"{request.name}: {error}")
            except (TridentError, Mismatch) as error:
                became = type(error).__name__
                self._report(f"{request.name}: {error}"[:1000])
            self.counts["in flight"] -= 1
            self.counts[f"{kind}: {became}"] += 1

    def _report(self, problem: str) -> None:
        report.say(f"problem: {problem}"[:400])
        self.problems.append(problem)

    def _look(self, seconds: float) -> None:
        memory = sum(map(_memory, self._server.processes())) / 2**20
        self.memory_mib.append((round(seconds, 1), round(memory, 1)))
        done = sum(count for name, count in self.counts.items() if ":" in name)
        report.say(
            f"{seconds:6.0f} s  {done} requests  {memory:.0f} MiB  {len(self.problems)} problems"
        )

    async def _audit(self, client: AsyncClient) -> None:
        """Lets all end, and looks whether nothing is left of any."""
        self._open.clear()
        began = time.monotonic()
        deadline = began + 120
        while self.counts["in flight"] and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        left = began = time.monotonic()
        while True:
            stats = await client.stats()
            # Those that were left end once that is noticed.
            if stats["num_requests"] == 0 and stats["num_open_requests"] == 1:
                break
            left = time.monotonic()
            if left > deadline:
                self._report(f"{stats['num_requests']} requests do not end")
                break
            await asyncio.sleep(0.02)
        counted = await asyncio.to_thread(_outcomes, self._server.metrics_port)
        # All that came in before the last question, which is among them, and none after it.
        if counted != stats["num_accepted_requests"]:
            self._report(
                f"{stats['num_accepted_requests']} requests came in, {counted} were counted"
            )
        if stats["num_free_blocks"] != stats["num_blocks"]:
            self._report(f"{stats['num_held_blocks']} blocks are held while nothing runs")
        if stats["integrity_failures"]:
            self._report(f"the pool's accounts: {stats['integrity_failures']} failures")
        self.audits.append(
            {
                "requests": stats["num_accepted_requests"],
                "preemptions": stats["num_preemptions"],
                "seconds_until_idle": round(left - began, 2),
            }
        )
        self._open.set()

    def growth(self) -> dict[str, float]:
        """Memory in MiB: in the middle, at the end, and the most."""
        total = self.memory_mib[-1][0]
        middle = next(memory for at, memory in self.memory_mib if at >= total / 2)
        last = self.memory_mib[-1][1]
        if last > middle * GROWTH_LIMIT + GROWTH_LIMIT_MIB:
            self._report(f"memory grew from {middle:.0f} to {last:.0f} MiB")
        most = max(memory for _, memory in self.memory_mib)
        return {"middle": middle, "end": last, "most": most}


def _memory(pid: int) -> int:
    """Bytes of a process, what it shares with others counted in part."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0  # it has ended
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found is not None else 0


def _outcomes(port: int) -> int:
    """How many requests the server's metrics have counted by an outcome."""
    with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    return round(sum(float(value) for value in _OUTCOMES.findall(text)))


async def soak(
    server: Server, *, seconds: float, workers: int, seed: int, vocab_size: int
) -> dict[str, Any]:
    """The whole run against a server that has just started; what a result says of it."""
    async with AsyncClient(server.url, "llm", retries=0, concurrency=4 * workers) as client:
        stats = await client.stats()
        requests = make_requests(vocab_size, stats["max_model_len"])
        run = Soak(server, requests, seed)
        await run.take_answers(client)
        await run.run(client, seconds, workers)
    memory = run.growth()
    counts = {name: count for name, count in sorted(run.counts.items()) if ":" in name}
    return {
        "ok": not run.problems,
        "problems": run.problems[:20],
        "requests": sum(counts.values()),
        "counts": counts,
        "audits": len(run.audits),
        "preemptions": run.audits[-1]["preemptions"],
        "seconds_until_idle": max(audit["seconds_until_idle"] for audit in run.audits),
        "memory_mib": memory,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m perf.soak",
        description="Mixed load for as long as wanted: answers, block accounts, memory, outcomes.",
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="of load (default: 30)")
    parser.add_argument(
        "--workers", type=int, default=24, metavar="N", help="callers at once (default: 24)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order (default: 0)")
    options.add_model_options(parser)
    options.add_output_option(parser)
    parser.set_defaults(dtype="float32")  # in which answers do not depend on the company
    given = parser.parse_args(arguments)
    settings = {**_SETTINGS, **options.model_settings(given)}
    vocab_size = _vocab_size(settings["model"])
    with Server(settings, _ENVIRONMENT) as server:
        content = asyncio.run(
            soak(
                server, seconds=60 * given.minutes, workers=given.workers, seed=given.seed,
                vocab_size=vocab_size,
            )
        )  # fmt: skip
    settings = {**settings, "minutes": given.minutes, "workers": given.workers, "seed": given.seed}
    report.publish(report.result("soak", settings, content), given.output)
    sys.exit(0 if content["ok"] else 1)


def _vocab_size(model: str) -> int:
    from trident_llm.text.tokenizer import Tokenizer

    return Tokenizer.from_folder(Path(model)).vocab_size


if __name__ == "__main__":
    main()
