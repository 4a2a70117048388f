from __future__ import annotations

import json
from typing import Any

import pytest

from trident_llm.core.errors import ErrorCode, RequestError
from trident_llm.core.sampling_params import (
    SamplingParams,
    check_against_model,
    defaults_from_generation_config,
    parse_sampling_params,
    tokenize_bad_words,
    truncate_prompt,
)
from trident_llm.core.sampling_values import RepetitionDetection


def test_defaults_are_vllms() -> None:
    params = parse_sampling_params({})
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.max_tokens, params.min_tokens, params.logprobs) == (16, 0, None)


def test_strings_are_read_as_what_they_say() -> None:
    params = parse_sampling_params(
        {
            "temperature": "0",
            "max_tokens": "1500",
            "ignore_eos": "False",
            "include_stop_str_in_output": "true",
            "top_k": "-1",
            "seed": "7",
        }
    )
    assert params.greedy
    assert params.max_tokens == 1500
    assert params.ignore_eos is False
    assert params.include_stop_str_in_output is True
    assert params.top_k == 0
    assert params.seed == 7


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", True),
        ("temperature", None),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.01),
        ("n", 0),
        ("n", 5_000_000),
        ("n", []),
        ("max_tokens", -1),
        ("max_tokens", "5.5"),
        ("max_tokens", {}),
        ("min_tokens", -1),
        ("seed", 1.5),
        ("seed", 2**70),
        ("stop", [""]),
        ("stop", ""),
        ("stop", [None]),
        ("stop", 5),
        ("stop", ["x"] * 17),
        ("stop", "x" * 257),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 3),
        ("ignore_eos", "maybe"),
        ("ignore_eos", 2),
        ("logprobs", -1),
        ("stream_interval", 0),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", [5]),
        ("logit_bias", "{"),
        ("logit_bias", {str(i): 0 for i in range(1025)}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", 5),
        ("bad_words", [""]),
        ("bad_words", [" "]),
        ("bad_words", "x"),
        ("bad_words", [5]),
        ("bad_words", ["\ud800"]),
        ("bad_words", ["x"] * 257),
        ("best_of", 0),
        ("best_of", 65),
        ("prompt_logprobs", -1),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("repetition_detection", 5),
        ("repetition_detection", {"max_pattern_size": 3}),
        ("repetition_detection", {"max_pattern_size": 3, "min_count": 1}),
        ("repetition_detection", {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}),
        ("repetition_detection", {"max_pattern_size": 10**9, "min_count": 2}),
        ("repetition_detection", {"pattern": 3}),
        ("use_beam_search", "yes"),
        ("beam_width", 0),
        ("beam_width", 65),
        ("beam_width", 2),
        ("length_penalty", 0),
        ("length_penalty", "nan"),
        ("length_penalty", 11),
        ("early_stopping", True),
        ("early_stopping", "never"),
        ("early_stopping", "always"),
        ("presence_penalty", "much"),
        ("presence_penalty", True),
        ("lora_name", "x"),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse_sampling_params({name: value})
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert str(caught.value).startswith(f"INVALID_ARG sampling_parameters.{name}: ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 0.0),
        ("presence_penalty", "0.0"),
        ("repetition_penalty", 1),
        ("repetition_penalty", "1.0"),
        ("beam_width", 1),
        ("beam_width", None),
        ("length_penalty", 1.0),
        ("early_stopping", False),
        ("early_stopping", None),
        ("use_beam_search", False),
        ("use_beam_search", "false"),
        ("best_of", None),
        ("logit_bias", None),
        ("allowed_token_ids", None),
        ("bad_words", []),
        ("truncate_prompt_tokens", None),
        ("repetition_detection", None),
        ("repetition_detection", {"max_pattern_size": 0}),
        ("early_stopping", "False"),
        ("prompt_logprobs", "null"),
    ],
)
def test_a_value_that_asks_for_nothing_is_accepted(name: str, value: Any) -> None:
    assert parse_sampling_params({name: value}) == SamplingParams()


def test_lists_and_objects_are_read_also_from_json_strings() -> None:
    detection = {"max_pattern_size": 4, "min_count": 3}
    expected = SamplingParams(
        logit_bias=((5, -1.5), (12, 2.0)),
        allowed_token_ids=(3, 1),
        stop_token_ids=(4,),
        repetition_detection=RepetitionDetection(4, 1, 3),
    )
    values = {
        "logit_bias": {"12": "2", 5: -1.5},
        "allowed_token_ids": [3, 1, 3],
        "stop_token_ids": [4],
    }
    assert parse_sampling_params({**values, "repetition_detection": detection}) == expected
    values = {"logit_bias": '{"12": 2, "5": -1.5}', "allowed_token_ids": "[3, 1]"}
    texts = {"stop_token_ids": "[4]", "repetition_detection": json.dumps(detection)}
    assert parse_sampling_params({**values, **texts}) == expected


