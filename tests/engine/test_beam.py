"""Beam search against Hugging Face's generate(num_beams=...), in float32, token for token."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.engine.harness import Harness, make_engine
from trident_llm.core.errors import ErrorCode
from trident_llm.core.request import FinishReason
from trident_llm.text.tokenizer import Tokenizer

TEXTS = (
    "The capital of France is", "Once upon a time", "Water boils at", "My favourite food is",
    "The quick brown fox", "In 1969, humans", "To make bread, you need", "She opened the door and",
    "The largest planet is", "Python is a language", "He said that", "Why is the sky blue?",
    "A recipe for soup:", "The cat sat on", "List three colours:", "Two plus two is",
    "Dear Sir or Madam,", "The weather today", "It was a dark and", "An apple a day",
)  # fmt: skip
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

    def counting(output: Any, *rest: Any) -> Any:
        nonlocal copies
        copies += len(output.block_copies)
        return launch(output, *rest)

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


def test_beams_of_the_default_model(default_model: Path) -> None:
    model = load_reference(default_model)
    tokenizer = Tokenizer.from_folder(default_model)
    engine = make_engine(default_model, num_blocks=30, block_size=4, max_num_seqs=16)
    harness = Harness(engine)
    kinds = list(product((2, 4), (0.0, 1.0, 2.0), (False, True, "never")))
    requests: list[tuple[str, list[Beam]]] = []
    for i, text in enumerate(TEXTS):
        width, penalty, rule = kinds[i * 7 % len(kinds)]
        params = {
            "beam_width": width, "n": width, "length_penalty": penalty, "early_stopping": rule,
            "max_tokens": 8, "ignore_eos": False,
        }  # fmt: skip
        ends = tuple(tokenizer.encode(".\n", add_special_tokens=False))
        prompt = tokenizer.encode(text)
        params["stop_token_ids"] = ends
        name = add(harness, prompt, params)
        requests.append((name, reference_beams(model, prompt, params)))
    harness.run()
    assert engine.scheduler.stats.num_preemptions > 0
    for name, expected in requests:
        check(harness, name, expected)


def test_a_stop_string_ends_a_beam(tiny_model: Path, reference: PreTrainedModel) -> None:
    harness = Harness(make_engine(tiny_model, num_blocks=48, block_size=4, max_num_seqs=8))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    pieces = [tokenizer.decode([token_id]) for token_id in range(VOCAB)]
    letters = tuple(i for i, text in enumerate(pieces) if text.isascii() and text.isalpha())
    others = sorted(set(range(reference.config.vocab_size)) - set(letters))
    stopped = set()
    for i, prompt in enumerate(prompts(8, longest=12, seed=2)):
        params = {
            "beam_width": 4, "n": 4, "max_tokens": 12, "early_stopping": bool(i % 2),
            "length_penalty": 0.5 * (i % 3),
        }  # fmt: skip
        free = add(harness, prompt, {**params, "allowed_token_ids": letters})
        harness.run()
        texts = [harness.outcomes[free, index].text for index in range(4)]
        stop = (texts[3][2:4], texts[0][-3])
        name = add(harness, prompt, {**params, "allowed_token_ids": letters, "stop": stop})
        harness.run()
        expected = reference_beams(
            reference, prompt, params,
            stop_strings=list(stop), tokenizer=tokenizer, suppress_tokens=others,
        )  # fmt: skip
        check(harness, name, expected)
        for index in range(4):
            outcome = harness.outcomes[name, index]
            assert not any(string in outcome.text for string in stop)
            at_end = outcome.finish_reason is FinishReason.STOP
            assert (outcome.stop_reason in stop) if at_end else len(outcome.token_ids) == 12
            stopped.add(outcome.stop_reason)
    assert len(stopped) > 4


def test_the_prompt_is_computed_once_and_its_full_blocks_are_held_once(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, num_blocks=128, block_size=4, max_num_seqs=8)
    harness = Harness(engine)
    prompt = prompts(1, seed=4)[0] * 2 + [5] * 7
    prompt = prompt[: len(prompt) // 4 * 4 + 2]
    add(harness, prompt, {"beam_width": 4, "n": 4, "max_tokens": 20})
    full, pool = len(prompt) // 4, engine.scheduler.pool
    steps = 0
    while harness.engine.has_work:
        harness.step()
        beams = engine.scheduler.running
        if len(beams) == 4:
            steps += 1
            assert len({id(block) for beam in beams for block in beam.blocks[:full]}) == full
            assert all(block.ref_count == 4 for block in beams[0].blocks[:full])
            distinct = {id(block) for beam in beams for block in beam.blocks}
            assert pool.num_held == len(distinct) <= full + 4 * (len(beams[0].blocks) - full)
    assert steps > 10
    assert engine.scheduler.stats.prompt_tokens_scheduled == len(prompt)
    assert engine.scheduler.stats.scheduled_tokens == len(prompt) + 4 * 19


@pytest.mark.parametrize("depth", [0, 1])
def test_an_abort_at_any_moment_frees_everything(tiny_model: Path, depth: int) -> None:
    engine = make_engine(
        tiny_model,
        num_blocks=40,
        block_size=4,
        max_num_batched_tokens=8,
        max_num_seqs=6,
        launch_depth=depth,
    )
    harness = Harness(engine)
    for steps in range(12):
        name = add(harness, list(range(3, 23)), {"beam_width": 3, "n": 2, "max_tokens": 30})
        other = harness.add(list(range(3, 13)), max_tokens=20, n=2, temperature=1.0)
        for _ in range(steps):
            harness.step()
        engine.abort(name)
        harness.run()
        error = harness.outcomes[name, 0].error
        assert error is not None and error.code is ErrorCode.CANCELLED
        assert len(harness.outcomes[other, 1].token_ids) == 20


def test_a_search_with_too_few_ends_is_told_so(tiny_model: Path) -> None:
    harness = Harness(make_engine(tiny_model, num_blocks=64))
    params = {"beam_width": 4, "n": 2, "max_tokens": 3}
    name = add(harness, [5, 6], {**params, "allowed_token_ids": (7,)})
    some = add(harness, [5, 6], {**params, "allowed_token_ids": (7, 8)})
    harness.run()
    error = harness.outcomes[name, 0].error
    assert error is not None and error.code is ErrorCode.INVALID_ARG
    assert len(harness.outcomes[some, 1].token_ids) == 3


def test_a_search_that_is_not_finite_ends_alone(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, num_blocks=64)
    harness = Harness(engine)
    bad = add(harness, [5, 6, 7], {"beam_width": 2, "n": 1})
    good = harness.add([5, 6, 8])
    harness.step()
    forward = engine._executor.runner.decoder.forward

    def poisoned(batch: Any, kv: Any) -> torch.Tensor:
        logits = forward(batch, kv)
        logits[1] = torch.nan
        return logits

    engine._executor.runner.decoder.forward = poisoned
    harness.step()
    engine._executor.runner.decoder.forward = forward
    harness.run()
    error = harness.outcomes[bad, 0].error
    assert error is not None and error.code is ErrorCode.INTERNAL
    assert harness.outcomes[good, 0].error is None
    assert len(harness.outcomes[good, 0].token_ids) == 8


def test_prompt_logprobs_of_a_search(tiny_model: Path) -> None:
    prompt = list(range(40, 60))
    tight = Harness(
        make_engine(
            tiny_model, num_blocks=20, block_size=4, max_num_batched_tokens=8, max_num_seqs=6
        )
    )
    alone = Harness(make_engine(tiny_model, num_blocks=64))
    params = {"beam_width": 3, "n": 3, "max_tokens": 16, "prompt_logprobs": 1}
    name = add(tight, prompt, params)
    other = tight.add(prompt, max_tokens=30)
    tight.run()
    expected = alone.generate(prompt, prompt_logprobs=1)
    found = tight.outcomes[name, 0].prompt_logprobs
    assert found is not None and expected.prompt_logprobs is not None
    for mine, theirs in zip(found[1:], expected.prompt_logprobs[1:]):
        assert [entry.token_id for entry in mine] == [entry.token_id for entry in theirs]
        assert mine[0].logprob == pytest.approx(theirs[0].logprob, abs=1e-4)
    assert tight.outcomes[other, 0].token_ids == alone.generate(prompt, max_tokens=30).token_ids
