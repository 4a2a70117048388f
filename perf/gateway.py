"""What the gateway costs: the same requests over gRPC and through it, one after the other.

    python -m perf.gateway --rounds 5

Each round runs both, in an order that alternates; the ratio that is told is the median of the rounds'
ratios of output tokens a second, of 32 streams at a time. Server, gateway and client share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

from perf import options, report, workloads
from perf.metrics import summarize
from perf.server import Gateway, Server
from perf.serving import run_gateway, run_grpc

_WORKLOAD = "W2"
_RUNS = {"grpc": run_grpc, "gateway": run_gateway}

Round = dict[str, dict[str, float]]
"""The figures of one run of each way."""


def run_round(number: int, addresses: dict[str, str], streams: int) -> Round:
    """Both ways once; each run has prompts of its own, so that none is answered from the cache."""
    figures: Round = {}
    ways = list(_RUNS)
    for place, way in enumerate(ways if number % 2 == 0 else ways[::-1]):
        specs = workloads.make(_WORKLOAD, len(ways) * number + place)[:streams]
        traces, start = asyncio.run(_RUNS[way](specs, addresses[way]))
        figures[way] = summarize(traces, start=start)
    return figures


def ratios(rounds: Sequence[Round], figure: str) -> dict[str, float]:
    """The gateway's figure by that of gRPC, over all rounds."""
    return report.spread_of([each["gateway"][figure] / each["grpc"][figure] for each in rounds])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m perf.gateway",
        description="Compare throughput through the OpenAI gateway with that over gRPC.",
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("--streams", type=int, default=32, metavar="N", help="default: 32")
    options.add_model_options(parser)
    options.add_output_option(parser)
    given = parser.parse_args(arguments)
    settings = options.model_settings(given)
    with ExitStack() as stack:
        server = stack.enter_context(Server(settings))
        gateway = Gateway(server.url)
        stack.enter_context(gateway)
        addresses = {"grpc": server.url, "gateway": gateway.url.removeprefix("http://")}
        for way, address in addresses.items():
            asyncio.run(_RUNS[way](workloads.warm_up(), address))
        rounds = []
        for number in range(given.rounds):
            rounds.append(run_round(number, addresses, given.streams))
            speeds = {way: each["output_tokens_per_s"] for way, each in rounds[-1].items()}
            report.say(f"[{number + 1}/{given.rounds}] tokens/s: {speeds}")
    content = {
        "streams": given.streams,
        "ways": {way: report.spread([each[way] for each in rounds]) for way in _RUNS},
        "ratio": {
            figure: ratios(rounds, figure)
            for figure in ("output_tokens_per_s", "ttft_p50_ms", "itl_p50_ms")
        },
    }
    report.publish(report.result("gateway", settings, content), given.output)


if __name__ == "__main__":
    main()
