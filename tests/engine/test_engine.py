"""The engine on a tiny model; the oracle is the same request alone, unchunked, uncached."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import Harness, Outcome, make_engine
from trident_llm.core.errors import ErrorCode
from trident_llm.core.request import FinishReason
from trident_llm.engine.faults import EngineDeadError
from trident_llm.text.tokenizer import Tokenizer

VOCAB = 500


def prompts(count: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> Harness:
    """One request at a time, the whole prompt in one step, no prefix cache."""
    return Harness(
        make_engine(
            tiny_model, enable_prefix_caching=False, max_num_batched_tokens=256, num_blocks=64
        )
    )


_expected: dict[str, Outcome] = {}


def expected_outcome(alone: Harness, prompt: list[int], params: dict[str, Any]) -> Outcome:
    """The request's outcome alone, computed once for all tests of this module."""
    key = repr((prompt, params))
    if key not in _expected:
        _expected[key] = alone.generate(prompt, **params)
    return _expected[key]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 64},
        {"num_blocks": 20, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"num_blocks": 40, "max_num_batched_tokens": 8, "max_num_seqs": 4, "block_size": 4},
    ],
    ids=["roomy", "preempting", "chunked"],
)
def test_ids_do_not_depend_on_neighbours_chunks_cache_or_preemption(
    tiny_model: Path, alone: Harness, settings: dict[str, Any], depth: int
) -> None:
    harness = Harness(make_engine(tiny_model, launch_depth=depth, **settings))
    requests: list[tuple[list[int], dict[str, Any]]] = []
    rng = random.Random(1)
    for prompt in prompts(14, longest=40) * 2:
        sampled = {"temperature": rng.choice([0.0, 0.8]), "top_p": 0.9, "seed": rng.randrange(9)}
        requests.append((prompt, {**sampled, "max_tokens": rng.randint(1, 24)}))
    names = [harness.add(prompt, **params) for prompt, params in requests]
    harness.run()
    if settings["num_blocks"] == 20:
        assert harness.engine.scheduler.stats.num_preemptions > 0
    if settings["num_blocks"] == 64:
        assert harness.engine.scheduler.stats.prefix_hits > 0
    for name, (prompt, params) in zip(names, requests):
        expected = expected_outcome(alone, prompt, params)
        assert harness.outcomes[name, 0].token_ids == expected.token_ids
        assert harness.outcomes[name, 0].text == expected.text


def test_forked_sequences_draw_as_they_would_alone(tiny_model: Path, alone: Harness) -> None:
    harness = Harness(make_engine(tiny_model, num_blocks=24, block_size=4, max_num_seqs=8))
    prompt = prompts(1, longest=20, seed=3)[0]
    name = harness.add(prompt, n=6, temperature=1.0, seed=11, max_tokens=10)
    harness.run()
    ids = [harness.outcomes[name, index].token_ids for index in range(6)]
    assert len({tuple(item) for item in ids}) > 1
    expected = alone.add(prompt, n=6, temperature=1.0, seed=11, max_tokens=10)
    alone.run()
    assert ids == [alone.outcomes[expected, index].token_ids for index in range(6)]


def test_streamed_text_is_the_decoded_output(tiny_model: Path, alone: Harness) -> None:
    tokenizer = Tokenizer.from_folder(tiny_model)
    for prompt in prompts(5, seed=5):
        outcome = alone.generate(prompt, max_tokens=30, temperature=1.0)
        whole = tokenizer.decode(prompt + outcome.token_ids)
        assert whole == tokenizer.decode(prompt) + outcome.text


def test_a_stop_string_ends_the_text_before_it(tiny_model: Path, alone: Harness) -> None:
    prompt = prompts(1, seed=6)[0]
    free = alone.generate(prompt, max_tokens=24)
    stop = free.text[4:7]
    cut = free.text.index(stop)
    for include, text in ((False, free.text[:cut]), (True, free.text[:cut] + stop)):
        outcome = alone.generate(
            prompt, max_tokens=24, stop=(stop,), include_stop_str_in_output=include
        )
        assert (outcome.text, outcome.stop_reason) == (text, stop)
        assert outcome.finish_reason is FinishReason.STOP
        assert len(outcome.token_ids) < 24


def test_stop_strings_are_not_looked_for_before_min_tokens(
    tiny_model: Path, alone: Harness
) -> None:
    prompt = prompts(1, seed=6)[0]
    free = alone.generate(prompt, max_tokens=24)
    outcome = alone.generate(prompt, max_tokens=24, min_tokens=24, stop=(free.text[2],))
    assert outcome.text == free.text


def test_a_stop_token_ends_the_sequence_and_shows_no_text(tiny_model: Path, alone: Harness) -> None:
    prompt = prompts(1, seed=7)[0]
    free = alone.generate(prompt, max_tokens=12)
    stop = free.token_ids[5]
    first = free.token_ids.index(stop)
    outcome = alone.generate(prompt, max_tokens=12, stop_token_ids=(stop,))
    assert outcome.token_ids == free.token_ids[: first + 1]
    assert outcome.stop_reason == stop
    shorter = alone.generate(prompt, max_tokens=max(1, first)) if first else None
    assert outcome.text == (shorter.text if shorter else "")
    forbidden = alone.generate(prompt, max_tokens=12, min_tokens=12, stop_token_ids=(stop,))
    assert stop not in forbidden.token_ids[:-1]


