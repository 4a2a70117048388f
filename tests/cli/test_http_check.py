from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tests.cli.command import free_ports
from trident_llm.cli.http_check import AnswerError, model_is_ready, stream_answer


class _Triton(HTTPServer):
    """Answers as scripted: what is sent for requests with ``chat`` and for others."""

    chat: bytes = b""
    text: bytes = b""
    status = 200
    bodies: list[dict[str, Any]]


class _Handler(BaseHTTPRequestHandler):
    server: _Triton

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/v2/models/llm/ready" else 400)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.chat if "chat" in body else self.server.text)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def triton() -> Iterator[_Triton]:
    with _Triton(("127.0.0.1", 0), _Handler) as server:
        server.bodies = []
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def events(*contents: object) -> bytes:
    return b"".join(b"data: " + json.dumps(content).encode() + b"\n\n" for content in contents)


def test_readiness(triton: _Triton) -> None:
    assert model_is_ready(triton.server_port, "llm")
    assert not model_is_ready(triton.server_port, "other")
    assert not model_is_ready(free_ports(1)[0], "llm")


def test_the_text_is_passed_on_as_it_comes(triton: _Triton) -> None:
    triton.chat = events({"text_output": "It is "}, {"text_output": ["Par", "is"]})
    texts: list[str] = []
    answer = stream_answer(triton.server_port, "llm", "Where?", 8, texts.append)
    assert texts == ["It is ", "Paris"]
    assert answer.num_responses == 2
    assert 0 < answer.first_token_seconds <= answer.total_seconds
    (body,) = triton.bodies
    assert json.loads(body["chat"])["messages"] == [{"role": "user", "content": "Where?"}]
    assert body["stream"] is True
    assert json.loads(body["sampling_parameters"]) == {"max_tokens": 8, "temperature": 0}


def test_without_a_chat_template_the_question_is_the_prompt(triton: _Triton) -> None:
    triton.chat = events({"error": "INVALID_ARG chat: this model has no chat template"})
    triton.text = events({"text_output": "Paris"})
    texts: list[str] = []
    stream_answer(triton.server_port, "llm", "Where?", 8, texts.append)
    assert texts == ["Paris"]
    assert triton.bodies[1]["text_input"] == "Where?"


@pytest.mark.parametrize(
    ("content", "status", "reason"),
    [
        (
            events({"text_output": "a"}, {"error": "INTERNAL engine: broken"}),
            200,
            "INTERNAL engine",
        ),
        (b'{"error": "Request for unknown model"}', 400, "unknown model"),
        (b"<html>", 200, "not JSON"),
        (b"", 200, "empty"),
    ],
)
def test_what_is_no_answer_is_an_error(
    content: bytes, status: int, reason: str, triton: _Triton
) -> None:
    triton.chat, triton.status = content, status
    with pytest.raises(AnswerError, match=reason):
        stream_answer(triton.server_port, "llm", "Where?", 8, lambda text: None)


def test_a_server_that_is_gone_is_an_error() -> None:
    with pytest.raises(AnswerError, match="connection broke"):
        stream_answer(free_ports(1)[0], "llm", "Where?", 8, lambda text: None)
