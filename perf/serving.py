"""The workloads through a running server, over gRPC or over HTTP's ``generate_stream``.

    python -m perf.serving --workloads W1,W2
    python -m perf.serving --url localhost:8001 --protocol grpc

It starts a ``trident serve`` of its own unless a server is named. The client runs on the same machine
then and takes its share of the processor, as it does in every such benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial

from perf import http_stream, options, report, worker, workloads
from perf.metrics import Trace, summarize
from perf.server import MODEL_NAME, Server
from perf.workloads import RequestSpec
from trident_client import AsyncClient

Stream = Callable[[RequestSpec], Awaitable[list[tuple[float, int]]]]
"""Sends a request; the times of its responses and the number of tokens in each."""


async def run(specs: Sequence[RequestSpec], stream: Stream) -> tuple[list[Trace], float]:
    """Sends every request at its time; the traces, and when it began. Raises what any of them does."""
    start = time.perf_counter()

    async def one(spec: RequestSpec) -> Trace:
        await asyncio.sleep(start + spec.arrival - time.perf_counter())
        trace = Trace(start + spec.arrival, tuple(await stream(spec)), len(spec.prompt))
        if trace.output_tokens != spec.output_len:
            raise RuntimeError(f"{trace.output_tokens} tokens came, not {spec.output_len}")
        return trace

    return list(await asyncio.gather(*map(one, specs))), start


async def run_grpc(
    specs: Sequence[RequestSpec], url: str, model: str = MODEL_NAME
) -> tuple[list[Trace], float]:
    """Over gRPC with this project's client, one RPC per request."""
    async with AsyncClient(url, model, retries=0, concurrency=len(specs)) as client:
        await client.metadata()  # connects, so that the first request need not

        async def stream(spec: RequestSpec) -> list[tuple[float, int]]:
            responses = []
            async for delta in client.stream(
                list(spec.prompt), max_tokens=spec.output_len, ignore_eos=True, temperature=0.0
            ):
                assert delta.num_tokens is not None, "this model tells how many tokens are new"
                responses.append((time.perf_counter(), delta.num_tokens))
            return responses

        return await run(specs, stream)


async def run_http(
    specs: Sequence[RequestSpec], url: str, model: str = MODEL_NAME
) -> tuple[list[Trace], float]:
    """Over HTTP, one connection per request."""
    return await run(specs, partial(http_stream.generate, url, model))


async def run_gateway(
    specs: Sequence[RequestSpec], url: str, model: str = MODEL_NAME
) -> tuple[list[Trace], float]:
    """Through a gateway for OpenAI's API, one connection per request."""
    return await run(specs, partial(http_stream.complete, url, model))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m perf.serving",
        description="Run workloads through a server and time what its users see.",
    )
    options.add_workload_options(parser, default="W1,W2,W3,W5")
    options.add_model_options(parser)
    options.add_output_option(parser)
    options.add_server_options(parser)
    parser.add_argument(
        "--protocol", choices=("grpc", "http"), default="grpc", help="default: grpc"
    )
    parser.add_argument(
        "--vocab-size", type=int, default=49_000, metavar="N",
        help="token ids of prompts are below this (default: 49000)",
    )  # fmt: skip
    worker.add_option(parser)
    given = parser.parse_args(arguments)
    send = run_grpc if given.protocol == "grpc" else run_http
    with ExitStack() as stack:
        url, settings = given.url, {}
        if url is None:
            settings = options.model_settings(given)
            server = stack.enter_context(Server(settings, dict(given.server_env)))
            url = server.url if given.protocol == "grpc" else server.http_url

        def one(name: str, repetition: int) -> dict[str, float]:
            specs = workloads.make(name, repetition, vocab_size=given.vocab_size)
            traces, start = asyncio.run(send(specs, url, given.model_name))
            return summarize(traces, start=start)

        asyncio.run(send(workloads.warm_up(vocab_size=given.vocab_size), url, given.model_name))
        if given.worker:
            worker.answer(one)
            return
        figures = options.repeat(one, given.workloads, given.repetitions)
    content = {
        "protocol": given.protocol, "server_environment": dict(given.server_env),
        "workloads": figures,
    }  # fmt: skip
    report.publish(report.result("serving", settings, content), given.output)


if __name__ == "__main__":
    main()
