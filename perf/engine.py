"""The engine alone, in this process: no server, no client, no other thread.

    python -m perf.engine --workloads W1,W2 --repetitions 5

Owns the loop that feeds an engine and notes when its tokens come.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from perf import options, report, worker, workloads
from perf.metrics import Trace, summarize
from perf.workloads import RequestSpec
from trident_llm.core.config import parse_engine_config
from trident_llm.core.request import Request
from trident_llm.core.sampling_params import SamplingParams
from trident_llm.engine.engine import Engine
from trident_llm.model.executor import Executor
from trident_llm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadedEngine:
    """An engine and what of it a workload must know."""

    engine: Engine
    vocab_size: int
    limits: str  # the effective settings
    load_s: float


def load(settings: dict[str, Any]) -> LoadedEngine:
    """Makes an engine of settings as in ``model.json``."""
    began = time.perf_counter()
    config, warnings = parse_engine_config(settings)
    for warning in warnings:
        report.say(warning)
    tokenizer = Tokenizer.from_folder(config.tokenizer or config.model)
    executor = Executor.load(
        config, vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.eos_token_id
    )
    engine = Engine(
        executor,
        executor.scheduler_config(config),
        tokenizer,
        launch_depth=executor.limits.launch_depth,
    )
    seconds = time.perf_counter() - began
    return LoadedEngine(engine, tokenizer.vocab_size, executor.limits.describe(), seconds)


def run(engine: Engine, specs: Sequence[RequestSpec]) -> tuple[list[Trace], float]:
    """Sends the requests at their times, steps until all ended; the traces, and when it began.

    Raises RuntimeError if a request is too long for the engine, or fails.
    """
    limit = engine.config.max_model_len
    for spec in specs:
        if len(spec.prompt) + spec.output_len > limit:
            raise RuntimeError(
                f"a request of {len(spec.prompt)} + {spec.output_len} tokens is longer than the "
                f"{limit} that this engine takes; choose other workloads, a larger pool or model"
            )
    responses: dict[str, list[tuple[float, int]]] = {str(i): [] for i in range(len(specs))}
    start = time.perf_counter()
    waiting = _requests(specs)
    upcoming = next(waiting, None)
    while upcoming is not None or engine.has_work:
        now = time.perf_counter() - start
        while upcoming is not None and specs[int(upcoming.request_id)].arrival <= now:
            engine.add(upcoming)
            upcoming = next(waiting, None)
        if not engine.has_work:
            assert upcoming is not None
            time.sleep(max(0.0, specs[int(upcoming.request_id)].arrival - now))
            continue
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"a request failed: {output.error}")
            tokens = sum(len(delta.token_ids) for delta in output.deltas.values())
            if tokens:
                responses[output.request_id].append((time.perf_counter(), tokens))
    traces = [
        Trace(start + spec.arrival, tuple(responses[str(i)]), len(spec.prompt))
        for i, spec in enumerate(specs)
    ]
    for spec, trace in zip(specs, traces):
        if trace.output_tokens != spec.output_len:
            raise RuntimeError(f"{trace.output_tokens} tokens came, not {spec.output_len}")
    return traces, start


def _requests(specs: Sequence[RequestSpec]) -> Iterator[Request]:
    for number, spec in enumerate(specs):
        params = SamplingParams(
            temperature=0.0, max_tokens=spec.output_len, seed=0, ignore_eos=True
        )
        yield Request(str(number), list(spec.prompt), params)


def measure(loaded: LoadedEngine, name: str, repetition: int) -> dict[str, float]:
    """The figures of one run of a workload."""
    specs = workloads.make(name, repetition, vocab_size=loaded.vocab_size)
    traces, start = run(loaded.engine, specs)
    return summarize(traces, start=start)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.engine", description=__doc__)
    options.add_workload_options(parser, default="W1,W2,W3,W4")
    options.add_model_options(parser)
    options.add_output_option(parser)
    worker.add_option(parser)
    given = parser.parse_args(arguments)
    settings = options.model_settings(given)
    loaded = load(settings)
    report.say(f"{loaded.limits}; loaded in {loaded.load_s:.1f} s")
    run(loaded.engine, workloads.warm_up(vocab_size=loaded.vocab_size))

    def one(name: str, repetition: int) -> dict[str, float]:
        return measure(loaded, name, repetition)

    if given.worker:
        worker.answer(one)
        return
    figures = options.repeat(one, given.workloads, given.repetitions)
    content = {"effective": loaded.limits, "load_s": round(loaded.load_s, 2), "workloads": figures}
    report.publish(report.result("engine", settings, content), given.output)


if __name__ == "__main__":
    main()