def test_what_repeats() -> None:
    def repeats(token_ids: list[int], *sizes: int) -> bool:
        return RepetitionDetection(*sizes).repeats(token_ids)

    assert repeats([9, 1, 2, 1, 2, 1, 2], 2, 1, 3)
    assert not repeats([9, 1, 2, 1, 2, 1, 2, 3], 2, 1, 3)
    assert not repeats([1, 2, 1, 2], 2, 1, 3)
    assert not repeats([1, 2, 1, 2, 1, 2], 1, 1, 3)
    assert not repeats([5, 5, 5, 5], 4, 2, 3)
    assert repeats([5, 5, 5, 5, 5, 5], 4, 2, 3)
    assert not repeats([2, 2, 1, 2, 1, 2], 2, 1, 3)
    assert not repeats([], 2, 1, 2)


def test_bad_words_are_spelled_at_a_beginning_and_after_a_blank() -> None:
    def encode(text: str) -> list[int]:
        return [ord(char) for char in text]

    params = tokenize_bad_words(SamplingParams(bad_words=("ab", " ab", "c")), encode)
    assert params.bad_words_token_ids == ((97, 98), (32, 97, 98), (99,), (32, 99))
    with pytest.raises(RequestError, match="bad_words: must hold words of at least one token"):
        tokenize_bad_words(SamplingParams(bad_words=("x",)), lambda text: [])


@pytest.mark.parametrize(
    ("keep", "max_tokens", "expected"),
    [
        (None, 16, 50),
        (7, 16, 7),
        (60, 16, 50),
        (-1, 16, 48),
        (-1, None, 50),
        (-1, 30, 34),
        (-1, 100, 1),
    ],
)
def test_a_prompt_is_cut_at_its_beginning(
    keep: int | None, max_tokens: int | None, expected: int
) -> None:
    params = SamplingParams(truncate_prompt_tokens=keep, max_tokens=max_tokens)
    assert truncate_prompt(list(range(50)), params, 64) == list(range(50))[-expected:]


def test_what_follows_from_a_request() -> None:
    assert SamplingParams(n=2).num_sequences == 2
    assert SamplingParams(n=2, best_of=5).num_sequences == 5
    assert SamplingParams(n=2, best_of=2).sampled_logprobs is None
    assert SamplingParams(n=2, best_of=5).sampled_logprobs == 0
    assert SamplingParams(n=2, best_of=5, logprobs=3).sampled_logprobs == 3
    assert SamplingParams().reads_prefix_cache
    assert not SamplingParams(prompt_logprobs=0).reads_prefix_cache
    assert not SamplingParams(skip_reading_prefix_cache=True).reads_prefix_cache


def test_an_unknown_name_is_refused_without_echoing_it() -> None:
    with pytest.raises(RequestError, match="INVALID_ARG sampling_parameters: holds an unknown"):
        parse_sampling_params({"temprature": 1})
    assert parse_sampling_params({"x-header": "1"}, ignore_unknown=True) == SamplingParams()


def test_combinations_that_contradict_each_other() -> None:
    for values in (
        {"min_tokens": 5, "max_tokens": 4},
        {"stop": "x", "detokenize": False},
        {"n": 2, "temperature": 0},
        {"best_of": 2, "temperature": 0},
        {"n": 3, "best_of": 2},
    ):
        with pytest.raises(RequestError):
            parse_sampling_params(values)


def beams(**values: Any) -> SamplingParams:
    return parse_sampling_params({"use_beam_search": True, **values})


