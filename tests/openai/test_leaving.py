"""Callers that leave, that do not read, and that wait long: seen from the model server."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.cli.command import wait_for
from tests.client.fake_server import WAIT, FakeServer, Request, forever, message
from tests.openai.running import RunningGateway

CANCEL_SECONDS = 0.1
TRIES = 50  # on a crowded machine one takes longer now and then


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "llm", "prompt": "Hi", **fields}).encode()


def silent(request: Request) -> Iterator[Any]:
    """No token until the client is gone: the request is queued, or its prompt computed."""
    request.ended.wait(WAIT)
    yield from ()


def seconds_until_cancelled(request: Request, connection: socket.socket) -> float:
    began = time.monotonic()
    connection.close()
    assert request.cancelled()
    return time.monotonic() - began


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_that_leaves_before_the_first_token(
    server: FakeServer, gateway: RunningGateway, stream: bool
) -> None:
    server.script = silent

    def leave() -> float:
        connection = gateway.connect("/v1/completions", body(stream=stream))
        return seconds_until_cancelled(server.one(), connection)

    assert any(leave() < CANCEL_SECONDS for _ in range(TRIES))


def test_a_caller_that_leaves_a_stream(server: FakeServer, gateway: RunningGateway) -> None:
    server.script = forever

    def leave() -> float:
        connection = gateway.connect("/v1/completions", body(stream=True))
        request = server.one()
        received = b""
        while b"first" not in received:
            received += connection.recv(4096)
        return seconds_until_cancelled(request, connection)

    assert any(leave() < CANCEL_SECONDS for _ in range(TRIES))


def test_leaving_ends_every_prompt_of_the_request(
    server: FakeServer, gateway: RunningGateway
) -> None:
    server.script = silent
    connection = gateway.connect("/v1/completions", body(prompt=["a", "b", "c"]))
    for _ in range(3):
        server.one()
    connection.close()
    assert all(request.cancelled() for request in server.requests)


def test_the_client_of_openai_leaves_by_closing(server: FakeServer, client: OpenAI) -> None:
    server.script = forever
    messages: Any = [{"role": "user", "content": "Hi"}]
    stream = client.chat.completions.create(model="llm", messages=messages, stream=True)
    next(iter(stream))
    stream.close()
    assert server.one().cancelled()


def test_a_stream_that_was_read_to_its_end_is_not_cancelled(
    server: FakeServer, client: OpenAI
) -> None:
    list(client.completions.create(model="llm", prompt="Hi", stream=True))
    assert not server.one().cancelled()


def test_a_long_wait_is_bridged_by_comments(server: FakeServer, gateway: RunningGateway) -> None:
    proceed = threading.Event()

    def late(request: Request) -> Iterator[Any]:
        assert proceed.wait(WAIT)
        yield message(text_output=["late"], finish_reason=["stop"], final=True)

    server.script = late
    with gateway.connect("/v1/completions", body(stream=True)) as connection:
        received = b""
        while received.count(b": waiting\n\n") < 2:
            received += connection.recv(4096)
        proceed.set()
        while b"[DONE]" not in received:
            received += connection.recv(4096)
    assert b"200 OK" in received
    assert b'"text":"late"' in received


def test_an_error_after_the_wait_has_begun_is_an_event(
    server: FakeServer, gateway: RunningGateway
) -> None:
    proceed = threading.Event()

    def late(request: Request) -> Iterator[Any]:
        assert proceed.wait(WAIT)
        yield message(error="UNAVAILABLE server: is shutting down", final=True)

    server.script = late
    with gateway.connect("/v1/completions", body(stream=True)) as connection:
        received = b""
        while b": waiting" not in received:
            received += connection.recv(4096)
        proceed.set()
        while b"0\r\n\r\n" not in received:
            received += connection.recv(4096)
    assert b'"code":"unavailable"' in received
    assert b"[DONE]" not in received


def endless(request: Request) -> Iterator[Any]:
    piece = "x" * 16384
    while request.context.is_active():
        yield message(text_output=[piece], finish_reason=["None"], num_output_tokens=[1])


def test_a_caller_that_does_not_read_is_left_alone_by_the_others(server: FakeServer) -> None:
    """Its output is bounded, then its request is ended; one beside it goes on."""
    with RunningGateway(server.url, max_unread_bytes=2**20, write_timeout=600.0) as gateway:
        server.script = endless
        with gateway.connect("/v1/completions", body(stream=True)):
            slow = server.one()
            server.script = forever
            with gateway.connect("/v1/completions", body(stream=True)) as other:
                quick = server.one()
                assert slow.cancelled()
                assert not quick.ended.is_set()
                received = b""
                while b"first" not in received:
                    received += other.recv(4096)
        wait_for(lambda: 'status="slow_reader"} 1' in gateway.get("/metrics").text, "it is counted")


def test_a_write_that_does_not_move_ends_the_request(server: FakeServer) -> None:
    with RunningGateway(server.url, max_unread_bytes=2**40, write_timeout=0.2) as gateway:
        server.script = endless
        with gateway.connect("/v1/completions", body(stream=True)):
            assert server.one().cancelled()
