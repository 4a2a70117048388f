"""Structured requests beside plain ones of the same lengths, through a server: validity and throughput.

    python -m perf.structured --rounds 10

Each round sends requests that must follow ten JSON schemas, at a hot temperature, and then as many
plain ones, each as long as its structured twin came out. So both do the same work but for the
grammars, and the ratio of their throughputs is what these cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import jsonschema

from perf import options, report
from perf.server import Server
from trident_client import AsyncClient

TEMPERATURE = 1.5
MAX_TOKENS = 300

_NAME = {"type": "string", "maxLength": 24}
_PLACE = {
    "type": "object",
    "properties": {"city": _NAME, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
    "required": ["city", "zip"],
    "additionalProperties": False,
}


def _record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


# Every output of these ends: strings, lists and numbers are bounded.
SCHEMAS: dict[str, Any] = {
    "person": _record(name=_NAME, age={"type": "integer", "minimum": 0, "maximum": 130}),
    "tool call": _record(tool={"const": "get_weather"}, arguments=_PLACE),
    "sentiment": _record(
        label={"enum": ["positive", "negative", "neutral"]},
        score={"type": "integer", "minimum": 0, "maximum": 100},
    ),
    "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 6},
    "list of people": {"type": "array", "items": _record(name=_NAME), "minItems": 1, "maxItems": 4},
    "date": _record(day={"type": "string", "format": "date"}, note=_NAME),
    "optional": {"type": "object", "properties": {"a": _NAME, "b": {"type": "boolean"}},
                 "additionalProperties": False},
    "choice of two": {"anyOf": [_PLACE, _record(error=_NAME)]},
    "code": _record(id={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, ok={"type": "boolean"}),
    "nested": _record(outer=_record(inner=_record(value={"type": ["integer", "null"], "minimum": -99, "maximum": 99}))),
}  # fmt: skip


async def structured(
    client: AsyncClient, seeds: Sequence[int]
) -> tuple[list[tuple[str, int]], float]:
    """Name of the schema and tokens of each output, all valid, and the seconds they took."""
    start = time.perf_counter()

    async def one(seed: int) -> tuple[str, int]:
        name = list(SCHEMAS)[seed % len(SCHEMAS)]
        result = await client.generate(
            _prompt(name, seed), seed=seed, temperature=TEMPERATURE, max_tokens=MAX_TOKENS,
            structured_outputs={"json": SCHEMAS[name]},
        )  # fmt: skip
        if result.finish_reason != "stop":
            raise RuntimeError(f"an output of {name!r} did not end within {MAX_TOKENS} tokens")
        jsonschema.validate(json.loads(result.text), SCHEMAS[name])
        assert result.usage.completion_tokens is not None
        return name, result.usage.completion_tokens

    outputs = await asyncio.gather(*map(one, seeds))
    return list(outputs), time.perf_counter() - start


async def plain(
    client: AsyncClient, seeds: Sequence[int], outputs: Sequence[tuple[str, int]]
) -> float:
    """The seconds that as many free tokens take."""
    start = time.perf_counter()
    await asyncio.gather(*(
        client.generate(
            _prompt(name, seed), seed=seed, temperature=TEMPERATURE, max_tokens=length,
            ignore_eos=True,
        )
        for seed, (name, length) in zip(seeds, outputs)
    ))  # fmt: skip
    return time.perf_counter() - start


def _prompt(name: str, seed: int) -> str:
    return f"Number {seed}. Answer with JSON that describes this: {name}."


async def measure(url: str, model: str, rounds: int, requests: int) -> list[dict[str, float]]:
    """The figures of each round."""
    figures = []
    async with AsyncClient(url, model, retries=0, concurrency=requests) as client:
        first = await structured(client, range(len(SCHEMAS)))  # compiles every schema once
        await plain(client, range(len(SCHEMAS)), first[0])
        for number in range(rounds):
            seeds = range(number * requests, (number + 1) * requests)
            outputs, constrained = await structured(client, seeds)
            free = await plain(client, seeds, outputs)
            tokens = sum(length for _, length in outputs)
            figures.append({
                "structured_tokens_per_s": tokens / constrained,
                "plain_tokens_per_s": tokens / free,
                "ratio": free / constrained,
                "valid_outputs": float(len(outputs)),
            })  # fmt: skip
            report.say(
                f"[{number + 1}/{rounds}] {requests} valid outputs of {tokens} tokens: "
                f"{tokens / constrained:.1f} tokens/s, {free / constrained:.3f} of plain ones"
            )
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m perf.structured",
        description="What grammars cost, and whether all outputs follow them.",
    )
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="default: 10")
    parser.add_argument(
        "--requests", type=int, default=100, metavar="N", help="of each kind a round (default: 100)"
    )
    options.add_model_options(parser)
    options.add_output_option(parser)
    options.add_server_options(parser)
    given = parser.parse_args(arguments)
    with ExitStack() as stack:
        url, settings = given.url, {}
        if url is None:
            settings = options.model_settings(given)
            url = stack.enter_context(Server(settings, dict(given.server_env))).url
        figures = asyncio.run(measure(url, given.model_name, given.rounds, given.requests))
    content = {
        "temperature": TEMPERATURE,
        "schemas": len(SCHEMAS),
        "requests": given.rounds * given.requests,
        "figures": report.spread(figures),
    }
    report.publish(report.result("structured", settings, content), given.output)


if __name__ == "__main__":
    main()
