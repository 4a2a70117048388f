from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from trident_llm.core.errors import RequestError
from trident_llm.core.messages import TokenLogprob
from trident_llm.core.request import FinishReason
from trident_llm.core.sampling_params import SamplingParams
from trident_llm.engine.output import RequestOutput, RequestTimes, SequenceDelta
from trident_llm.serving.protocol import (
    MAX_RESPONSE_BYTES,
    ParsedRequest,
    RawRequest,
    ResponseBuilder,
    TokenText,
    check_prompt_logprobs,
    output_bytes,
    parse_request,
    request_timeout,
)


def raw(parameters: str = "", **inputs: Any) -> RawRequest:
    tensors = {}
    for name, value in inputs.items():
        if isinstance(value, np.ndarray):
            tensors[name] = value
        elif isinstance(value, bool):
            tensors[name] = np.array([value])
        else:
            tensors[name] = np.array(
                [value if isinstance(value, bytes) else value.encode()], dtype=np.object_
            )
    return RawRequest(tensors, parameters)


def parse(**inputs: Any) -> ParsedRequest:
    return parse_request(raw(**inputs), SamplingParams())


def test_text_alone_echoes_the_prompt_and_does_not_stream() -> None:
    parsed = parse(text_input="hi")
    assert (parsed.prompt_text, parsed.stream, parsed.echo) == ("hi", False, True)
    assert parsed.params == SamplingParams()
    assert parsed.returns == frozenset()


@pytest.mark.parametrize(
    ("inputs", "echo"),
    [
        ({"text_input": "x"}, True),
        ({"text_input": "x", "exclude_input_in_output": False}, True),
        ({"text_input": "x", "exclude_input_in_output": True}, False),
        ({"text_input": "x", "stream": True}, False),
        ({"text_input": "x", "stream": True, "exclude_input_in_output": True}, False),
        ({"input_ids": np.array([1, 2], np.int32)}, False),
        ({"chat": '[{"role": "user", "content": "x"}]'}, False),
    ],
    ids=str,
)
def test_when_the_prompt_goes_before_the_output(inputs: dict[str, Any], echo: bool) -> None:
    assert parse(**inputs).echo is echo


def test_streaming_cannot_echo() -> None:
    with pytest.raises(RequestError, match="When streaming, `exclude_input_in_output` = False"):
        parse(text_input="x", stream=True, exclude_input_in_output=False)


def test_the_tensor_wins_over_request_parameters() -> None:
    both = raw('{"max_tokens": 3}', text_input="x", sampling_parameters='{"max_tokens": 7}')
    assert parse_request(both, SamplingParams()).params.max_tokens == 7
    alone = raw('{"max_tokens": 3, "traceparent": "00-1"}', text_input="x")
    assert parse_request(alone, SamplingParams()).params.max_tokens == 3


