"""Hundreds of malformed requests on a real server: each is refused by name, and nobody notices."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as stock

from tests.e2e.server import RunningServer
from tests.e2e.stock_client import Stream
from tests.serving.bad_requests import MARK, BadRequest, bad_requests

pytestmark = pytest.mark.e2e

KINDS = {"object": "BYTES", "bool": "BOOL", "int32": "INT32", "int64": "INT64", "float32": "FP32"}
CONTROL = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
EVERY = 25  # bad requests between two good ones


def inputs_of(bad: BadRequest) -> list[Any]:
    inputs = []
    for name, array in bad.tensors.items():
        made = stock.InferInput(name, list(array.shape), KINDS[array.dtype.name])
        made.set_data_from_numpy(array)
        inputs.append(made)
    return inputs


def judge(bad: BadRequest, message: str) -> str | None:
    """What is wrong with the refusal, if anything."""
    if MARK in message:
        return f"{bad.name}: repeats what was sent: {message[:200]}"
    wanted = f"'{bad.field}'" if bad.by_triton else f"INVALID_ARG {bad.field}"
    if wanted not in message:
        return f"{bad.name}: does not say {wanted}: {message[:200]}"
    return None


def test_over_grpc(tiny_server: RunningServer) -> None:
    corpus = bad_requests()
    assert len(corpus) >= 400
    wrong: list[str | None] = []
    with tiny_server.client() as client, Stream(tiny_server.grpc_port) as stream:
        expected = client.generate("hello", **CONTROL).token_ids
        for count, bad in enumerate(corpus, start=1):
            stream.send("llm", inputs_of(bad))
            result, error = stream.wait_for(count)[-1]
            if error is None:
                wrong.append(f"{bad.name}: was answered: {result.as_numpy('text_output')}")
            else:
                wrong.append(judge(bad, str(error.message())))
            if count % EVERY == 0:
                assert client.generate("hello", **CONTROL).token_ids == expected, bad.name
    assert [problem for problem in wrong if problem] == []
    tiny_server.idle_stats()
    assert MARK not in tiny_server.log


def as_json(bad: BadRequest) -> bytes | None:
    """The body for the generate endpoint; None where JSON cannot say it."""
    body: dict[str, Any] = {}
    for name, array in bad.tensors.items():
        values = array.tolist()
        if array.dtype == np.object_:
            try:
                values = [value.decode() for value in values]
            except (UnicodeDecodeError, AttributeError):
                return None
        body[name] = values[0] if len(values) == 1 else values
    return json.dumps(body).encode()


def test_over_http(tiny_server: RunningServer) -> None:
    control = {"text_input": "hello", "parameters": CONTROL}
    path = "/v2/models/llm/generate"
    expected = tiny_server.post(path, control)
    assert expected[0] == 200
    wrong: list[str | None] = []
    bodies = [
        (bad, body) for bad in bad_requests()
        if not bad.by_triton and (body := as_json(bad)) is not None
    ]  # fmt: skip
    assert len(bodies) >= 400
    for count, (bad, body) in enumerate(bodies, start=1):
        status, text = tiny_server.post(path, body)
        # Triton fixes the status when the first response comes, an error included.
        if status not in (200, 400) or "error" not in text:
            wrong.append(f"{bad.name}: {status} {text[:200]}")
        else:
            wrong.append(judge(bad, json.loads(text)["error"]))
        if count % EVERY == 0:
            assert tiny_server.post(path, control) == expected, bad.name
    assert [problem for problem in wrong if problem] == []
    tiny_server.idle_stats()


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"5", b'"x"', b"null", b"\xff\xfe", b"\x00", b'{"text_input": ' + b"[" * 5000,
        b'{"text_input": 5}', b'{"text_input": null}', b'{"text_input": {"a": 1}}',
        b'{"text_input": ["a", "b"]}', b'{"text_input": true}',
        b'{"text_input": "x", "stream": "yes"}', b'{"text_input": "x", "stream": 1e400}',
        b'{"input_ids": 1.5}', b'{"input_ids": ["a"]}', b'{"input_ids": [99999999999999999999]}',
        b'{"text_input": "\\ud800"}', b'{"text_input": "x", "text_input": 5}',
        b'{"text_input": "x", "parameters": {"timeout": "soon"}}',
        b'{"text_input": "x", "timeout": -1}', b'{"text_input": "x", "timeout": 1e400}',
        b'{"text_input": "x", "parameters": 5}', b'{"text_input": "x", "temperature": "hot"}',
    ],
    ids=lambda body: repr(body)[:40],
)  # fmt: skip
def test_bodies_that_only_http_can_send(tiny_server: RunningServer, body: bytes) -> None:
    status, text = tiny_server.post("/v2/models/llm/generate", body)
    assert status in (200, 400, 500)
    assert '"error"' in text
    assert "INTERNAL" not in text
    control = {"text_input": "hello", "parameters": CONTROL}
    assert tiny_server.post("/v2/models/llm/generate", control)[0] == 200
