"""Beam search against Hugging Face's generate(num_beams=...), in float32, token for token."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.engine.harness import Harness, make_engine
from trident_llm.text.tokenizer import Tokenizer

VOCAB = 480  # ids that the tiny model's tokenizer has
# On a random model no token is likely: many of them must end a text, so that some text ends early.
ENDS = tuple(range(5, VOCAB, 7))


@dataclass(frozen=True)
class Beam:
    token_ids: list[int]
    logprob: float  # sum


def prompts(count: int, longest: int = 30, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def load_reference(folder: Path) -> PreTrainedModel:
    """The model in float32, its head cut to what the tokenizer has."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    size = Tokenizer.from_folder(folder).vocab_size
    head = torch.nn.Linear(model.config.hidden_size, size, bias=False)
    head.weight = torch.nn.Parameter(model.lm_head.weight[:size])
    model.lm_head = head
    model.config.vocab_size = size
    return model


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> PreTrainedModel:
    return load_reference(tiny_model)


def reference_beams(
    model: PreTrainedModel, prompt: list[int], params: dict[str, Any], **options: Any
) -> list[Beam]:
    """What generate() gives for our parameters."""
    names = {"beam_width": "num_beams", "n": "num_return_sequences", "max_tokens": "max_new_tokens"}
    names["min_tokens"] = "min_new_tokens"
    given = {names.get(name, name): value for name, value in params.items()}
    ends = list(given.pop("stop_token_ids", ()))
    words = given.pop("bad_words_token_ids", None)
    if words:
        given["bad_words_ids"] = [list(word) for word in words]
    if not given.pop("ignore_eos", True):
        ends.append(model.config.eos_token_id)
    model.generation_config.eos_token_id = ends or None
    model.generation_config.pad_token_id = 0
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]), do_sample=False, return_dict_in_generate=True,
            output_scores=True, **given, **options,
        )  # fmt: skip
    beams = []
    for ids, score, path in zip(found.sequences, found.sequences_scores, found.beam_indices):
        length = int((path >= 0).sum())
        output = ids[len(prompt) :][:length].tolist()
        penalty = params.get("length_penalty", 1.0)
        beams.append(Beam(output, float(score) * length**penalty))
    return beams


def add(harness: Harness, prompt: list[int], params: dict[str, Any]) -> str:
    return harness.add(prompt, use_beam_search=True, temperature=1.0, **params)


def check(harness: Harness, name: str, expected: list[Beam]) -> None:
    for index, beam in enumerate(expected):
        outcome = harness.outcomes[name, index]
        assert outcome.token_ids == beam.token_ids, (name, index)
        assert outcome.cumulative_logprob == pytest.approx(beam.logprob, abs=1e-3, rel=1e-4)
        assert outcome.num_deltas == 1
    assert (name, len(expected)) not in harness.outcomes


def all_kinds() -> list[dict[str, Any]]:
    """Every width, penalty and rule, with ends that come early, late, or never."""
    kinds = product((2, 4), (-1.0, 0.0, 1.0, 2.0), (False, True, "never"))
    rng = random.Random(3)
    return [
        {
            "beam_width": width,
            "n": rng.randint(1, width),
            "length_penalty": penalty,
            "early_stopping": rule,
            "max_tokens": rng.choice((1, 6, 14, 20)),
            "stop_token_ids": ENDS if i % 4 else (),
            "min_tokens": rng.choice((0, 0, 3)) if i % 4 else 0,
        }
        for i, (width, penalty, rule) in enumerate(kinds)
    ] + [
        {"beam_width": 3, "n": 3, "max_tokens": 12, "ignore_eos": False},
        {"beam_width": 3, "n": 2, "max_tokens": 12, "repetition_penalty": 1.7},
        {"beam_width": 4, "n": 4, "max_tokens": 9, "stop_token_ids": ENDS}
        | {"bad_words_token_ids": tuple((i,) for i in range(40, 200) if i not in ENDS)},
    ]


@pytest.fixture(scope="module")
def cases(reference: PreTrainedModel) -> list[tuple[list[int], dict[str, Any], list[Beam]]]:
    kinds = all_kinds()
    return [
        (prompt, kind, reference_beams(reference, prompt, kind))
        for prompt, kind in zip(prompts(len(kinds)), kinds)
    ]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 128},
        {"num_blocks": 40, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 12},
        {"num_blocks": 44, "block_size": 4, "max_num_batched_tokens": 12, "max_num_seqs": 12}
        | {"enable_prefix_caching": False},
    ],
    ids=["roomy", "preempting", "preempting without a cache"],
)
def test_beams_are_those_of_transformers_in_any_company(
    tiny_model: Path, cases: list[Any], settings: dict[str, Any], depth: int
) -> None:
    harness = Harness(make_engine(tiny_model, launch_depth=depth, **settings))
    names, others = [], []
    for number, (prompt, params, _) in enumerate(cases):
        names.append(add(harness, prompt, params))
        if number % 2:
            neighbour = {"max_tokens": 12, "n": 2, "temperature": 0.9, "seed": number}
            others.append((prompt, neighbour, harness.add(prompt, **neighbour)))
    copies = 0
    launch = harness.engine._executor.launch

    def counting(output: Any) -> Any:
        nonlocal copies
        copies += len(output.block_copies)
        return launch(output)

    harness.engine._executor.launch = counting
    harness.run()
    assert copies > 0
    if settings["num_blocks"] < 100:
        assert harness.engine.scheduler.stats.num_preemptions > 0
    for name, (_, _, expected) in zip(names, cases):
        check(harness, name, expected)
    alone = Harness(make_engine(tiny_model, num_blocks=128, enable_prefix_caching=False))
    for prompt, neighbour, name in others:
        expected_name = alone.add(prompt, **neighbour)
        alone.run()
        for index in range(2):
            expected_ids = alone.outcomes[expected_name, index].token_ids
            assert harness.outcomes[name, index].token_ids == expected_ids
