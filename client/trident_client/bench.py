"""A closed-loop load test: so many requests at a time, timed as a user sees them.

Owns the workload, the clock readings and their percentiles. Terms: TTFT, from sending to the first
response; ITL, each gap between two responses of a request; E2E, from sending to the end; all in ms.
Invariant: a failed request is counted, never timed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from trident_client._channel import TLS
from trident_client._request import Prompt
from trident_client.aio import AsyncClient
from trident_client.errors import TridentError

__all__ = ["Workload", "percentiles", "report", "run"]

_TEXT = (
    "The harbour lay quiet under a grey sky while the ferries came in one after another and the "
    "people on the quay counted crates, wrote numbers in small books and talked about the weather. "
)


@dataclass(frozen=True)
class Workload:
    """What to ask for; lengths in tokens, of each request."""

    concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int


@dataclass
class _Timings:
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)


async def run(
    workload: Workload,
    *,
    url: str,
    model: str,
    timeout: float | None = None,
    ssl: bool | TLS = False,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Send the workload and give the measures as one JSON object."""
    async with AsyncClient(
        url, model, timeout=timeout, ssl=ssl, headers=headers, retries=0
    ) as client:
        prompts = await _prompts(client, workload)
        timings = _Timings()

        async def work() -> None:
            while prompts:
                await _time_one(client, prompts.pop(), workload.output_tokens, timings)

        started = time.perf_counter()
        workers = min(workload.concurrency, workload.requests)
        await asyncio.gather(*(work() for _ in range(workers)))
        seconds = time.perf_counter() - started
    return {
        **asdict(workload),
        "completed": len(timings.e2e),
        "errors": dict(timings.errors),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(timings.e2e) / seconds, 3),
        "prompt_tokens_total": timings.prompt_tokens,
        "output_tokens_total": timings.output_tokens,
        "output_tokens_per_s": round(timings.output_tokens / seconds, 2),
        "ttft_ms": percentiles(timings.ttft),
        "itl_ms": percentiles(timings.itl),
        "e2e_ms": percentiles(timings.e2e),
    }


async def _prompts(client: AsyncClient, workload: Workload) -> list[Prompt]:
    """One prompt per request, no two alike from the start, so that no prefix cache answers them.

    Exactly `prompt_tokens` long where the model takes token ids, else that many words.
    """
    info = await client.metadata()
    length = workload.prompt_tokens
    texts = [f"{number}. {_TEXT}" for number in range(workload.requests)]
    if not {"input_ids", "control"} <= info.inputs.keys():
        return [" ".join((text.split() * length)[:length]) for text in texts]
    filler = await client.tokenize(_TEXT)
    prompts: list[Prompt] = []
    for number in range(workload.requests):
        ids = await client.tokenize(f"{number}. ")
        prompts.append((ids + filler * (length // len(filler) + 1))[:length])
    return prompts


async def _time_one(
    client: AsyncClient, prompt: Prompt, output_tokens: int, timings: _Timings
) -> None:
    sent = time.perf_counter()
    arrivals: list[float] = []
    stream = client.stream(prompt, max_tokens=output_tokens, ignore_eos=True, temperature=0.0)
    try:
        async for _ in stream:
            arrivals.append(time.perf_counter())
        result = await stream.result()
    except TridentError as error:
        timings.errors[f"{type(error).__name__}: {error}"] += 1
        return
    if arrivals:
        timings.ttft.append(1000 * (arrivals[0] - sent))
    timings.itl += (1000 * (after - before) for before, after in pairwise(arrivals))
    timings.e2e.append(1000 * (time.perf_counter() - sent))
    timings.prompt_tokens += result.usage.prompt_tokens or 0
    timings.output_tokens += result.usage.completion_tokens or 0


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles, rounded to 0.01; None of no values.

    >>> percentiles([1.0, 2.0, 3.0])
    {'mean': 2.0, 'p50': 2.0, 'p90': 2.8, 'p99': 2.98}
    """
    if not values:
        return None
    points = np.percentile(values, (50, 90, 99))
    named = {"mean": float(np.mean(values)), **dict(zip(("p50", "p90", "p99"), points.tolist()))}
    return {name: round(value, 2) for name, value in named.items()}


def report(outcome: Mapping[str, Any]) -> str:
    """The measures as a table."""
    lines = [
        f"{outcome['completed']} of {outcome['requests']} requests in {outcome['seconds']} s, "
        f"{outcome['concurrency']} at a time",
        f"{outcome['output_tokens_per_s']} output tokens/s, {outcome['requests_per_s']} requests/s",
        f"{'ms':<6}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}",
    ]
    for name in ("ttft", "itl", "e2e"):
        measured = outcome[f"{name}_ms"]
        if measured is not None:
            cells = "".join(f"{measured[key]:>10.2f}" for key in ("mean", "p50", "p90", "p99"))
            lines.append(f"{name.upper():<6}{cells}")
    lines += [f"{count} x {error}" for error, count in outcome["errors"].items()]
    return "\n".join(lines)
