"""Completions over HTTP: what is asked of the model server, and what is made of its answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.client.fake_server import FakeServer, Request, hello, message
from tests.openai.running import RunningGateway
from tests.openai.scripts import failing, saying


def test_a_completion(server: FakeServer, client: OpenAI) -> None:
    answer = client.completions.create(model="llm", prompt="Hi", temperature=0.5, seed=3)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert (choice.text, choice.index, choice.finish_reason) == ("Hello there", 0, "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 3)
    assert (answer.usage.total_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (8, 4)
    (request,) = server.requests
    assert request.inputs["text_input"] == "Hi"
    assert request.inputs["stream"] is False
    assert request.sampling == {"temperature": 0.5, "seed": 3, "max_tokens": 16}


def test_a_stream(server: FakeServer, client: OpenAI) -> None:
    chunks = list(client.completions.create(model="llm", prompt=[72, 105], stream=True))
    *texts, end = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.text for choice in texts) == "Hello there"
    assert {choice.finish_reason for choice in texts} == {None}
    assert (end.text, end.finish_reason) == ("", "stop")
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    assert server.requests[0].inputs["input_ids"] == [72, 105]


def test_the_counts_come_last(server: FakeServer, client: OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="llm", prompt="Hi", stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 8


def test_a_stream_is_framed_as_events_and_ends_with_done(
    server: FakeServer, gateway: RunningGateway
) -> None:
    answer = gateway.post("/v1/completions", {"prompt": "Hi", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert all(event.startswith("data: {") for event in events[:-2])
    assert events[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("prompts", [["a", "b"], [[1], [2, 3]]])
@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_numbered_through_all_prompts(
    server: FakeServer, client: OpenAI, prompts: Any, stream: bool
) -> None:
    server.script = saying("x", "y", n=2)
    answer: Any = client.completions.create(model="llm", prompt=prompts, n=2, stream=stream)
    texts = dict.fromkeys(range(4), "")
    reasons: dict[int, list[str]] = {index: [] for index in range(4)}
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert texts == dict.fromkeys(range(4), "xy")
    assert reasons == {index: ["stop"] for index in range(4)}
    name = "input_ids" if isinstance(prompts[0], list) else "text_input"
    assert sorted(request.inputs[name] for request in server.requests) == prompts


@pytest.mark.parametrize("prompt", ["Hi ", [72, 105, 32]])
@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_is_echoed(
    server: FakeServer, client: OpenAI, prompt: Any, stream: bool
) -> None:
    answer: Any = client.completions.create(model="llm", prompt=prompt, echo=True, stream=stream)
    text = "".join(chunk.choices[0].text for chunk in (answer if stream else [answer]))
    assert text == "Hi Hello there"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server: FakeServer, client: OpenAI, stream: bool) -> None:
    server.script = saying("ab", "c")
    answer: Any = client.completions.create(model="llm", prompt="Hi", logprobs=1, stream=stream)
    parts = [chunk.choices[0].logprobs for chunk in (answer if stream else [answer])]
    parts = [part for part in parts if part is not None]
    assert [token for part in parts for token in part.tokens] == ["ab", "c"]
    assert [offset for part in parts for offset in part.text_offset] == [0, 2]
    assert [each for part in parts for each in part.token_logprobs] == [-0.5, -0.5]
    assert parts[0].top_logprobs[0] == {"ab": -0.5, "é": -0.25, "\ufffd": -0.75}
    assert server.requests[0].sampling["logprobs"] == 1


def test_logprobs_of_the_chosen_token_alone(server: FakeServer, client: OpenAI) -> None:
    server.script = saying("ab")
    answer = client.completions.create(model="llm", prompt="Hi", logprobs=0)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["ab"]
    assert answer.choices[0].logprobs.top_logprobs is None


def scored(request: Request) -> Iterator[Any]:
    """The prompt "Hi" has two tokens here, of which the second is scored."""
    if "control" in request.inputs:
        yield from hello(request)
        return
    assert request.sampling["prompt_logprobs"] == 1
    entry = {"logprob": -2.0, "rank": 3, "decoded_token": "i"}
    best = {"logprob": -0.5, "rank": 1, "decoded_token": "o"}
    news = [{"7": {"logprob": -1.0, "rank": 1, "decoded_token": " x"}}]
    if request.sampling["max_tokens"] == 0:
        news = []
    yield message(
        text_output=[" x" * len(news)], finish_reason=["length"], num_input_tokens=[2],
        num_output_tokens=[len(news)],
        prompt_logprobs=[json.dumps([None, {"105": entry, "111": best}])],
        logprobs=[json.dumps(news)] if "return_logprobs" in request.inputs else ["null"],
        final=True,
    )  # fmt: skip


@pytest.mark.parametrize("prompt", ["Hi", [72, 105]])
def test_an_echo_with_logprobs_scores_the_prompt(
    server: FakeServer, client: OpenAI, prompt: Any
) -> None:
    server.script = scored
    answer = client.completions.create(model="llm", prompt=prompt, echo=True, logprobs=1)
    (choice,) = answer.choices
    assert choice.text == "Hi x"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["H", "i", " x"]
    assert choice.logprobs.token_logprobs == [None, -2.0, -1.0]
    assert choice.logprobs.text_offset == [0, 1, 2]
    assert choice.logprobs.top_logprobs == [None, {"i": -2.0, "o": -0.5}, {" x": -1.0}]


def test_a_prompt_may_be_scored_alone(server: FakeServer, client: OpenAI) -> None:
    server.script = scored
    answer = client.completions.create(
        model="llm", prompt="Hi", echo=True, logprobs=1, max_tokens=0
    )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("Hi", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["H", "i"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 0)
    assert server.requests[-1].sampling["max_tokens"] == 0


def test_prompt_logprobs_by_themselves(server: FakeServer, gateway: RunningGateway) -> None:
    server.script = scored
    answer = gateway.post("/v1/completions", {"prompt": "Hi", "prompt_logprobs": 1}).json()
    first, second = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["105"] == {"logprob": -2.0, "rank": 3, "decoded_token": "i"}


EXTRAS = {
    "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True,
    "stop_token_ids": [7], "include_stop_str_in_output": True, "skip_special_tokens": False,
    "spaces_between_special_tokens": False, "truncate_prompt_tokens": 5, "allowed_token_ids": [1],
    "bad_words": ["no"], "priority": 2, "use_beam_search": True, "length_penalty": 0.5,
    "guided_regex": "a+", "guided_choice": ["a"], "guided_json": {"type": "object"},
    "guided_grammar": "root ::= 'a'", "structured_outputs": {"json": {}}, "stop": ["x", "y"],
    "response_format": {"type": "json_object"}, "logit_bias": {"5": 1.0}, "best_of": 2,
}  # fmt: skip


def test_parameters_travel_under_their_names(server: FakeServer, gateway: RunningGateway) -> None:
    answer = gateway.post("/v1/completions", {"prompt": "Hi", "max_tokens": None, **EXTRAS})
    assert answer.status_code == 200
    # The word means "to the end of the context".
    assert server.requests[0].sampling == {"max_tokens": "null", **EXTRAS}


def test_what_asks_for_nothing_is_accepted(server: FakeServer, gateway: RunningGateway) -> None:
    nothing = {
        "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "suffix": None,
        "response_format": {"type": "text"}, "stream": None, "temperature": None, "logprobs": None,
        "audio": None, "logits_processors": [], "guided_json": None,
    }  # fmt: skip
    assert gateway.post("/v1/completions", {"prompt": "Hi", **nothing}).status_code == 200
    assert server.requests[0].sampling == {"max_tokens": 16}


def test_token_ids_are_given_on_request(server: FakeServer, gateway: RunningGateway) -> None:
    body = {"prompt": "Hi", "return_token_ids": True}
    assert gateway.post("/v1/completions", body).json()["choices"][0]["token_ids"] == [10, 11, 12]


def test_a_cache_salt_is_passed_on(server: FakeServer, gateway: RunningGateway) -> None:
    gateway.post("/v1/completions", {"prompt": "Hi", "cache_salt": "mine"})
    assert server.requests[0].inputs["cache_salt"] == "mine"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**63]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": "half \ud83d"}, "prompt"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stop": [None]}, "stop"),
        ({"n": 5_000_000}, "n"),
        ({"suffix": "end"}, "suffix"),
        ({"store": True}, "store"),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"frequency_penality": 1}, "frequency_penality"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"stream": True, "best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "stream": True}, "max_tokens"),
        ({"return_token_ids": True, "n": 2}, "return_token_ids"),
        ({"logit_bias": {"5": "much"}}, "logit_bias.5"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    server: FakeServer, gateway: RunningGateway, change: dict[str, Any], param: str
) -> None:
    body = json.dumps({"model": "llm", "prompt": "Hi", **change}).encode()
    answer = gateway.post("/v1/completions", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (
        400, "invalid_request_error", param,
    )  # fmt: skip
    assert error["message"]
    assert server.requests == []


@pytest.mark.parametrize(
    ("text", "kind", "param", "code"),
    [
        (
            "INVALID_ARG sampling_parameters.top_p: must be in (0, 1]",
            openai.BadRequestError, "top_p", None,
        ),
        (
            "INVALID_ARG text_input: has 90 tokens; with at least one output token it must fit "
            "max_model_len, which is 64",
            openai.BadRequestError, "prompt", "context_length_exceeded",
        ),
        (
            "INVALID_ARG sampling_parameters.max_tokens: must be at most 4: the prompt has 60 "
            "tokens and max_model_len is 64",
            openai.BadRequestError, "max_tokens", "context_length_exceeded",
        ),
        ("INVALID_ARG input_ids: must hold ids", openai.BadRequestError, "prompt", None),
        ("UNAVAILABLE queue: is full", openai.RateLimitError, None, "overloaded"),
        ("UNAVAILABLE server: is shutting down", openai.InternalServerError, None, "unavailable"),
        ("UNAVAILABLE timeout: has passed", openai.InternalServerError, None, "timeout"),
        ("INTERNAL engine: could not do it", openai.InternalServerError, None, "server_error"),
        ("segfault at 0xdead", openai.InternalServerError, None, "server_error"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_openai_shapes(
    server: FakeServer, client: OpenAI, text: str, kind: Any, param: Any, code: Any, stream: bool
) -> None:
    server.script = failing(text)
    with pytest.raises(kind) as caught:
        client.completions.create(model="llm", prompt="Hi", stream=stream)
    error = caught.value
    assert (error.param, error.code) == (param, code)
    assert "0xdead" not in str(error)
    if error.status_code in (429, 503):
        assert error.response.headers["retry-after"] == "1"


def test_an_error_within_a_stream_is_an_event_and_no_end(
    server: FakeServer, gateway: RunningGateway, client: OpenAI
) -> None:
    server.script = failing("INTERNAL engine: could not do it", after=2)
    answer = gateway.post("/v1/completions", {"prompt": "Hi", "stream": True})
    assert answer.status_code == 200
    assert '"error":{"message"' in answer.text.split("\n\n")[-2]
    assert "[DONE]" not in answer.text
    with pytest.raises(openai.APIError, match="could not do it"):
        list(client.completions.create(model="llm", prompt="Hi", stream=True))


def test_cut_output_never_passes_for_whole(server: FakeServer, gateway: RunningGateway) -> None:
    server.script = saying("a", "b", reason="abort")
    assert gateway.post("/v1/completions", {"prompt": "Hi"}).status_code == 500
    answer = gateway.post("/v1/completions", {"prompt": "Hi", "stream": True})
    assert "[DONE]" not in answer.text
    assert "cut short" in answer.text


def test_an_end_by_repetition_is_a_stop(server: FakeServer, client: OpenAI) -> None:
    server.script = saying("a", "a", reason="repetition")
    answer = client.completions.create(model="llm", prompt="Hi")
    assert answer.choices[0].finish_reason == "stop"


def test_a_server_that_cannot_be_reached() -> None:
    server = FakeServer()
    server.stop()
    with RunningGateway(server.url) as gateway:
        answer = gateway.post("/v1/completions", {"prompt": "Hi"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert server.url not in answer.text
