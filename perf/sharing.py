"""The KV memory that sharing saves: several continuations of a prompt, and the beams of a search.

    python -m perf.sharing --output perf/results/sharing.json

Owns the counting: at every step, the blocks that the pool holds beside those that the running sequences
would hold if each had its own. The prefix cache is off, so that different requests share nothing. The
lengths are those of the workload "alpaca"; the prompts are instructions in English, since how late
beams part depends on how sure the model is. Beside it stand the figures of the paper on PagedAttention
(arXiv 2309.06180, section 6.3, OPT-13B on Alpaca).
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from perf import options, report, workloads
from perf.engine import LoadedEngine, load
from perf.workloads import RequestSpec
from trident_llm.core.request import Request
from trident_llm.core.sampling_params import SamplingParams
from trident_llm.engine.engine import Engine
from trident_llm.text.tokenizer import Tokenizer

WIDTHS = (2, 4, 6)
# Percent of the blocks saved, by the number of sequences.
PAPER = {
    "parallel sampling": {2: 6.09, 4: 8.53, 6: 9.79},
    "beam search": {2: 37.56, 4: 53.13, 6: 55.16},
}
_INSTRUCTIONS = (
    "Give three tips for staying healthy.", "Describe the structure of an atom.",
    "How can we reduce air pollution?", "Write a short story about a dog who finds a key.",
    "Explain why the sky is blue to a child.", "List five uses of baking soda in the kitchen.",
    "Rewrite the sentence in the passive voice: The chef cooked a meal.",
    "Name the planets in order of their distance from the sun.",
    "Compare a bicycle and a car as ways to travel in a city.",
    "Summarize the plot of a famous play in two sentences.",
    "Suggest a title for an article about sleep.", "Translate the word for bread into French.",
    "Write an email that asks a colleague for last month's report.",
    "What are the main causes of the decline of bees?", "Edit this text for spelling and grammar.",
    "Classify these animals as mammals or birds: bat, hen, whale, owl.",
)  # fmt: skip


def requests(tokenizer: Tokenizer, count: int) -> list[RequestSpec]:
    """Requests with the lengths of Alpaca whose prompts are instructions, cut to these lengths."""
    rng = random.Random("sharing")

    def draw(length: int) -> tuple[int, ...]:
        ids: list[int] = []
        while len(ids) < length:
            ids += tokenizer.encode(rng.choice(_INSTRUCTIONS) + "\n", add_special_tokens=False)
        return tuple(ids[:length])

    lengths = workloads.log_normal_lengths(workloads.ALPACA, count)
    return workloads.requests(lengths, draw)


def params_of(kind: str, width: int, output_len: int) -> SamplingParams:
    """``width`` sequences of exactly ``output_len`` tokens, drawn or searched for."""
    if kind == "beam search":
        return SamplingParams(
            use_beam_search=True, beam_width=width, n=width, max_tokens=output_len, seed=0,
            ignore_eos=True,
        )  # fmt: skip
    return SamplingParams(n=width, max_tokens=output_len, seed=0, ignore_eos=True)


def measure(
    engine: Engine, specs: Sequence[RequestSpec], params: Callable[[int], SamplingParams]
) -> dict[str, float]:
    """Percent of the blocks that sharing saves, over all steps; ``params`` by output length.

    Raises RuntimeError if a request fails.
    """
    for number, spec in enumerate(specs):
        engine.add(Request(str(number), list(spec.prompt), params(spec.output_len)))
    scheduler = engine.scheduler
    scheduler.reset_stats()
    began, steps, held, unshared = time.perf_counter(), 0, 0, 0
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"a request failed: {output.error}")
        steps += 1
        held += scheduler.pool.num_held
        unshared += sum(len(seq.blocks) for seq in scheduler.running)
    return {
        "saved_percent": round(100 * (1 - held / unshared), 2),
        "held_blocks_mean": round(held / steps, 1),
        "unshared_blocks_mean": round(unshared / steps, 1),
        "steps": steps,
        "preemptions": scheduler.stats.num_preemptions,
        "wall_s": round(time.perf_counter() - began, 2),
    }


def measure_all(loaded: LoadedEngine, specs: Sequence[RequestSpec]) -> dict[str, Any]:
    """The figures of each kind and number of sequences, beside the paper's."""
    figures: dict[str, Any] = {}
    for kind, published in PAPER.items():
        for width in WIDTHS:

            def params(length: int, kind: str = kind, width: int = width) -> SamplingParams:
                return params_of(kind, width, length)

            found = measure(loaded.engine, specs, params) | {"paper_percent": published[width]}
            figures.setdefault(kind, {})[str(width)] = found
            report.say(
                f"{kind}, {width} sequences: {found['saved_percent']:.1f} % of the blocks saved "
                f"(paper: {published[width]:.1f} %), {found['wall_s']:.1f} s"
            )
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.sharing", description=__doc__)
    parser.add_argument(
        "--requests", type=int, default=32, metavar="N", help="how many, all at once (default: 32)"
    )
    options.add_model_options(parser)
    options.add_output_option(parser)
    given = parser.parse_args(arguments)
    settings = options.model_settings(given) | {"enable_prefix_caching": False}
    loaded = load(settings)
    report.say(f"{loaded.limits}; loaded in {loaded.load_s:.1f} s")
    specs = requests(Tokenizer.from_folder(settings["model"]), given.requests)
    lengths = {
        "requests": len(specs),
        "prompt_tokens_mean": round(sum(len(spec.prompt) for spec in specs) / len(specs), 1),
        "output_tokens_mean": round(sum(spec.output_len for spec in specs) / len(specs), 1),
    }
    content = {"effective": loaded.limits, "lengths": lengths}
    content["figures"] = measure_all(loaded, specs)
    named = settings | {"model": Path(settings["model"]).name}
    report.publish(report.result("sharing", named, content), given.output)


if __name__ == "__main__":
    main()
