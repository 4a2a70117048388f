"""``/v1/embeddings`` through OpenAI's client, before a scripted server of a model that embeds."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.client.fake_server import EMBED_INPUTS, FakeServer, embedding
from tests.openai.running import RunningGateway
from tests.openai.scripts import failing


@pytest.fixture(scope="module")
def embedder() -> Iterator[FakeServer]:
    fake = FakeServer()
    fake.model, fake.inputs = "embed", dict(EMBED_INPUTS)
    yield fake
    fake.stop()


@pytest.fixture(scope="module")
def gateway(embedder: FakeServer) -> Iterator[RunningGateway]:
    with RunningGateway(embedder.url) as running:
        yield running


@pytest.fixture
def client(gateway: RunningGateway, embedder: FakeServer) -> Iterator[OpenAI]:
    embedder.script, embedder.requests = embedding, []
    with gateway.openai() as client:
        yield client


def asked(server: FakeServer) -> list[Any]:
    return [json.loads(request.inputs["embedding_request"])["input"] for request in server.requests]


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("Hello", ["Hello"]),
        (["a", "bbb", "", "cc"], ["a", "bbb", "", "cc"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6, 7], [8]], [[5, 6, 7], [8]]),
        ([str(number) * (number % 7) for number in range(100)], None),
    ],
)
def test_vectors_come_in_the_order_of_the_inputs(
    client: OpenAI, embedder: FakeServer, given: Any, inputs: list[Any] | None
) -> None:
    inputs = given if inputs is None else inputs
    answer = client.embeddings.create(model="embed", input=given)
    assert (answer.object, answer.model) == ("list", "embed")
    assert [item.index for item in answer.data] == list(range(len(inputs)))
    assert [item.embedding for item in answer.data] == [[len(each), 1.0, 0.5] for each in inputs]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, inputs))
    assert sorted(map(str, asked(embedder))) == sorted(map(str, inputs))


def test_both_encodings(gateway: RunningGateway, client: OpenAI) -> None:
    floats = gateway.post("/v1/embeddings", {"input": "Hi"}).json()
    assert floats["data"] == [{"object": "embedding", "index": 0, "embedding": [2.0, 1.0, 0.5]}]
    assert floats["model"] == "embed"
    coded = gateway.post("/v1/embeddings", {"input": "Hi", "encoding_format": "base64"}).json()
    raw = base64.b64decode(coded["data"][0]["embedding"])
    assert struct.unpack("<3f", raw) == (2.0, 1.0, 0.5)
    listed = client.embeddings.create(model="embed", input="Hi", encoding_format="float")
    assert listed.data[0].embedding == [2.0, 1.0, 0.5]


def test_parameters_reach_the_model(client: OpenAI, embedder: FakeServer) -> None:
    extra = {"truncate_prompt_tokens": -1, "normalize": False}
    answer = client.embeddings.create(
        model="embed", input="Hi", dimensions=2, user="someone", extra_body=extra
    )
    assert answer.data[0].embedding == [2.0, 1.0]
    (request,) = embedder.requests
    pooling = json.loads(request.inputs["embedding_request"])["pooling_params"]
    assert pooling == {"dimensions": [2], "truncate_prompt_tokens": -1, "normalize": False}


@pytest.mark.parametrize(
    ("text", "param", "code"),
    [
        (
            "INVALID_ARG embedding_request.pooling_params.dimensions: must be at most 384",
            "dimensions", None,
        ),
        (
            "INVALID_ARG embedding_request.input: has 300 tokens; it must fit max_model_len",
            "input", "context_length_exceeded",
        ),
    ],
)  # fmt: skip
def test_what_the_model_refuses(
    client: OpenAI, embedder: FakeServer, text: str, param: str, code: str | None
) -> None:
    embedder.script = failing(text)
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="embed", input=["a", "b"])
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.body["message"].startswith(f"{param}: ")  # type: ignore[index]


def test_overload_is_429(client: OpenAI, embedder: FakeServer) -> None:
    embedder.script = failing("UNAVAILABLE queue: is full: 8 requests wait already")
    with pytest.raises(openai.RateLimitError):
        client.embeddings.create(model="embed", input="Hi")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [["a"]]}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": 3}, "input"),
        ({}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": "2"}, "dimensions"),
        ({"input": "a", "max_tokens": 2}, "max_tokens"),
        ({"input": "a", "model": "llm"}, "model"),
    ],
)
def test_bad_requests_name_the_parameter(
    gateway: RunningGateway, client: OpenAI, body: dict[str, Any], param: str
) -> None:
    answer = gateway.post("/v1/embeddings", body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_models_are_told_apart(
    gateway: RunningGateway, client: OpenAI, embedder: FakeServer
) -> None:
    assert [model.id for model in client.models.list()] == ["llm", "embed"]
    assert client.models.retrieve("embed").id == "embed"
    with pytest.raises(openai.BadRequestError, match="does not generate"):
        client.completions.create(model="embed", prompt="Hi")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="another", input="Hi")


def test_a_server_without_one(server: FakeServer) -> None:
    with RunningGateway(server.url) as running, running.openai() as client:
        assert [model.id for model in client.models.list()] == ["llm"]
        assert running.get("/health/ready").json() == {"models": {"llm": True}}
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="embed", input="Hi")


def test_a_model_that_was_named_is_there_even_if_the_server_lacks_it(embedder: FakeServer) -> None:
    with RunningGateway(embedder.url, embed_model="other") as running, running.openai() as client:
        assert [model.id for model in client.models.list()] == ["llm", "other"]
        assert running.get("/health/ready").json() == {"models": {"llm": False, "other": False}}
