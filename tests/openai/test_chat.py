"""Chats over HTTP: what is asked of the model server, and what is made of its answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.client.fake_server import FakeServer, Request, Script, hello, message
from tests.openai.running import RunningGateway
from tests.openai.scripts import failing, saying

USER: Any = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        },
    },
}  # fmt: skip
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def sent_chat(server: FakeServer) -> dict[str, Any]:
    (request,) = server.requests
    chat: dict[str, Any] = json.loads(request.inputs["chat"])
    return chat


def test_an_answer(server: FakeServer, client: OpenAI) -> None:
    answer = client.chat.completions.create(model="llm", messages=USER)
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "Hello there"
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert sent_chat(server) == {"messages": USER}
    # The word means "to the end of the context".
    assert server.requests[0].sampling == {"max_tokens": "null"}


def test_a_stream(server: FakeServer, client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="llm", messages=USER, stream=True, stream_options={"include_usage": True}
        )
    )
    first, *middle, last, counts = chunks
    assert first.object == "chat.completion.chunk"
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == "Hello there"
    assert {chunk.choices[0].finish_reason for chunk in (first, *middle)} == {None}
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].delta.content is None
    assert counts.choices == []
    assert counts.usage is not None
    assert counts.usage.total_tokens == 8


def test_every_choice_has_a_role_and_one_reason(server: FakeServer, client: OpenAI) -> None:
    server.script = saying("a", "b", reason="length", n=3)
    roles, texts, reasons = [], ["", "", ""], []
    for chunk in client.chat.completions.create(model="llm", messages=USER, n=3, stream=True):
        for choice in chunk.choices:
            roles += [choice.index] if choice.delta.role else []
            texts[choice.index] += choice.delta.content or ""
            reasons += [(choice.index, choice.finish_reason)] if choice.finish_reason else []
    assert roles == [0, 1, 2]
    assert texts == ["ab"] * 3
    assert sorted(reasons) == [(index, "length") for index in range(3)]
    answer = client.chat.completions.create(model="llm", messages=USER, n=3)
    assert [choice.message.content for choice in answer.choices] == ["ab"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server: FakeServer, client: OpenAI, stream: bool) -> None:
    server.script = saying("ab", "\N{REPLACEMENT CHARACTER}")
    answer: Any = client.chat.completions.create(
        model="llm", messages=USER, logprobs=True, top_logprobs=3, stream=stream
    )
    parts = [chunk.choices[0].logprobs for chunk in (answer if stream else [answer])]
    tokens = [token for part in parts if part is not None for token in part.content]
    assert [(token.token, token.logprob) for token in tokens] == [
        ("ab", -0.5), ("\N{REPLACEMENT CHARACTER}", -0.5),
    ]  # fmt: skip
    # Part of a character has bytes that nobody told us.
    assert [token.bytes for token in tokens] == [[97, 98], None]
    top, _, part = tokens[0].top_logprobs
    assert (top.token, top.bytes, top.logprob) == ("é", [0xC3, 0xA9], -0.25)
    assert (part.token, part.bytes) == ("\N{REPLACEMENT CHARACTER}", [0xC3])
    assert server.requests[0].sampling["logprobs"] == 3


def thinking(text: str, limit: int = 1000) -> Script:
    """Says `text` a character a token, whose ids the fake server's tokenizer knows."""

    def script(request: Request) -> Iterator[Any]:
        if "control" in request.inputs:
            yield from hello(request)
            return
        n = request.sampling.get("n", 1)
        parts = [text[at : at + 4] for at in range(0, len(text), 4)]
        for number, part in enumerate(parts if request.inputs["stream"] else [text]):
            last = number == len(parts) - 1 or not request.inputs["stream"]
            ids = {} if n > 1 else {"token_ids": [ord(character) for character in part]}
            yield message(
                text_output=[part] * n, finish_reason=["stop" if last else "None"] * n,
                num_input_tokens=[5], num_output_tokens=[len(part)] * n, final=last, **ids,
            )  # fmt: skip

    return script


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "n", "expected"),
    [
        ("<think>ab</think>\n\nyes", 1, 17),
        ("<think>ab</think>yes", 2, 34),
        ("<think>without an end", 1, 21),
        ("no thoughts </think> here", 1, 0),
    ],
)
def test_the_tokens_of_reasoning_are_counted(
    server: FakeServer, client: OpenAI, text: str, n: int, expected: int, stream: bool
) -> None:
    server.script = thinking(text)
    options: Any = {"stream_options": {"include_usage": True}} if stream else {}
    answer: Any = client.chat.completions.create(
        model="llm", messages=USER, n=n, stream=stream, **options
    )
    usage = list(answer)[-1].usage if stream else answer.usage
    assert usage.completion_tokens == n * len(text)
    assert usage.completion_tokens_details.reasoning_tokens == expected
    counted = client.responses.create(model="llm", input="Hi").usage
    assert counted is not None
    assert counted.output_tokens_details.reasoning_tokens == expected // n


