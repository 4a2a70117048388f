"""perf_analyzer over ranges of concurrency and request rate, and what its users see of a server.

    python -m perf.analyzer --concurrency 1:16:5
    python -m perf.analyzer --request-rate 1:4:1 --url localhost:8001

perf_analyzer itself tells no TTFT and no ITL: these come from the file it exports. It runs once per load
level, since it takes a fixed number of requests for one level only. Every request has a prompt of its
own, so that no prefix cache answers it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from perf import export, options, report
from perf.metrics import summarize
from perf.server import Server
from perf.tools import Tool, ToolUnavailableError, fetch_perf_analyzer

_MORE_TRIES = 3
_SECONDS = 900.0  # for one load level
_WORDS = [
    "river",
    "stone",
    "window",
    "morning",
    "paper",
    "street",
    "garden",
    "winter",
    "music",
    "letter",
    "market",
    "bridge",
    "summer",
    "forest",
    "engine",
    "silver",
    "harbour",
    "candle",
    "mountain",
    "village",
    "teacher",
    "journey",
    "ocean",
    "kitchen",
    "island",
]


@dataclass(frozen=True)
class Load:
    """One load level."""

    mode: Literal["concurrency", "request_rate"]
    level: float

    @property
    def name(self) -> str:
        return f"{self.mode}={self.level:g}"


@dataclass(frozen=True)
class Shape:
    """What is asked for at each level."""

    requests: int  # at least; twice the level if that is more
    words: int  # of each prompt
    output_tokens: int


def input_data(shape: Shape, seed: str, count: int) -> dict[str, Any]:
    """The content of a file for --input-data: ``count`` requests with prompts of their own."""
    rng = random.Random(seed)
    sampling = {"max_tokens": shape.output_tokens, "ignore_eos": True, "temperature": 0}
    return {
        "data": [
            {
                "text_input": [" ".join(rng.choice(_WORDS) for _ in range(shape.words))],
                "stream": [True],
                "sampling_parameters": [json.dumps(sampling)],
                "exclude_input_in_output": [True],
                "return_num_output_tokens": [True],
                "return_num_input_tokens": [True],
            }
            for _ in range(count)
        ]
    }


def run_level(tool: Tool, url: str, model: str, load: Load, shape: Shape) -> export.Experiment:
    """Runs perf_analyzer at one level.

    Raises RuntimeError if it fails, and if an answer came in fewer than two responses or with another
    number of tokens than asked for.
    """
    # It refuses fewer requests than the level; twice as many let each of a concurrency's slots be
    # filled again.
    count = max(shape.requests, math.ceil(2 * load.level))
    with tempfile.TemporaryDirectory() as name:
        data, profile = Path(name) / "input.json", Path(name) / "profile.json"
        data.write_text(json.dumps(input_data(shape, load.name, count)))
        command = [
            str(tool.binary), "-m", model, "-u", url, "-i", "grpc", "--streaming", "--async",
            f"--input-data={data}", f"--profile-export-file={profile}",
            f"--request-count={count}", "--stability-percentage=999",
            *_load_options(load),
        ]  # fmt: skip
        said = _run(tool, command, load)
        for _ in range(_MORE_TRIES):
            if not profile.exists() or profile.stat().st_size > 0:
                break
            # Seen now and then with few requests; why is not known.
            report.say(f"perf_analyzer succeeded but exported nothing; once more. It said:\n{said}")
            profile.unlink()  # it refuses a file that is there
            said = _run(tool, command, load)
        try:
            (experiment,) = export.read(profile)
        except export.ExportError as error:
            raise RuntimeError(f"{load.name}: {error}; it said:\n{_shortened(said)}") from None
    check(experiment, shape.output_tokens)
    return experiment


def _run(tool: Tool, command: Sequence[str], load: Load) -> str:
    """What perf_analyzer says. Raises RuntimeError if it fails."""
    done = subprocess.run(
        command, env=tool.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", timeout=_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"perf_analyzer failed at {load.name}:\n{_shortened(done.stdout)}")
    return done.stdout


def _shortened(text: str) -> str:
    """Begin and end: a wrong option is told before the whole usage, a failure after all else."""
    return text if len(text) < 3000 else f"{text[:1000]}\n[...]\n{text[-2000:]}"


def check(experiment: export.Experiment, output_tokens: int) -> None:
    """Raises RuntimeError unless every answer was streamed, and whole."""
    for trace in experiment.traces:
        if output_tokens > 1 and len(trace.responses) < 2:
            raise RuntimeError("an answer came in one response: it was not streamed")
        if trace.output_tokens != output_tokens:
            raise RuntimeError(f"{trace.output_tokens} tokens came, not {output_tokens}")


def levels(text: str) -> list[float]:
    """Load levels of START, START:END or START:END:STEP, the end included where a step meets it.

    >>> levels("1:16:5"), levels("2"), levels("0.5:1:0.25")
    ([1.0, 6.0, 11.0, 16.0], [2.0], [0.5, 0.75, 1.0])
    """
    try:
        start, end, step = ([float(part) for part in text.split(":")] + [0.0, 1.0])[:3]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be START:END:STEP, not {text!r}") from None
    if text.count(":") == 0:
        end = start
    if text.count(":") == 1:
        step = 1.0
    if not (0 < start <= end and step > 0):
        raise argparse.ArgumentTypeError(f"must rise from above 0, not {text!r}")
    return [start + step * i for i in range(int((end - start) / step + 1e-9) + 1)]


def _load_options(load: Load) -> list[str]:
    if load.mode == "concurrency":
        return [f"--concurrency-range={int(load.level)}"]
    return [f"--request-rate-range={load.level:g}", "--request-distribution=poisson"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m perf.analyzer", description="Load a server with Triton's perf_analyzer."
    )
    parser.add_argument(
        "--concurrency", type=levels, default=[], metavar="START:END:STEP",
        help="requests at a time (default: 1:16:5 if no request rate is given)",
    )  # fmt: skip
    parser.add_argument(
        "--request-rate", type=levels, default=[], metavar="START:END:STEP",
        help="requests a second, with random (Poisson) arrivals",
    )  # fmt: skip
    parser.add_argument("--requests", type=int, default=32, help="per level (default: 32)")
    parser.add_argument("--words", type=int, default=128, help="of a prompt (default: 128)")
    parser.add_argument("--output-tokens", type=int, default=64, help="default: 64")
    options.add_model_options(parser)
    options.add_server_options(parser)
    options.add_output_option(parser)
    given = parser.parse_args(arguments)
    try:
        tool = fetch_perf_analyzer()
    except ToolUnavailableError as error:
        parser.exit(1, f"error: {error}\n")
    shape = Shape(given.requests, given.words, given.output_tokens)
    concurrencies = given.concurrency or ([] if given.request_rate else levels("1:16:5"))
    loads = [Load("concurrency", level) for level in concurrencies]
    loads += [Load("request_rate", level) for level in given.request_rate]
    figures = {}
    with ExitStack() as stack:
        url, settings = given.url, {}
        if url is None:
            settings = options.model_settings(given)
            url = stack.enter_context(Server(settings, dict(given.server_env))).url
        for load in loads:
            experiment = run_level(tool, url, given.model_name, load, shape)
            figures[load.name] = report.spread([summarize(experiment.traces)])
            report.say(report.table(load.name, figures[load.name]))
    content = {
        "shape": asdict(shape), "server_environment": dict(given.server_env), "levels": figures,
    }  # fmt: skip
    report.publish(report.result("analyzer", settings, content), given.output)


if __name__ == "__main__":
    main()
