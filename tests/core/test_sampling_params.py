from __future__ import annotations

from typing import Any

import pytest

from trident_llm.core.errors import ErrorCode, RequestError
from trident_llm.core.sampling_params import (
    SamplingParams,
    check_against_model,
    defaults_from_generation_config,
    parse_sampling_params,
)


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
        ("max_tokens", 0),
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
        ("repetition_penalty", 1.2),
        ("logit_bias", {"5": 1}),
        ("best_of", 3),
        ("use_beam_search", True),
        ("use_beam_search", "true"),
        ("presence_penalty", "0.5"),
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
        ("use_beam_search", False),
        ("use_beam_search", "false"),
        ("best_of", 1),
        ("logit_bias", None),
        ("bad_words", []),
        ("early_stopping", "False"),
        ("prompt_logprobs", "null"),
    ],
)
def test_what_is_not_supported_is_accepted_when_it_asks_for_nothing(name: str, value: Any) -> None:
    assert parse_sampling_params({name: value}) == SamplingParams()


def test_an_unknown_name_is_refused_without_echoing_it() -> None:
    with pytest.raises(RequestError, match="INVALID_ARG sampling_parameters: holds an unknown"):
        parse_sampling_params({"temprature": 1})
    assert parse_sampling_params({"x-header": "1"}, ignore_unknown=True) == SamplingParams()


def test_combinations_that_contradict_each_other() -> None:
    for values in (
        {"min_tokens": 5, "max_tokens": 4},
        {"stop": "x", "detokenize": False},
        {"n": 2, "temperature": 0},
    ):
        with pytest.raises(RequestError):
            parse_sampling_params(values)


def check(params: SamplingParams, **changes: Any) -> SamplingParams:
    values: dict[str, Any] = {
        "num_prompt_tokens": 60,
        "max_model_len": 64,
        "vocab_size": 100,
        "max_num_seqs": 4,
        "max_logprobs": 20,
    }
    return check_against_model(params, **{**values, **changes})


def test_checks_that_need_the_model() -> None:
    assert check(SamplingParams(max_tokens=4)).max_tokens == 4
    assert check(SamplingParams(max_tokens=None)).max_tokens == 4
    for params, field in (
        (SamplingParams(max_tokens=5), "max_tokens"),
        (SamplingParams(max_tokens=None, min_tokens=5), "min_tokens"),
        (SamplingParams(max_tokens=1, n=5), "n"),
        (SamplingParams(max_tokens=1, logprobs=21), "logprobs"),
        (SamplingParams(max_tokens=1, stop_token_ids=(100,)), "stop_token_ids"),
    ):
        with pytest.raises(RequestError) as caught:
            check(params)
        assert caught.value.field == f"sampling_parameters.{field}"
    with pytest.raises(RequestError, match="text_input: has 64 tokens"):
        check(SamplingParams(max_tokens=1), num_prompt_tokens=64)


def test_a_models_defaults_are_overridden_by_explicit_values() -> None:
    defaults = defaults_from_generation_config(
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "max_length": 5, "eos_token_id": 2}
    )
    assert (defaults.temperature, defaults.top_k, defaults.max_tokens) == (0.6, 20, 16)
    params = parse_sampling_params({"temperature": 0.1}, defaults=defaults)
    assert (params.temperature, params.top_k) == (0.1, 20)
    assert (
        defaults_from_generation_config({"do_sample": False, "temperature": 0.6}).temperature == 1
    )
