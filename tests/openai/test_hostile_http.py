"""Callers that do not speak HTTP, or speak it badly, slowly or without end: they are refused or closed,
cost little, and disturb nobody."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cli.command import wait_for
from tests.client.fake_server import WAIT, FakeServer, forever, hello, message
from tests.openai.running import RunningGateway

BODY = json.dumps({"model": "llm", "prompt": "Hi"}).encode()
KEPT = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
HEAD = KEPT + b"Connection: close\r\n"
GOOD = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


def connect(gateway: RunningGateway) -> socket.socket:
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT)


def exchange(gateway: RunningGateway, data: bytes, *, leave: bool = False) -> bytes:
    """All that comes back until the gateway closes; `leave` says that nothing more will be sent."""
    received = b""
    with connect(gateway) as connection:
        try:
            connection.sendall(data)
            if leave:
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                received += part
        except (ConnectionResetError, BrokenPipeError):
            pass  # closed while we still sent
    return received


def chunked(*chunks: bytes) -> bytes:
    parts = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + parts


@pytest.fixture
def neighbour(server: FakeServer, gateway: RunningGateway) -> Iterator[None]:
    """A stream that must outlive the test, and a request that must be answered after it."""
    server.script = forever
    with gateway.connect("/v1/completions", b'{"prompt": "Hi", "stream": true}') as stream:
        request = server.one()
        received = b""
        while b"first" not in received:
            received += stream.recv(4096)
        server.script = hello
        server.requests = []
        yield
        assert not request.ended.is_set()
        assert b"Hello there" in exchange(gateway, GOOD)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n\r\n",
        HEAD + b"X: \x00\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n",
        HEAD + b"Content-Length: 9999999999\r\n\r\n",
        HEAD + b"X: " + b"x" * 20_000 + b"\r\n\r\n",
        HEAD + b"X: y\r\n" * 10_000 + b"\r\n",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        chunked(b"\xff\xfe{}", b""),
        chunked(b'{"prompt": "\xc3', b'"}', b""),
        chunked(b"[" * 5000, b"]" * 5000, b""),
        chunked(*[b" " * 65536] * 65, b""),
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused(
    server: FakeServer, gateway: RunningGateway, neighbour: None, data: bytes
) -> None:
    answer = exchange(gateway, data)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer[:200]
    assert server.requests == []


def test_a_body_may_come_in_chunks(server: FakeServer, gateway: RunningGateway) -> None:
    answer = exchange(gateway, chunked(BODY[:5], BODY[5:], b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"Hello there" in answer


def test_requests_in_a_row_are_answered_in_a_row(
    server: FakeServer, gateway: RunningGateway
) -> None:
    kept = GOOD.replace(HEAD, KEPT)
    answer = exchange(gateway, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 30 + kept * 3 + GOOD)
    assert answer.count(b"HTTP/1.1 200 OK") == 34
    assert answer.count(b'{"status":"ok"}') == 30
    assert answer.rindex(b'{"status":"ok"}') < answer.index(b"Hello there")


def test_any_change_to_a_request_does_no_harm(
    server: FakeServer, gateway: RunningGateway, neighbour: None
) -> None:
    chance = random.Random(7)
    for _ in range(250):
        data = bytearray(GOOD)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data))
            kind = chance.randrange(4)
            if kind == 0:
                data[at] = chance.randrange(256)
            elif kind == 1:
                del data[at : at + chance.randint(1, 20)]
            elif kind == 2:
                data[at:at] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 9)))
            else:
                data += data[at:]
            data = data or bytearray(b"\n")
        answer = exchange(gateway, bytes(data), leave=True)
        assert b"HTTP/1.1 5" not in answer, (bytes(data), answer)


def test_what_never_ends_takes_no_memory(gateway: RunningGateway, neighbour: None) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    megabyte = b"x" * 2**20
    for beginning in (HEAD + b"X: ", chunked()[:-2] + b"\r\nffffffff\r\n", b"GET /"):
        with connect(gateway) as connection:
            connection.sendall(beginning)
            refused = False
            for _ in range(64):
                try:
                    connection.sendall(megabyte)
                except (ConnectionResetError, BrokenPipeError):
                    refused = True
                    break
            assert refused
    assert resident() - before < 48 * 2**20


def test_those_that_send_slowly_are_closed(server: FakeServer) -> None:
    with RunningGateway(server.url, idle_timeout=0.3) as gateway:
        connections = [connect(gateway) for _ in range(20)]
        done = threading.Event()

        def drip() -> None:
            """A byte now and then does not keep a connection."""
            while not done.wait(0.05):
                for connection in connections[::2]:
                    try:
                        connection.send(b"x")
                    except OSError:
                        return

        for number, connection in enumerate(connections):
            if number % 4:
                connection.sendall(HEAD[: 10 * (number % 4)])
        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert gateway.post("/v1/completions", {"prompt": "Hi"}).status_code == 200
            for connection in connections:
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(1) == b""
        finally:
            done.set()
            thread.join()
            for connection in connections:
                connection.close()


def test_a_whole_answer_that_nobody_reads_is_let_go(server: FakeServer) -> None:
    def long(request: Any) -> Iterator[Any]:
        yield message(
            text_output=["x" * 2**23], finish_reason=["stop"], num_output_tokens=[1], final=True
        )

    server.script = long
    with RunningGateway(server.url, idle_timeout=0.3) as gateway:
        with gateway.connect("/v1/completions", BODY):
            server.one()
            wait_for(lambda: gateway.open_connections == 0, "its connection is closed")
        with gateway.connect("/v1/completions", BODY) as reader:  # slowly, but it reads
            received = len(reader.recv(1000))
            while received < 2**23:
                received += len(reader.recv(2**20))
