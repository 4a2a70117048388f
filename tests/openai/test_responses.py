"""Responses over HTTP: what the conversation becomes, and the items of the answer."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.client.fake_server import FakeServer
from tests.openai.running import RunningGateway
from tests.openai.scripts import failing, saying

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def test_an_answer(server: FakeServer, client: OpenAI) -> None:
    answer = client.responses.create(
        model="llm", input="Hi", instructions="Be brief.", max_output_tokens=9
    )
    assert (answer.object, answer.status, answer.output_text) == (
        "response", "completed", "Hello there",
    )  # fmt: skip
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (5, 3)
    assert answer.usage.input_tokens_details.cached_tokens == 4
    (request,) = server.requests
    assert json.loads(request.inputs["chat"])["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert request.sampling == {"max_tokens": 9}


def test_a_stream_is_the_answer_in_steps(server: FakeServer, client: OpenAI) -> None:
    server.script = saying("<think>h", "m</think>", "Let me see. ", *CALL, reason="stop")
    with client.responses.stream(model="llm", input="Hi", tools=[WEATHER]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == "response.completed"
    assert [name for name in names if name == "response.output_item.added"] == [
        name.replace("done", "added") for name in names if name == "response.output_item.done"
    ]
    thought, said, call = final.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert thought.content[0].text == "hm"
    assert said.type == "message"
    assert final.output_text == "Let me see. "
    assert call.type == "function_call"
    assert (call.name, call.arguments, call.status) == (
        "get_weather", '{"city": "Rome"}', "completed",
    )  # fmt: skip
    deltas = [
        event.delta for event in events if event.type == "response.function_call_arguments.delta"
    ]
    assert "".join(deltas) == call.arguments
    server.script = saying("<think>hm</think>Let me see. " + CALL)
    whole = client.responses.create(model="llm", input="Hi", tools=[WEATHER])
    assert [item.type for item in whole.output] == [item.type for item in final.output]
    assert whole.output_text == final.output_text


@pytest.mark.parametrize("stream", [False, True])
def test_cut_by_its_limit(server: FakeServer, client: OpenAI, stream: bool) -> None:
    server.script = saying("Hel", "lo", reason="length")
    answer: Any = client.responses.create(model="llm", input="Hi", stream=stream)
    if stream:
        *_, last = answer
        assert last.type == "response.incomplete"
        answer = last.response
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"


def test_a_conversation_goes_on(server: FakeServer, client: OpenAI) -> None:
    conversation: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]  # fmt: skip
    client.responses.create(model="llm", input=conversation)
    sent = json.loads(server.requests[0].inputs["chat"])["messages"]
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool"]
    assert sent[1]["content"] == "Weather?"
    assert (sent[2]["content"], sent[2]["reasoning_content"]) == ("Let me see.", "hm")
    assert [call["function"]["name"] for call in sent[2]["tool_calls"]] == ["f", "g"]
    assert (sent[3]["tool_call_id"], sent[3]["content"]) == ("c1", "sunny")


def test_a_forced_call(server: FakeServer, client: OpenAI) -> None:
    server.script = saying('{"city": "Rome"}')
    answer = client.responses.create(
        model="llm", input="Hi", tools=[WEATHER],
        tool_choice={"type": "function", "name": "get_weather"},
    )  # fmt: skip
    (call,) = answer.output
    assert call.type == "function_call"
    assert call.arguments == '{"city": "Rome"}'
    assert server.requests[0].sampling["structured_outputs"] == {"json": WEATHER["parameters"]}


class Weather(BaseModel):
    city: str


def test_openais_helper_for_structured_answers(server: FakeServer, client: OpenAI) -> None:
    server.script = saying('{"city": "Rome"}')
    answer = client.responses.parse(model="llm", input="Hi", text_format=Weather)
    assert answer.output_parsed == Weather(city="Rome")
    sent = server.requests[0].sampling["response_format"]
    assert (sent["type"], sent["json_schema"]["name"]) == ("json_schema", "Weather")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0].name"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"n": 2}, "n"),
        ({"truncation": "auto"}, "truncation"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    server: FakeServer, gateway: RunningGateway, change: dict[str, Any], param: str
) -> None:
    answer = gateway.post("/v1/responses", {"input": "Hi", **change})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert server.requests == []


def test_errors_have_the_names_of_this_endpoint(server: FakeServer, client: OpenAI) -> None:
    server.script = failing("INVALID_ARG sampling_parameters.max_tokens: must be less")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="llm", input="Hi", max_output_tokens=5)
    assert caught.value.param == "max_output_tokens"


def test_a_stream_that_breaks_has_failed(server: FakeServer, client: OpenAI) -> None:
    server.script = failing("INTERNAL engine: could not do it", after=2)
    *_, last = client.responses.create(model="llm", input="Hi", stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "could not do it" in last.response.error.message
