"""Responses to deltas to results."""

from __future__ import annotations

import dataclasses
import json

import pytest

from trident_client import Delta, Result, ServerError, Times
from trident_client.results import Collector
from trident_client.wire import parse_response

from .fake_server import message

LOGPROBS = [
    {
        "7": {"logprob": -0.1, "rank": 1, "decoded_token": "a"},
        "9": {"logprob": -2.5, "bytes": [226, 128]},
    }
]


def collect(*messages: object) -> tuple[list[Delta], Result]:
    collector = Collector()
    deltas = [delta for each in messages for delta in collector.feed(parse_response(each))]
    return deltas, collector.result("r")


def test_one_sequence() -> None:
    deltas, result = collect(
        message(text_output=[""], token_ids=[7], num_output_tokens=[1], finish_reason=["None"]),
        message(
            text_output=["ab"],
            token_ids=[8, 9],
            num_output_tokens=[2],
            finish_reason=["stop"],
            stop_reason=["\n\n"],
            cumulative_logprob=[-1.5],
            num_input_tokens=[4],
            num_cached_tokens=[2],
        ),
        message(final=True),
    )
    assert [(delta.text, delta.token_ids, delta.num_tokens) for delta in deltas] == [
        ("", (7,), 1),
        ("ab", (8, 9), 2),
    ]
    assert [delta.finish_reason for delta in deltas] == [None, "stop"]
    assert (result.text, result.token_ids, result.finish_reason) == ("ab", (7, 8, 9), "stop")
    assert (result.stop_reason, result.cumulative_logprob) == ("\n\n", -1.5)
    usage = result.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (4, 3, 2)
    assert result.request_id == "r"


def test_several_sequences_by_index_and_only_their_news() -> None:
    deltas, result = collect(
        message(text_output=["a", "x"], num_output_tokens=[1, 1], finish_reason=["None", "None"]),
        message(text_output=["", "y"], num_output_tokens=[0, 1], finish_reason=["stop", "None"]),
        message(text_output=["", "z"], num_output_tokens=[0, 1], finish_reason=["stop", "length"]),
    )
    assert [(delta.index, delta.text) for delta in deltas] == [
        (0, "a"),
        (1, "x"),
        (0, ""),
        (1, "y"),
        (1, "z"),
    ]
    assert [(choice.text, choice.finish_reason) for choice in result.choices] == [
        ("a", "stop"),
        ("xyz", "length"),
    ]
    assert result.usage.completion_tokens == 4


def test_a_held_back_text_is_still_a_delta_for_its_tokens() -> None:
    deltas, _ = collect(message(text_output=["", ""], num_output_tokens=[1, 0]))
    assert [delta.index for delta in deltas] == [0]


def test_logprobs() -> None:
    text = json.dumps(LOGPROBS)
    deltas, result = collect(
        message(text_output=["a"], logprobs=[text]), message(text_output=["b"], logprobs=[text])
    )
    assert deltas[0].logprobs is not None
    first, second = deltas[0].logprobs[0]
    assert (first.token_id, first.logprob, first.rank, first.decoded_token) == (7, -0.1, 1, "a")
    assert (second.token_id, second.rank) == (9, None)
    assert (first.token_bytes, second.token_bytes) == (None, b"\xe2\x80")
    assert result.logprobs == deltas[0].logprobs * 2
    assert collect(message(text_output=["a"], logprobs=["null"]))[1].logprobs is None
    for bad in ("{", "[3]", '[{"x": {}}]', '[{"7": {"logprob": 0, "bytes": [300]}}]'):
        with pytest.raises(ServerError, match="logprobs"):
            collect(message(text_output=["a"], logprobs=[bad]))


def test_what_was_not_sent_is_none() -> None:
    _, result = collect(message(text_output=["a"]))
    assert result.usage == type(result.usage)(None, None, None)
    assert [result.token_ids, result.finish_reason, result.logprobs] == [None] * 3
    assert collect(message(final=True))[1].text == ""


def test_results_are_frozen() -> None:
    _, result = collect(message(text_output=["a"]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.request_id = "x"  # type: ignore[misc]


def test_logprobs_of_the_prompt() -> None:
    text = json.dumps([None, *LOGPROBS])
    deltas, result = collect(
        message(text_output=["a"], prompt_logprobs=[text]), message(text_output=["b"], final=True)
    )
    assert [delta.text for delta in deltas] == ["a", "b"]
    assert result.prompt_logprobs is not None
    first, second = result.prompt_logprobs
    assert first is None
    assert second is not None
    assert [(each.token_id, each.logprob, each.rank) for each in second] == [
        (7, -0.1, 1),
        (9, -2.5, None),
    ]
    nothing = collect(message(text_output=["a"], prompt_logprobs=["null"]))[1]
    assert nothing.prompt_logprobs is None
    for bad in ("{", "[5]", "5"):
        with pytest.raises(ServerError, match="output prompt_logprobs unreadably"):
            collect(message(text_output=["a"], prompt_logprobs=[bad]))


def test_times_are_the_newest_told() -> None:
    def at(last: int) -> object:
        return message(
            text_output=["a"],
            arrival_time_ns=[1_700_000_000_000_000_001],
            first_scheduled_time_ns=[0],
            first_token_time_ns=[3],
            last_token_time_ns=[last],
        )

    assert collect(at(4), at(5))[1].times == Times(1_700_000_000_000_000_001, None, 3, 5)
    assert collect(message(text_output=["a"]))[1].times is None
