"""Which inputs are sent for which call, given what the model has."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from trident_client import InvalidArgument, ModelInfo, ServerError, UnsupportedFeature, _request
from trident_client.wire import Response

from .fake_server import TRIDENT_INPUTS, VLLM_INPUTS

TRIDENT = ModelInfo("llm", ("1",), "python", TRIDENT_INPUTS, {})
VLLM = ModelInfo("llm", ("1",), "vllm", VLLM_INPUTS, {})
OLD_VLLM_INPUTS = ("text_input", "stream", "sampling_parameters", "exclude_input_in_output")
OLD_VLLM = ModelInfo("llm", ("1",), "vllm", dict.fromkeys(OLD_VLLM_INPUTS, ""), {})


def inputs(model: ModelInfo, prompt: Any = "Hi", stream: bool = False, **sampling: Any) -> Any:
    return _request.generate(prompt, stream=stream, sampling=sampling)(model)


def test_a_text_prompt() -> None:
    assert inputs(TRIDENT, temperature=0.5, seed=None) == {
        "text_input": "Hi",
        "stream": False,
        "sampling_parameters": '{"temperature": 0.5}',
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_stop_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_num_cached_tokens": True,
        "return_token_ids": True,
    }


def test_token_ids_replace_the_text() -> None:
    sent = inputs(TRIDENT, [1, 2])
    assert sent["input_ids"] == [1, 2]
    assert "text_input" not in sent


def test_only_what_the_model_has_is_sent() -> None:
    assert set(inputs(VLLM, stream=True)) <= set(VLLM_INPUTS)
    assert inputs(VLLM)["return_num_output_tokens"] is True
    assert set(inputs(OLD_VLLM)) == set(OLD_VLLM_INPUTS)


def test_logprobs_are_asked_for_where_the_sampling_does() -> None:
    assert "return_logprobs" not in inputs(TRIDENT)
    sent = inputs(TRIDENT, logprobs=0)
    assert sent["return_logprobs"] is True
    assert sent["return_cumulative_logprob"] is True


def test_what_is_asked_besides_sampling() -> None:
    extras = _request.Extras("tenant", return_perf_metrics=True)
    for build in (
        _request.generate("Hi", stream=True, sampling={"prompt_logprobs": 0}, extras=extras),
        _request.chat([], {"prompt_logprobs": 0}, stream=True, extras=extras),
    ):
        sent = build(TRIDENT)
        assert sent["cache_salt"] == "tenant"
        assert sent["return_perf_metrics"] is sent["return_prompt_logprobs"] is True
        assert json.loads(str(sent["sampling_parameters"])) == {"prompt_logprobs": 0}


@pytest.mark.parametrize(
    ("extras", "sampling", "field"),
    [
        (_request.Extras(cache_salt="tenant"), {}, "cache_salt"),
        (_request.Extras(return_perf_metrics=True), {}, "return_perf_metrics"),
        (_request.Extras(), {"prompt_logprobs": 1}, "return_prompt_logprobs"),
    ],
)
def test_what_vllm_backend_lacks_is_refused(
    extras: _request.Extras, sampling: dict[str, object], field: str
) -> None:
    with pytest.raises(UnsupportedFeature) as caught:
        _request.generate("Hi", stream=False, sampling=sampling, extras=extras)(VLLM)
    assert caught.value.field == field


@pytest.mark.parametrize(("n", "asked"), [(1, True), ("1", True), (2, False)])
def test_token_ids_are_asked_for_one_sequence(n: object, asked: bool) -> None:
    assert inputs(TRIDENT, n=n).get("return_token_ids", False) is asked


def test_sampling_parameters_travel_as_given() -> None:
    sent = inputs(TRIDENT, stop=["\n", "é"], top_k="40", min_p=np.float32(0.5), logit_bias={"5": 1})
    assert json.loads(sent["sampling_parameters"]) == {
        "stop": ["\n", "é"],
        "top_k": "40",
        "min_p": 0.5,
        "logit_bias": {"5": 1},
    }


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, object()])
def test_what_has_no_json_form_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidArgument, match="JSON") as caught:
        inputs(TRIDENT, min_p=value)
    assert caught.value.field == "sampling_parameters.min_p"


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (_request.generate([1], stream=False, sampling={}), "input_ids"),
        (_request.chat([], {}, stream=False), "chat"),
        (_request.control({"op": "tokenize", "text": ""}), "control"),
    ],
)
def test_what_another_backend_lacks_is_refused_by_name(
    build: _request.BuildInputs, field: str
) -> None:
    with pytest.raises(UnsupportedFeature, match="not served by Trident") as caught:
        build(VLLM)
    assert caught.value.field == field


def test_a_model_that_does_not_stream_or_sample_says_so() -> None:
    bare = ModelInfo("clip", (), "", {"text_input": "BYTES"}, {})
    assert inputs(bare) == {"text_input": "Hi"}
    for wanted in ({"stream": True}, {"top_k": 3}):
        with pytest.raises(UnsupportedFeature):
            inputs(bare, **wanted)
    with pytest.raises(UnsupportedFeature, match="text_input"):
        inputs(ModelInfo("resnet", (), "", {"pixels": "FP32"}, {}))


def test_chat_options_and_sampling_part() -> None:
    messages = [{"role": "user", "content": "日本"}]
    options = {
        "tools": [{"type": "function"}],
        "tool_choice": None,
        "chat_template_kwargs": {"thinking": False},
        "add_generation_prompt": False,
        "max_tokens": 4,
    }
    sent = _request.chat(messages, options, stream=True)(TRIDENT)
    assert json.loads(str(sent["chat"])) == {
        "messages": messages,
        "tools": [{"type": "function"}],
        "chat_template_kwargs": {"thinking": False},
        "add_generation_prompt": False,
    }
    assert sent["sampling_parameters"] == '{"max_tokens": 4}'
    assert sent["stream"] is True
    assert "text_input" not in sent


def test_embedding_requests() -> None:
    ours = _request.embed("Hi", {"dimensions": 8, "normalize": None})(TRIDENT)
    assert set(ours) == {"embedding_request", "return_num_input_tokens"}
    assert json.loads(str(ours["embedding_request"])) == {
        "input": "Hi",
        "pooling_params": {"dimensions": [8]},
    }
    theirs = _request.embed([1, 2], {})(VLLM)
    assert theirs["text_input"] == ""
    assert json.loads(str(theirs["embedding_request"])) == {"input": [1, 2]}


def test_embeddings_are_read_in_both_forms() -> None:
    ours = _request.embeddings_of([Response({"embedding": np.array([1, 2], np.float32)}, True)])
    theirs = _request.embeddings_of([Response({"text_output": ["[1.0, 2.0]"]}, True)])
    assert ours.vector.dtype == theirs.vector.dtype == np.float32
    assert ours.vector.tolist() == theirs.vector.tolist() == [1, 2]
    for text in ("Hello", "[]", "3"):
        with pytest.raises(ServerError):
            _request.embeddings_of([Response({"text_output": [text]}, True)])


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_control_reply_is_an_object(text: str) -> None:
    with pytest.raises(ServerError):
        _request.control_reply(Response({"control_output": [text]}, True))
    with pytest.raises(ServerError):
        _request.token_ids_of({})
    with pytest.raises(ServerError):
        _request.text_of({})


def test_prompts_one_or_several() -> None:
    array = np.array([1, 2])
    assert _request.split_prompts([[1], [2, 3]], "prompt") == ([[1], [2, 3]], True)
    assert _request.split_prompts(array, "prompt")[1] is False  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument) as caught:
        _request.split_prompts([], "prompt")
    assert caught.value.field == "prompt"