@pytest.mark.parametrize(
    ("inputs", "field"),
    [
        ({}, "text_input"),
        ({"text_input": b"\xff\xfe"}, "text_input"),
        ({"text_input": "x", "chat": "[]"}, "chat.messages"),
        ({"text_input": np.array([b"a", b"b"], np.object_)}, "text_input"),
        ({"input_ids": np.zeros((2, 2), np.int32)}, "input_ids"),
        ({"text_input": "x", "stream": np.array([True, True])}, "stream"),
        ({"text_input": "x", "sampling_parameters": "{"}, "sampling_parameters"),
        ({"text_input": "x", "sampling_parameters": '{"temperature": NaN}'}, "sampling_parameters"),
        ({"text_input": "x", "sampling_parameters": '"a"'}, "sampling_parameters"),
        ({"text_input": "x", "sampling_parameters": "[" * 100000}, "sampling_parameters"),
        (
            {"text_input": "x", "sampling_parameters": '{"stop": ' + "[" * 70 + "]" * 70 + "}"},
            "sampling_parameters",
        ),
        ({"chat": '{"messages": "x"}'}, "chat.messages"),
        ({"chat": '{"messages": [{}], "nonsense": 1}'}, "chat"),
        ({"chat": '{"messages": [{}], "tool_choice": "required"}'}, "chat.tool_choice"),
        ({"chat": '{"messages": [{}], "add_generation_prompt": 1}'}, "chat.add_generation_prompt"),
        ({"control": "[]"}, "control"),
        ({"text_input": "x", "cache_salt": "x" * 300}, "cache_salt"),
        ({"text_input": "x", "image": "x"}, "image"),
        ({"text_input": "x", "embedding_request": "{}"}, "embedding_request"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_input_is_refused_naming_the_input(inputs: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**inputs)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"INVALID_ARG {field}: ")


def output(*deltas: SequenceDelta, finished: bool = False) -> RequestOutput:
    return RequestOutput(
        request_id="1",
        deltas={delta.index: delta for delta in deltas},
        num_prompt_tokens=5,
        num_cached_tokens=4,
        finished=finished,
        error=None,
        times=RequestTimes(arrival=1.0, first_scheduled=1.5, first_token=2.0),
    )


def build(parsed: ParsedRequest, *outputs: RequestOutput) -> list[dict[str, Any]]:
    builder = ResponseBuilder(parsed, lambda token_id: TokenText(f"<{token_id}>"))
    return [builder.tensors(item) for item in outputs]


def test_extra_outputs_appear_only_when_asked_for() -> None:
    (plain,) = build(parse(text_input="p", stream=True), output(SequenceDelta(0, "a", [3])))
    assert set(plain) == {"text_output"}
    asked = parse(text_input="p", stream=True, return_token_ids=True, return_num_input_tokens=True)
    (extra,) = build(asked, output(SequenceDelta(0, "a", [3])))
    assert set(extra) == {"text_output", "token_ids", "num_input_tokens"}
    assert extra["token_ids"].tolist() == [3]
    assert extra["num_input_tokens"].dtype == np.uint32


def test_n_elements_by_index_with_their_states() -> None:
    parsed = parse(
        text_input="p", stream=True, sampling_parameters='{"n": 2}', return_finish_reason=True,
        return_num_output_tokens=True,
    )  # fmt: skip
    first, second = build(
        parsed,
        output(SequenceDelta(1, "b", [4], finish_reason=FinishReason.STOP)),
        output(SequenceDelta(0, "a", [3, 5])),
    )
    assert first["text_output"].tolist() == [b"", b"b"]
    assert first["finish_reason"].tolist() == [b"None", b"stop"]
    assert second["text_output"].tolist() == [b"a", b""]
    assert second["finish_reason"].tolist() == [b"None", b"stop"]
    assert second["num_output_tokens"].tolist() == [2, 0]


def test_logprobs_are_json_for_the_new_tokens() -> None:
    parsed = parse(
        text_input="p", stream=True, sampling_parameters='{"logprobs": 1}', return_logprobs=True,
        return_cumulative_logprob=True,
    )  # fmt: skip
    entries = [TokenLogprob(7, -1.5, 2), TokenLogprob(9, -0.25, 1)]
    delta = SequenceDelta(0, "a", [7], logprobs=[entries], cumulative_logprob=-1.5)
    (tensors,) = build(parsed, output(delta))
    (token,) = json.loads(tensors["logprobs"][0])
    assert token["7"] == {"logprob": -1.5, "rank": 2, "decoded_token": "<7>"}
    assert token["9"]["rank"] == 1
    builder = ResponseBuilder(parsed, lambda token_id: TokenText("\ufffd", bytes([0xE2, token_id])))
    (token,) = json.loads(builder.tensors(output(delta))["logprobs"][0])
    assert token["7"]["bytes"] == [0xE2, 7]
    assert tensors["cumulative_logprob"].tolist() == [-1.5]


def test_logprobs_are_null_when_sampling_was_not_asked_for_them() -> None:
    parsed = parse(text_input="p", return_logprobs=True, return_cumulative_logprob=True)
    assert parsed.params.logprobs == 0  # for the sum alone
    entries = [TokenLogprob(7, float("-inf"), 2)]
    (tensors,) = build(parsed, output(SequenceDelta(0, "a", [7], logprobs=[entries])))
    assert tensors["logprobs"].tolist() == [b"null"]


def test_logprobs_of_the_prompt_are_sent_once() -> None:
    parsed = parse(
        text_input="p", stream=True, sampling_parameters='{"prompt_logprobs": 1}',
        return_prompt_logprobs=True,
    )  # fmt: skip
    first = output(SequenceDelta(0, "a", [3]))
    first.prompt_logprobs = [None, [TokenLogprob(7, -1.5, 2), TokenLogprob(9, -0.25, 1)]]
    first.merge(output(SequenceDelta(0, "b", [4])))
    one, two = build(parsed, first, output(SequenceDelta(0, "c", [5])))
    assert json.loads(one["prompt_logprobs"][0]) == [
        None,
        {
            "7": {"logprob": -1.5, "rank": 2, "decoded_token": "<7>"},
            "9": {"logprob": -0.25, "rank": 1, "decoded_token": "<9>"},
        },
    ]
    assert set(two) == {"text_output"}


def test_logprobs_of_the_prompt_are_null_when_sampling_was_not_asked_for_them() -> None:
    parsed = parse(text_input="p", return_prompt_logprobs=True)
    (tensors,) = build(parsed, output(SequenceDelta(0, "a", [7])))
    assert tensors["prompt_logprobs"].tolist() == [b"null"]
    asked = parse(text_input="p", sampling_parameters='{"prompt_logprobs": 1}')
    (tensors,) = build(asked, output(SequenceDelta(0, "a", [7])))
    assert set(tensors) == {"text_output"}


@pytest.mark.parametrize(("count", "most"), [(0, 2730), (1, 1365), (20, 130)])
def test_logprobs_of_a_prompt_must_fit_into_one_response(count: int, most: int) -> None:
    sampling = json.dumps({"prompt_logprobs": count})
    parsed = parse(text_input="p", sampling_parameters=sampling, return_prompt_logprobs=True)
    check_prompt_logprobs(parsed, most)
    with pytest.raises(RequestError, match=f"at most {most} tokens") as caught:
        check_prompt_logprobs(parsed, most + 1)
    assert str(caught.value).startswith("INVALID_ARG return_prompt_logprobs: ")
    scores = [TokenLogprob(49151 - i, -12.345678901234567, 49152) for i in range(count + 1)]
    full = output(SequenceDelta(0, "a", [7]))
    full.prompt_logprobs = [None] + [scores] * (most - 1)
    (tensors,) = build(parsed, full)
    assert len(tensors["prompt_logprobs"][0]) <= output_bytes(full) <= MAX_RESPONSE_BYTES
    check_prompt_logprobs(parse(text_input="p", sampling_parameters=sampling), most + 1)


def test_infinite_logprobs_stay_valid_json() -> None:
    parsed = parse(text_input="p", sampling_parameters='{"logprobs": 0}', return_logprobs=True)
    entries = [TokenLogprob(7, float("-inf"), 2)]
    (tensors,) = build(parsed, output(SequenceDelta(0, "a", [7], logprobs=[entries])))
    assert json.loads(tensors["logprobs"][0])[0]["7"]["logprob"] == -9999.0


def test_outputs_nobody_has_read_are_merged() -> None:
    waiting = output(SequenceDelta(0, "a", [1], cumulative_logprob=-1.0))
    waiting.merge(output(SequenceDelta(0, "b", [2], cumulative_logprob=-3.0), finished=True))
    parsed = parse(text_input="p", return_cumulative_logprob=True, return_num_output_tokens=True)
    (tensors,) = build(parsed, waiting)
    assert tensors["text_output"].tolist() == [b"pab"]
    assert tensors["num_output_tokens"].tolist() == [2]
    assert tensors["cumulative_logprob"].tolist() == [-3.0]
    assert waiting.finished


@pytest.mark.parametrize(
    ("parameters", "own", "seconds"),
    [
        ("", 0, None),
        ("", 2_500_000, 2.5),
        ('{"timeout": 500000}', 0, 0.5),
        ('{"timeout": "500000"}', 0, 0.5),
        ('{"timeout": 0}', 0, None),
        ('{"max_tokens": 3}', 0, None),
    ],
)
def test_a_requests_timeout(parameters: str, own: int, seconds: float | None) -> None:
    assert request_timeout(RawRequest({}, parameters, own)) == seconds


@pytest.mark.parametrize("value", ["-1", "1.5", '"soon"', "true", "null"])
def test_a_timeout_that_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(RequestError, match="INVALID_ARG timeout: "):
        request_timeout(RawRequest({}, f'{{"timeout": {value}}}'))


def test_priority_is_read_from_the_tensor_or_else_from_request_parameters() -> None:
    tensor = raw('{"priority": 3}', text_input="x", sampling_parameters='{"priority": "-2"}')
    assert parse_request(tensor, SamplingParams()).params.priority == -2
    alone = raw('{"priority": 3}', text_input="x")
    assert parse_request(alone, SamplingParams()).params.priority == 3


def test_times_are_in_nanoseconds_since_1970() -> None:
    parsed = parse(text_input="p", stream=True, return_perf_metrics=True)
    (tensors,) = build(parsed, output(SequenceDelta(0, "a", [3])))
    arrival, scheduled, first, last = (
        int(tensors[f"{name}_time_ns"][0])
        for name in ("arrival", "first_scheduled", "first_token", "last_token")
    )
    assert scheduled - arrival == 500_000_000
    assert first - arrival == 1_000_000_000
    assert last == 0  # has not come
    assert abs(arrival - (time.time_ns() - time.monotonic_ns() + 1_000_000_000)) < 10**9