def test_an_answer_is_not_lost_where_reasoning_cannot_be_counted(
    server: FakeServer, client: OpenAI
) -> None:
    script = thinking("<think>ab</think>yes")

    def refusing(request: Request) -> Iterator[Any]:
        if "control" in request.inputs:
            yield message(error="UNAVAILABLE queue: is full", final=True)
        else:
            yield from script(request)

    server.script = refusing
    answer = client.chat.completions.create(model="llm", messages=USER)
    assert answer.choices[0].message.content == "yes"
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is None


def test_the_template_is_told_what_it_may_know(server: FakeServer, gateway: RunningGateway) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
        {"role": "assistant", "content": "So"},
    ]  # fmt: skip
    body = {
        "messages": messages, "chat_template_kwargs": {"x": 1}, "reasoning_effort": "low",
        "add_generation_prompt": False, "continue_final_message": True, "tools": [WEATHER],
    }  # fmt: skip
    assert gateway.post("/v1/chat/completions", body).status_code == 200
    messages[0]["role"] = "system"
    del messages[2]["content"], messages[2]["refusal"]
    assert sent_chat(server) == {
        "messages": messages,
        "tools": [WEATHER],
        "chat_template_kwargs": {"x": 1, "reasoning_effort": "low"},
        "add_generation_prompt": False,
        "continue_final_message": True,
    }


def test_the_newer_name_of_the_limit_wins(server: FakeServer, client: OpenAI) -> None:
    client.chat.completions.create(
        model="llm", messages=USER, max_tokens=3, max_completion_tokens=7
    )
    assert server.requests[0].sampling["max_tokens"] == 7


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "now"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "search"}]}, "tools[0].type"),
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "response_format"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    server: FakeServer, gateway: RunningGateway, change: dict[str, Any], param: str
) -> None:
    answer = gateway.post("/v1/chat/completions", {"messages": USER, **change})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert server.requests == []


