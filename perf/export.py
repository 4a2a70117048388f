"""Reads what perf_analyzer exports: per load level, every request with the times of its responses.

Invariant: an output counts only if the request asked for it; perf_analyzer exports all the outputs a
model has, with arbitrary content for those that a response did not bring.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.metrics import Trace


class ExportError(RuntimeError):
    """The export is not what was expected; the message says in what."""


@dataclass(frozen=True)
class Experiment:
    """One load level: a concurrency, or a request rate per second."""

    mode: str  # "concurrency" or "request_rate"
    level: float
    traces: tuple[Trace, ...]
    texts: tuple[str, ...]  # per request, its output


def read(path: Path) -> list[Experiment]:
    """The experiments in a file that --profile-export-file named. Raises ExportError."""
    try:
        content = json.loads(path.read_text())
        return [_experiment(each) for each in content["experiments"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ExportError(f"{path} is no export of perf_analyzer: {error!r}") from None


def _experiment(content: Mapping[str, Any]) -> Experiment:
    requests = content["requests"]
    if not requests:
        raise ExportError("no request was completed")
    # Nanoseconds since 1970 do not fit a float: times count from the first request.
    origin = min(request["timestamp"] for request in requests)
    return Experiment(
        mode=content["experiment"]["mode"],
        level=float(content["experiment"]["value"]),
        traces=tuple(_trace(request, origin) for request in requests),
        texts=tuple(
            "".join(str(output["text_output"]) for output in request["response_outputs"])
            for request in requests
        ),
    )


def _trace(request: Mapping[str, Any], origin: int) -> Trace:
    inputs, outputs = request["request_inputs"], request["response_outputs"]
    times = [(stamp - origin) / 1e9 for stamp in request["response_timestamps"]]
    if len(times) != len(outputs):
        raise ExportError(f"{len(times)} response times for {len(outputs)} outputs")
    if not times:
        raise ExportError("a request has no response")
    tokens = [1] * len(times)
    if inputs.get("return_num_output_tokens"):
        tokens = [int(output["num_output_tokens"]) for output in outputs]
    prompt = 0
    if inputs.get("return_num_input_tokens"):
        prompt = int(outputs[0]["num_input_tokens"])
    return Trace((request["timestamp"] - origin) / 1e9, tuple(zip(times, tokens)), prompt)