def test_the_end_token_of_the_model(tiny_model: Path, alone: Harness) -> None:
    eos = next(iter(alone.engine.config.eos_token_ids))
    prompt = prompts(1, seed=8)[0]
    endless = alone.generate(prompt, max_tokens=200, temperature=3.0, min_p=0.0, seed=4)
    if eos in endless.token_ids:
        ended = alone.generate(prompt, max_tokens=200, temperature=3.0, seed=4, ignore_eos=False)
        assert ended.token_ids == endless.token_ids[: endless.token_ids.index(eos) + 1]
        assert ended.finish_reason is FinishReason.STOP
    held = alone.generate(
        prompt, max_tokens=60, min_tokens=60, temperature=3.0, seed=4, ignore_eos=False
    )
    assert eos not in held.token_ids[:-1]


def test_logprobs_are_those_of_the_raw_logits(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    prompt = prompts(1, longest=20, seed=9)[0]
    harness = Harness(
        make_engine(tiny_model, num_blocks=32, max_num_batched_tokens=8, max_num_seqs=8)
    )
    outcome = harness.generate(prompt, max_tokens=6, temperature=0.7, top_k=5, logprobs=3, seed=1)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + outcome.token_ids])).logits[0]
    size = Tokenizer.from_folder(tiny_model).vocab_size
    expected = torch.log_softmax(logits[len(prompt) - 1 : -1, :size].float(), dim=-1)
    total = 0.0
    for position, entries in enumerate(outcome.logprobs):
        row = expected[position]
        token_id = outcome.token_ids[position]
        assert entries[0].token_id == token_id
        assert entries[0].logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert entries[0].rank == int((row > row[token_id]).sum()) + 1
        assert {e.token_id for e in entries} == {token_id, *row.topk(3).indices.tolist()}
        total += float(row[token_id])
    assert outcome.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_ids_beyond_the_tokenizer_are_never_sampled(tiny_model: Path) -> None:
    harness = Harness(make_engine(tiny_model, num_blocks=64))
    size = Tokenizer.from_folder(tiny_model).vocab_size
    for seed in range(4):
        outcome = harness.generate([5, 6], max_tokens=60, temperature=50.0, seed=seed)
        assert max(outcome.token_ids) < size


def test_a_row_that_is_not_finite_ends_alone(tiny_model: Path, alone: Harness) -> None:
    engine = make_engine(tiny_model, num_blocks=64)
    harness = Harness(engine)
    one, two = prompts(2, seed=10)
    bad, good = harness.add(one), harness.add(two)
    harness.step()
    forward = engine._executor.runner.decoder.forward

    def poisoned(batch: Any, kv: Any) -> torch.Tensor:
        logits = forward(batch, kv)
        logits[0] = torch.nan
        return logits

    engine._executor.runner.decoder.forward = poisoned
    harness.step()
    engine._executor.runner.decoder.forward = forward
    harness.run()
    error = harness.outcomes[bad, 0].error
    assert error is not None and error.code is ErrorCode.INTERNAL
    assert harness.outcomes[good, 0].token_ids == alone.generate(two).token_ids


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, num_blocks=64)
    harness = Harness(engine)
    first = harness.add([5, 6, 7])
    launch = engine._executor.launch

    def broken(output: Any) -> Any:
        raise RuntimeError("the device is gone")

    engine._executor.launch = broken
    harness.step()
    harness.step()
    error = harness.outcomes[first, 0].error
    assert error is not None and error.code is ErrorCode.INTERNAL
    engine._executor.launch = launch
    assert len(harness.generate([5, 6, 7]).token_ids) == 8
    engine._executor.launch = broken
    for _ in range(2):
        harness.add([5])
        harness.step()
    harness.add([5])
    with pytest.raises(EngineDeadError):
        harness.step()
    assert engine.num_requests == 0


def test_abort_frees_everything_at_any_moment(tiny_model: Path) -> None:
    for steps in range(6):
        harness = Harness(
            make_engine(tiny_model, num_blocks=32, max_num_batched_tokens=8, max_num_seqs=4)
        )
        name = harness.add(list(range(3, 33)), n=2, temperature=1.0)
        for _ in range(steps):
            harness.step()
        harness.engine.abort(name)
        harness.engine.abort(name)
        harness.engine.abort("no such request")
        harness.run()
        error = harness.outcomes[name, 0].error
        assert error is not None and error.code is ErrorCode.CANCELLED
        assert harness.finished == [name]


def test_poison_in_free_blocks_reaches_nobody(tiny_model: Path, alone: Harness) -> None:
    engine = make_engine(tiny_model, num_blocks=64, block_size=4)
    engine._executor.runner.kv_cache.data.fill_(torch.nan)
    harness = Harness(engine)
    cases = prompts(6, longest=30, seed=12)
    names = [harness.add(prompt) for prompt in cases]
    harness.run()
    for name, prompt in zip(names, cases):
        assert harness.outcomes[name, 0].token_ids == alone.generate(prompt).token_ids


def test_a_decode_token_and_a_prefill_chunk_run_in_one_forward(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, num_blocks=64, max_num_batched_tokens=16, max_num_seqs=4)
    harness = Harness(engine)
    harness.add([5, 6, 7])
    harness.step()
    harness.add(list(range(3, 43)))
    query_lengths: list[list[int]] = []
    forward = engine._executor.runner.decoder.forward

    def recording(batch: Any, kv: Any) -> torch.Tensor:
        query_lengths.append(batch.cu_seqlens_q.diff().tolist())
        return forward(batch, kv)

    engine._executor.runner.decoder.forward = recording
    harness.step()
    assert query_lengths == [[1, 15]]