@pytest.mark.parametrize(
    ("text", "body", "param"),
    [
        ("chat: messages[1].content must be given", {}, "messages[1].content"),
        ("chat.messages: must be a list", {}, "messages"),
        ("chat: cannot be used: this model has no chat template", {}, "messages"),
        ("sampling_parameters.max_tokens: must be", {"max_completion_tokens": 9},
         "max_completion_tokens"),
        ("sampling_parameters.max_tokens: must be", {"max_tokens": 9}, "max_tokens"),
        ("sampling_parameters.logprobs: must be at most 20", {}, "top_logprobs"),
        ("sampling_parameters.response_format.json_schema.schema: no", {},
         "response_format.json_schema.schema"),
        ("sampling_parameters.structured_outputs.json: no",
         {"tools": [WEATHER], "tool_choice": "required"}, "tools.json"),
    ],
)  # fmt: skip
def test_errors_name_the_parameter_as_it_is_called_here(
    server: FakeServer, gateway: RunningGateway, text: str, body: dict[str, Any], param: str
) -> None:
    server.script = failing(f"INVALID_ARG {text}")
    answer = gateway.post("/v1/chat/completions", {"messages": USER, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_told_apart(server: FakeServer, client: OpenAI, stream: bool) -> None:
    server.script = saying("<thi", "nk>\nhm", " hm\n</think>\n", "\nSo.")
    answer: Any = client.chat.completions.create(model="llm", messages=USER, stream=stream)
    choices = [chunk.choices[0] for chunk in (answer if stream else [answer])]
    parts = [choice.delta if stream else choice.message for choice in choices]
    assert "".join(getattr(part, "reasoning_content", None) or "" for part in parts) == "hm hm"
    assert "".join(part.content or "" for part in parts) == "So."


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call(server: FakeServer, client: OpenAI, stream: bool) -> None:
    server.script = saying(*("Let me see. ", *CALL))
    answer: Any = client.chat.completions.create(
        model="llm", messages=USER, tools=[WEATHER], stream=stream
    )
    name, arguments, content, reason = "", "", "", None
    for chunk in answer if stream else [answer]:
        (choice,) = chunk.choices
        part = choice.delta if stream else choice.message
        content += part.content or ""
        reason = choice.finish_reason or reason
        for call in part.tool_calls or ():
            name += call.function.name or ""
            arguments += call.function.arguments
            assert not stream or call.index == 0
            assert call.id is None or call.id.startswith("call_")
    assert (name, arguments) == ("get_weather", '{"city": "Rome"}')
    assert (content, reason) == ("Let me see. ", "tool_calls")
    # Where the marks of calls are special tokens they would not be seen.
    assert server.requests[0].sampling["skip_special_tokens"] is False


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_character_in_a_call_stays_json(
    server: FakeServer, gateway: RunningGateway, stream: bool
) -> None:
    server.script = saying('<tool_call>{"name": "a\\ud83d", "arguments": {}}</tool_call>')
    body = {"messages": USER, "tools": [WEATHER], "stream": stream}
    answer = gateway.post("/v1/chat/completions", body)
    assert answer.status_code == 200
    assert '"name":"a\\ud83d"' in answer.text


def test_tools_that_must_not_be_called_are_neither_shown_nor_looked_for(
    server: FakeServer, client: OpenAI
) -> None:
    server.script = saying(CALL)
    answer = client.chat.completions.create(
        model="llm", messages=USER, tools=[WEATHER], tool_choice="none"
    )
    assert answer.choices[0].message.content == CALL
    assert "tools" not in sent_chat(server)


def test_a_required_call_follows_a_grammar(server: FakeServer, client: OpenAI) -> None:
    server.script = saying('[{"name": "get_weather", ', '"parameters": {"city": "Rome"}}]')
    answer = client.chat.completions.create(
        model="llm", messages=USER, tools=[WEATHER], tool_choice="required",
        parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Rome"}')
    assert answer.choices[0].finish_reason == "tool_calls"
    schema = server.requests[0].sampling["structured_outputs"]["json"]
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    assert schema["items"]["properties"]["parameters"] == WEATHER["function"]["parameters"]
    assert sent_chat(server)["tools"] == [WEATHER]


def test_a_named_call_is_its_arguments(server: FakeServer, client: OpenAI) -> None:
    server.script = saying(' {"city": ', '"Rome"}')
    with client.chat.completions.stream(
        model="llm",
        messages=USER,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    ) as stream:
        answer = stream.get_final_completion()
    (call,) = answer.choices[0].message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Rome"}')
    assert server.requests[0].sampling["structured_outputs"] == {
        "json": WEATHER["function"]["parameters"]
    }


class Weather(BaseModel):
    city: str


def test_openais_helper_for_structured_answers(server: FakeServer, client: OpenAI) -> None:
    server.script = saying('{"city": "Rome"}')
    answer = client.chat.completions.parse(model="llm", messages=USER, response_format=Weather)
    assert answer.choices[0].message.parsed == Weather(city="Rome")
    sent = server.requests[0].sampling["response_format"]
    assert sent["type"] == "json_schema"
    assert sent["json_schema"]["schema"]["required"] == ["city"]


def test_openais_helper_for_strict_tools(server: FakeServer, client: OpenAI) -> None:
    server.script = saying('<tool_call>\n{"name": "Weather", "arguments": {"city": "Rome"}}')
    answer = client.chat.completions.parse(
        model="llm", messages=USER, tools=[openai.pydantic_function_tool(Weather)]
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == Weather(city="Rome")
    form = server.requests[0].sampling["structured_outputs"]["structural_tag"]["format"]
    assert form["tags"][0]["begin"] == '<tool_call>\n{"name": "Weather", "arguments": '


def test_references_in_a_tools_schema_keep_their_meaning(
    server: FakeServer, gateway: RunningGateway
) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}, "again": {"$ref": "#"}},
        "$defs": {"A": {"type": "integer"}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {"messages": USER, "tools": [WEATHER, tool], "tool_choice": "required"}
    assert gateway.post("/v1/chat/completions", body).status_code == 200
    schema = server.requests[0].sampling["structured_outputs"]["json"]
    assert schema["items"]["anyOf"][1]["properties"]["parameters"] == {"$ref": "#/$defs/tool1"}
    moved = schema["$defs"]["tool1"]
    assert moved["properties"]["a"] == {"$ref": "#/$defs/tool1/$defs/A"}
    assert moved["properties"]["again"] == {"$ref": "#/$defs/tool1"}