def test_a_beam_search() -> None:
    params = beams(beam_width="4", n=2, length_penalty="0.5", early_stopping="never")
    assert (params.num_sequences, params.n, params.length_penalty) == (4, 2, 0.5)
    assert params.early_stopping == "never"
    assert params.sampled_logprobs is None
    assert parse_sampling_params({"use_beam_search": "true", "n": "3"}).num_sequences == 3
    width = beams(best_of=5, n=2, temperature=0, top_p=1, top_k=-1, early_stopping="true")
    assert (width.num_sequences, width.best_of, width.early_stopping) == (5, None, True)
    assert beams(beam_width=2, stop="x", min_tokens=2, repetition_penalty=1.2).stop == ("x",)
    # What a model's own defaults say of drawing does not count.
    defaults = SamplingParams(temperature=0.6, top_p=0.9, top_k=40, repetition_penalty=1.1)
    params = parse_sampling_params({"use_beam_search": True, "n": 2}, defaults=defaults)
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)
    assert params.repetition_penalty == 1.1


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({}, "beam_width"),
        ({"beam_width": 1}, "beam_width"),
        ({"best_of": 1}, "beam_width"),
        ({"n": 3, "beam_width": 2}, "beam_width"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"beam_width": 2, "best_of": 2}, "best_of"),
        ({"beam_width": 2, "temperature": 0.7}, "temperature"),
        ({"beam_width": 2, "top_p": 0.9}, "top_p"),
        ({"beam_width": 2, "top_k": 5}, "top_k"),
        ({"beam_width": 2, "min_p": 0.1}, "min_p"),
        ({"beam_width": 2, "logprobs": 0}, "logprobs"),
        (
            {"beam_width": 2, "repetition_detection": {"max_pattern_size": 3, "min_count": 2}},
            "repetition_detection",
        ),
        ({"beam_width": 2, "max_tokens": 0}, "use_beam_search"),
    ],
)
def test_what_a_beam_search_cannot_have(values: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        beams(**values)
    assert caught.value.field == f"sampling_parameters.{field}"


def test_nothing_to_generate() -> None:
    assert parse_sampling_params({"max_tokens": "0"}).max_tokens == 0
    assert check(SamplingParams(max_tokens=0), num_prompt_tokens=64).max_tokens == 0
    for values in ({"n": 2}, {"best_of": 2}):
        with pytest.raises(RequestError) as caught:
            parse_sampling_params({"max_tokens": 0, **values})
        assert caught.value.field == f"sampling_parameters.{next(iter(values))}"
    with pytest.raises(RequestError, match="text_input: has 65 tokens; it must fit"):
        check(SamplingParams(max_tokens=0), num_prompt_tokens=65)


def check(params: SamplingParams, **changes: Any) -> SamplingParams:
    values: dict[str, Any] = {
        "num_prompt_tokens": 60,
        "max_model_len": 64,
        "vocab_size": 100,
        "max_num_seqs": 4,
        "max_logprobs": 20,
        "block_size": 4,
        "num_blocks": 20,
    }
    return check_against_model(params, **{**values, **changes})


def test_checks_that_need_the_model() -> None:
    assert check(SamplingParams(max_tokens=4)).max_tokens == 4
    assert check(SamplingParams(max_tokens=None)).max_tokens == 4
    for params, field in (
        (SamplingParams(max_tokens=5), "max_tokens"),
        (SamplingParams(max_tokens=None, min_tokens=5), "min_tokens"),
        (SamplingParams(max_tokens=1, n=5), "n"),
        (SamplingParams(max_tokens=1, best_of=5), "best_of"),
        (beams(max_tokens=1, beam_width=5), "beam_width"),
        (SamplingParams(max_tokens=1, logprobs=21), "logprobs"),
        (SamplingParams(max_tokens=1, prompt_logprobs=21), "prompt_logprobs"),
        (SamplingParams(max_tokens=1, logit_bias=((5, 1.0), (100, 1.0))), "logit_bias"),
        (SamplingParams(max_tokens=1, allowed_token_ids=(99, 100)), "allowed_token_ids"),
        (SamplingParams(max_tokens=1, bad_words_token_ids=((5, 100),)), "bad_words"),
        (
            SamplingParams(
                max_tokens=1, allowed_token_ids=(5, 6), bad_words_token_ids=((5,), (6,))
            ),
            "allowed_token_ids",
        ),
        (SamplingParams(max_tokens=1, stop_token_ids=(100,)), "stop_token_ids"),
    ):
        with pytest.raises(RequestError) as caught:
            check(params)
        assert caught.value.field == f"sampling_parameters.{field}"
    with pytest.raises(RequestError, match="text_input: has 64 tokens"):
        check(SamplingParams(max_tokens=1), num_prompt_tokens=64)


def test_a_search_that_the_pool_cannot_hold_is_refused() -> None:
    # Of 60 tokens 15 blocks are shared; each beam's own 4 tokens, the last one not counted, take one.
    assert check(beams(max_tokens=4, beam_width=4)).num_sequences == 4
    with pytest.raises(RequestError, match=r"beam_width: .*4 beams .* may take 19 KV blocks"):
        check(beams(max_tokens=4, beam_width=4), num_blocks=19)
    # 3 of 15 blocks are shared, and the fourth is written by all.
    with pytest.raises(RequestError, match="may take 29 KV blocks"):
        check(beams(max_tokens=48, beam_width=2), num_prompt_tokens=15, num_blocks=29)
    assert check(beams(max_tokens=48, beam_width=2), num_prompt_tokens=15, num_blocks=30).n == 1


def test_a_models_defaults_are_overridden_by_explicit_values() -> None:
    defaults = defaults_from_generation_config(
        {
            "do_sample": True,
            "temperature": 0.6,
            "top_k": 20,
            "max_length": 5,
            "eos_token_id": 2,
            "repetition_penalty": 1.1,
        }
    )
    assert defaults.repetition_penalty == 1.1
    assert (defaults.temperature, defaults.top_k, defaults.max_tokens) == (0.6, 20, 16)
    params = parse_sampling_params({"temperature": 0.1}, defaults=defaults)
    assert (params.temperature, params.top_k) == (0.1, 20)
    assert (
        defaults_from_generation_config({"do_sample": False, "temperature": 0.6}).temperature == 1
    )
