"""What requests ask of sampling, on the engine's output: chunked, cached, preempted, forked, ahead."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.engine.harness import Harness, Outcome, make_engine
from trident_llm.core.errors import ErrorCode
from trident_llm.core.request import FinishReason
from trident_llm.core.sampling_params import SamplingParams, tokenize_bad_words
from trident_llm.core.sampling_values import RepetitionDetection
from trident_llm.model import prompt_scorer
from trident_llm.text.tokenizer import Tokenizer

VOCAB = 480  # ids that the tiny model's tokenizer has


def prompts(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> Harness:
    """One request at a time, the whole prompt in one step, no prefix cache."""
    return Harness(
        make_engine(
            tiny_model, enable_prefix_caching=False, max_num_batched_tokens=256, num_blocks=80
        )
    )


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def vocab_size(tiny_model: Path) -> int:
    return Tokenizer.from_folder(tiny_model).vocab_size


def next_logits(reference: Any, token_ids: list[int], vocab_size: int) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([token_ids])).logits[0, -1, :vocab_size]
    return logits.float()


# ---- the same request in every company -------------------------------------------------------------

FEATURES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"frequency_penalty": -1.0, "presence_penalty": -0.5, "top_k": 20},
    {"logit_bias": tuple((i, 4.0) for i in range(0, 400, 3)), "top_p": 0.9},
    {"allowed_token_ids": tuple(range(10, 22)), "bad_words_token_ids": ((11, 12), (13,), (14, 15))},
    {"bad_words_token_ids": tuple((i, j) for i in range(30, 45) for j in range(30, 45))}
    | {"allowed_token_ids": tuple(range(28, 47))},
    {"min_tokens": 6, "ignore_eos": False, "stop_token_ids": tuple(range(100, 300))},
    {"min_p": 0.05, "repetition_penalty": 0.8, "logprobs": 3},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "top_k": 100}
    | {"top_p": 0.8, "min_p": 0.01, "logit_bias": ((7, 5.0), (8, -5.0)), "min_tokens": 3},
]


def requests_with_features(count: int) -> list[tuple[list[int], dict[str, Any]]]:
    rng = random.Random(7)
    texts = prompts(8, seed=1)
    requests = []
    for i in range(count):
        params = {**FEATURES[i % len(FEATURES)], "seed": i, "max_tokens": rng.randint(8, 20)}
        params["temperature"] = 0.0 if i % 4 == 3 else 1.2
        requests.append((texts[i % 8], params))
    return requests


_expected: dict[str, Outcome] = {}


def expected_outcome(alone: Harness, prompt: list[int], params: dict[str, Any]) -> Outcome:
    key = repr((prompt, params))
    if key not in _expected:
        _expected[key] = alone.generate(prompt, **params)
    return _expected[key]


@pytest.mark.parametrize(
    ("count", "depth", "settings"),
    [
        (2, 1, {"num_blocks": 80}),
        (8, 2, {"num_blocks": 30, "block_size": 4, "max_num_batched_tokens": 16}),
        (44, 1, {"num_blocks": 400, "block_size": 4, "max_num_batched_tokens": 512}),
        (44, 2, {"num_blocks": 60, "block_size": 4, "max_num_batched_tokens": 64}),
    ],
)
def test_ids_with_every_feature_do_not_depend_on_company(
    tiny_model: Path, alone: Harness, count: int, depth: int, settings: dict[str, Any]
) -> None:
    requests = requests_with_features(count)
    random.Random(count).shuffle(requests)
    engine = make_engine(
        tiny_model, launch_depth=depth, **{"max_num_seqs": min(count, 44), **settings}
    )
    harness = Harness(engine)
    names = [harness.add(prompt, **params) for prompt, params in requests]
    harness.run()
    if settings["num_blocks"] in (30, 60):
        assert engine.scheduler.stats.num_preemptions > 0
    if count == 44:
        assert engine.scheduler.stats.prefix_hits > 0
    for name, (prompt, params) in zip(names, requests):
        outcome, expected = harness.outcomes[name, 0], expected_outcome(alone, prompt, params)
        assert outcome.token_ids == expected.token_ids, params
        assert outcome.finish_reason == expected.finish_reason


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_forks_have_their_own_penalties(tiny_model: Path, alone: Harness, depth: int) -> None:
    params = {"temperature": 1.3, "seed": 5, "max_tokens": 12, "repetition_penalty": 1.3,
              "presence_penalty": 1.0, "frequency_penalty": 1.0,
              "allowed_token_ids": tuple(range(10, 40)),
              "bad_words_token_ids": tuple((i, i + 1) for i in range(10, 40))}  # fmt: skip
    prompt = prompts(1, seed=2)[0]
    harness = Harness(
        make_engine(
            tiny_model, launch_depth=depth, num_blocks=26, block_size=4, max_num_seqs=8,
            max_num_batched_tokens=16,
        )
    )  # fmt: skip
    name = harness.add(prompt, n=5, **params)
    harness.run()
    expected = alone.add(prompt, n=5, **params)
    alone.run()
    outputs = [harness.outcomes[name, index].token_ids for index in range(5)]
    assert outputs == [alone.outcomes[expected, index].token_ids for index in range(5)]
    assert len({tuple(ids) for ids in outputs}) > 1
    assert outputs[0] == alone.generate(prompt, **params).token_ids


# ---- against processors of others ------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_greedy_with_penalties_equals_a_plain_loop(
    tiny_model: Path, reference: Any, vocab_size: int, depth: int
) -> None:
    prompt = prompts(1, seed=3)[0]
    ids = list(prompt)
    processor = RepetitionPenaltyLogitsProcessor(1.3)
    for _ in range(20):
        logits = next_logits(reference, ids, vocab_size)
        logits = processor(torch.tensor([ids]), logits.unsqueeze(0))[0]
        counts = Counter(ids[len(prompt) :])
        for token_id, count in counts.items():
            logits[token_id] -= 0.5 * count + 0.8
        # Few tokens, so that they would repeat.
        ids.append(10 + int(logits[10:16].argmax()))
    harness = Harness(
        make_engine(
            tiny_model, launch_depth=depth, num_blocks=64, max_num_batched_tokens=8, max_num_seqs=4
        )
    )
    few = {"max_tokens": 20, "allowed_token_ids": tuple(range(10, 16))}
    params = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.8, **few}
    outcome = harness.generate(prompt, **params)
    assert outcome.token_ids == ids[len(prompt) :]
    assert outcome.token_ids != harness.generate(prompt, **few).token_ids


FILTERS: list[dict[str, Any]] = [
    {"temperature": 2.5},
    {"temperature": 3.0, "top_k": 90},
    {"temperature": 2.0, "top_p": 0.8},
    {"temperature": 4.0, "min_p": 0.3},
    {"temperature": 4.0, "top_k": 80, "top_p": 0.7, "min_p": 0.1, "repetition_penalty": 1.5},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_frequencies_follow_the_exact_distribution(
    tiny_model: Path, reference: Any, vocab_size: int, filters: dict[str, Any]
) -> None:
    prompt, count = [17, 230, 41], 1500
    logits = next_logits(reference, prompt, vocab_size).unsqueeze(0)
    ids = torch.tensor([prompt])
    if "repetition_penalty" in filters:
        logits = RepetitionPenaltyLogitsProcessor(filters["repetition_penalty"])(ids, logits)
    scores = logits / filters["temperature"]
    if "top_k" in filters:
        scores = TopKLogitsWarper(filters["top_k"])(ids, scores)
    if "top_p" in filters:
        scores = TopPLogitsWarper(filters["top_p"])(ids, scores)
    if "min_p" in filters:
        scores = MinPLogitsWarper(filters["min_p"])(ids.long(), scores)
    expected = torch.softmax(scores[0].double(), dim=-1) * count
    harness = Harness(
        make_engine(tiny_model, num_blocks=600, max_num_seqs=256, max_num_batched_tokens=1024)
    )
    names = [harness.add(prompt, seed=seed, max_tokens=1, **filters) for seed in range(count)]
    harness.run()
    drawn = torch.tensor([harness.outcomes[name, 0].token_ids[0] for name in names])
    observed = torch.bincount(drawn, minlength=vocab_size).double()
    assert observed[expected == 0].sum() == 0
    # Rare tokens are counted together, so that each expectation is large enough.
    rare = expected < 5
    if rare.any():
        expected = torch.cat((expected[~rare], expected[rare].sum().reshape(1)))
        observed = torch.cat((observed[~rare], observed[rare].sum().reshape(1)))
    kept = expected > 1
    statistic = float(((observed - expected) ** 2 / expected)[kept].sum())
    degrees = int(kept.sum()) - 1
    assert degrees >= 5
    assert statistic <= degrees + 4 * (2 * degrees) ** 0.5 + 1


# ---- log-probabilities of prompts ------------------------------------------------------------------


def check_prompt_logprobs(
    outcome: Outcome, prompt: list[int], count: int, reference: Any, vocab_size: int
) -> None:
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt])).logits[0, :, :vocab_size]
    expected = torch.log_softmax(logits.float(), dim=-1)
    assert outcome.prompt_logprobs is not None
    assert len(outcome.prompt_logprobs) == len(prompt)
    assert outcome.prompt_logprobs[0] is None
    for position in range(1, len(prompt)):
        entries, row = outcome.prompt_logprobs[position], expected[position - 1]
        token_id = prompt[position]
        assert entries[0].token_id == token_id
        assert entries[0].logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert entries[0].rank == int((row > row[token_id]).sum()) + 1
        top = row.topk(count).indices.tolist() if count else []
        assert {entry.token_id for entry in entries} == {token_id, *top}


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 80, "max_num_batched_tokens": 256},
        {"num_blocks": 80, "max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"num_blocks": 26, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4},
    ],
    ids=["whole", "chunked", "preempting"],
)
def test_prompt_logprobs_are_those_of_the_raw_logits(
    tiny_model: Path,
    reference: Any,
    vocab_size: int,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    depth: int,
) -> None:
    monkeypatch.setattr(prompt_scorer, "SLICE_TOKENS", 7)
    harness = Harness(make_engine(tiny_model, launch_depth=depth, **settings))
    texts = prompts(6, seed=4)
    names = [
        harness.add(
            prompt, prompt_logprobs=i % 4, temperature=1.0, repetition_penalty=2.0, max_tokens=30
        )
        for i, prompt in enumerate(texts)
    ]
    plain = harness.add(texts[0], temperature=1.0, max_tokens=30)
    harness.run()
    if settings["num_blocks"] == 26:
        assert harness.engine.scheduler.stats.num_preemptions > 0
    for i, (name, prompt) in enumerate(zip(names, texts)):
        check_prompt_logprobs(harness.outcomes[name, 0], prompt, i % 4, reference, vocab_size)
    assert harness.outcomes[plain, 0].prompt_logprobs is None


def test_prompt_logprobs_do_not_read_the_cache(
    tiny_model: Path, reference: Any, vocab_size: int
) -> None:
    harness = Harness(make_engine(tiny_model, num_blocks=64, block_size=4))
    prompt = list(range(40, 70))
    harness.generate(prompt)
    for _ in range(2):
        outcome = harness.generate(prompt, prompt_logprobs=2)
        assert outcome.num_cached_tokens == 0
        check_prompt_logprobs(outcome, prompt, 2, reference, vocab_size)
    assert harness.generate(prompt).num_cached_tokens > 0


def test_prompt_logprobs_of_a_request_that_forks(
    tiny_model: Path, reference: Any, vocab_size: int
) -> None:
    prompt = list(range(40, 60))
    harness = Harness(
        make_engine(
            tiny_model, num_blocks=20, block_size=4, max_num_batched_tokens=8, max_num_seqs=4
        )
    )
    name = harness.add(prompt, n=3, prompt_logprobs=1, temperature=1.0, max_tokens=20)
    harness.run()
    assert harness.engine.scheduler.stats.num_preemptions > 0
    check_prompt_logprobs(harness.outcomes[name, 0], prompt, 1, reference, vocab_size)


def test_one_token_has_no_logprob_before_it(alone: Harness) -> None:
    assert alone.generate([5], prompt_logprobs=3).prompt_logprobs == [None]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_prompt_is_scored_and_nothing_generated(
    tiny_model: Path, reference: Any, vocab_size: int, depth: int
) -> None:
    harness = Harness(
        make_engine(
            tiny_model, num_blocks=20, block_size=4, max_num_batched_tokens=8, max_num_seqs=4,
            launch_depth=depth,
        )
    )  # fmt: skip
    longest = [i % 400 + 3 for i in range(harness.engine.config.max_model_len)]
    cases = {length: longest[:length] for length in (1, 8, 9, 40, len(longest))}
    names = {
        length: harness.add(prompt, max_tokens=0, prompt_logprobs=2)
        for length, prompt in cases.items()
    }
    neighbour = harness.add([5, 6, 7], max_tokens=40)
    plain = harness.add([5] * 11, max_tokens=0)
    outputs = []
    while harness.engine.has_work:
        outputs += harness.step()
    for length, prompt in cases.items():
        outcome = harness.outcomes[names[length], 0]
        assert (outcome.text, outcome.token_ids, outcome.num_deltas) == ("", [], 1)
        assert outcome.finish_reason is FinishReason.LENGTH
        check_prompt_logprobs(outcome, prompt, 2, reference, vocab_size)
    assert harness.outcomes[plain, 0].finish_reason is FinishReason.LENGTH
    assert harness.outcomes[plain, 0].prompt_logprobs is None
    assert len(harness.outcomes[neighbour, 0].token_ids) == 40
    assert sum(output.request_id == plain for output in outputs) == 1


# ---- ends and choices ------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_a_repeated_pattern_ends_the_sequence(tiny_model: Path, depth: int) -> None:
    harness = Harness(make_engine(tiny_model, num_blocks=64, launch_depth=depth))

    def generate(**params: Any) -> Outcome:
        return harness.generate([7] * 9, max_tokens=30, allowed_token_ids=(7,), **params)

    detection = RepetitionDetection(max_pattern_size=3, min_pattern_size=2, min_count=3)
    outcome = generate(repetition_detection=detection)
    assert outcome.token_ids == [7] * 6  # the prompt does not count
    assert outcome.finish_reason is FinishReason.REPETITION
    assert outcome.stop_reason == "repetition_detected"
    assert len(outcome.text) == 6 * len(generate(stop_token_ids=(), min_tokens=1).text) // 30
    assert len(generate(repetition_detection=detection, min_tokens=10).token_ids) == 10
    assert generate().finish_reason is FinishReason.LENGTH


def test_the_best_of_several_are_told_at_the_end(tiny_model: Path, alone: Harness) -> None:
    prompt = prompts(1, seed=5)[0]
    params = {"temperature": 1.5, "seed": 3, "max_tokens": 6}
    every = alone.add(prompt, n=6, logprobs=0, **params)
    alone.run()
    ranked = sorted(
        (alone.outcomes[every, index] for index in range(6)), key=lambda o: -o.cumulative_logprob
    )
    harness = Harness(make_engine(tiny_model, num_blocks=64, max_num_seqs=8))
    name = harness.add(prompt, n=2, best_of=6, **params)
    outputs = []
    while harness.engine.has_work:
        outputs += harness.step()
    assert len(outputs) == 1 and set(outputs[0].deltas) == {0, 1}
    for index in range(2):
        outcome = harness.outcomes[name, index]
        assert outcome.token_ids == ranked[index].token_ids
        assert outcome.text == ranked[index].text
        assert outcome.cumulative_logprob == pytest.approx(ranked[index].cumulative_logprob)
        assert outcome.logprobs == []
        assert outcome.finish_reason is FinishReason.LENGTH


def test_bad_words_do_not_appear(tiny_model: Path, alone: Harness) -> None:
    tokenizer = Tokenizer.from_folder(tiny_model)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    prompt = prompts(1, seed=6)[0]
    words = ("dragons", "hello", "Paris")
    spelled = tokenize_bad_words(SamplingParams(bad_words=words), encode).bad_words_token_ids
    assert any(len(ids) > 1 for ids in spelled)
    # Only pieces of the words are allowed, so that they would come all the time.
    pieces = tuple({token_id for ids in spelled for token_id in ids})
    params = {"temperature": 2.0, "max_tokens": 200, "allowed_token_ids": pieces}

    def spoken(outcome: Outcome) -> set[tuple[int, ...]]:
        ids = outcome.token_ids
        return {
            word
            for word in spelled
            for start in range(len(ids))
            if tuple(ids[start : start + len(word)]) == word
        }

    assert spoken(alone.generate(prompt, **params))
    assert not spoken(alone.generate(prompt, bad_words_token_ids=spelled, **params))


@pytest.mark.parametrize("depth", [0, 2])
def test_a_request_that_forbids_every_token_ends_alone(
    tiny_model: Path, alone: Harness, depth: int
) -> None:
    harness = Harness(make_engine(tiny_model, num_blocks=64, launch_depth=depth))
    one, two = prompts(2, seed=8)
    bad = harness.add(one, allowed_token_ids=(5,), bad_words_token_ids=((5, 5),))
    good = harness.add(two)
    harness.run()
    error = harness.outcomes[bad, 0].error
    assert error is not None and error.code is ErrorCode.INVALID_ARG
    assert harness.outcomes[bad, 0].token_ids == [5]
    assert harness.outcomes[good, 0].token_ids == alone.generate(two).token_ids


def test_greedy_and_random_rows_share_a_step(tiny_model: Path, alone: Harness) -> None:
    harness = Harness(make_engine(tiny_model, num_blocks=64))
    cases = [
        (prompt, {"temperature": 0.0 if i % 2 else 1.0, "bad_words_token_ids": ((i + 3,),)})
        for i, prompt in enumerate(prompts(6, seed=9))
    ]
    names = [harness.add(prompt, **params) for prompt, params in cases]
    harness.run()
    for name, (prompt, params) in zip(names, cases):
        assert harness.outcomes[name, 0].token_ids == alone.generate(prompt, **params).token_ids


def test_ends_are_those_of_the_model_and_of_the_tokenizer(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, num_blocks=64)
    tokenizer = Tokenizer.from_folder(tiny_model)
    assert tokenizer.eos_token_id in engine.config.eos_token_ids
    from trident_llm.core.config import parse_engine_config
    from trident_llm.model.executor import Executor

    config, _ = parse_engine_config({"model": str(tiny_model), "num_blocks": 64})
    executor = Executor.load(config, vocab_size=400, eos_token_id=77)
    assert executor.scheduler_config(config).eos_token_ids == {77, tokenizer.eos_token_id}
    outside = Executor.load(config, vocab_size=400, eos_token_id=444)
    assert outside.scheduler_config(config).eos_token_ids == {tokenizer.eos_token_id}
