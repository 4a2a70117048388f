"""The gateway as a child: what it is started with, and that it ends."""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import free_ports, wait_for
from tests.client.fake_server import WAIT, FakeServer, Request, message
from trident_llm.cli import gateway_process
from trident_llm.cli.errors import CommandError
from trident_llm.cli.gateway_process import GatewayProcess, check_gateway, gateway_command
from trident_llm.cli.http_check import gateway_is_up
from trident_llm.cli.options import ServeOptions, add_serve_options, serve_options


def options(*arguments: str) -> ServeOptions:
    parser = argparse.ArgumentParser()
    add_serve_options(parser)
    return serve_options(parser.parse_args(arguments))


def test_what_the_user_adds_comes_last() -> None:
    command = gateway_command(options("--openai-port=9000", "--openai-args=--host 127.0.0.1"))
    assert command[:4] == [sys.executable, "-m", "trident_client.cli", "openai"]
    assert "--url=localhost:8001" in command
    assert "--metrics-url=http://localhost:8002/metrics" in command
    assert command.index("--host=0.0.0.0") < command.index("127.0.0.1")
    assert not any(argument.startswith("--embed-model") for argument in command)


def test_it_is_told_of_a_model_that_embeds() -> None:
    command = gateway_command(options("--openai-port=9000", "--embedding-model=default"))
    assert "--model=llm" in command
    assert "--embed-model=embed" in command


def test_a_gateway_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    check_gateway()
    monkeypatch.setattr(gateway_process, "_MODULES", ("trident_client", "no_such_module"))
    with pytest.raises(CommandError, match=r"needs no_such_module; run: pip install"):
        check_gateway()


def test_it_ends_with_its_standard_input(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    process = GatewayProcess(options(f"--openai-port={port}"), tmp_path / "log")
    try:
        wait_for(lambda: gateway_is_up(port) or process.exit_status is not None, "it answers")
        assert process.exit_status is None
    finally:
        process.stop()
    assert process.exit_status == 0
    assert "listening on" in (tmp_path / "log").read_text()


def answers_at_once(connection: http.client.HTTPConnection) -> bool:
    """Whether a small answer ever comes at once where acknowledgements are delayed (40 ms) by now."""
    for number in range(200):
        began = time.monotonic()
        connection.request("GET", "/health")
        connection.getresponse().read()
        if number >= 10 and time.monotonic() - began < 0.03:
            return True
    return False


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_in_flight_is_finished_first(tmp_path: Path, workers: int) -> None:
    proceed = threading.Event()

    def script(request: Request) -> Iterator[Any]:
        yield message(text_output=["first"], finish_reason=["None"])
        assert proceed.wait(WAIT)
        yield message(text_output=["last"], finish_reason=["stop"], final=True)

    server = FakeServer()
    server.script = script
    (port,) = free_ports(1)
    grpc_port = server.url.rpartition(":")[2]
    process = GatewayProcess(
        options(
            f"--openai-port={port}", f"--grpc-port={grpc_port}",
            f"--openai-args=--workers {workers}",
        ),
        tmp_path / "log",
    )  # fmt: skip
    try:
        wait_for(lambda: gateway_is_up(port) or process.exit_status is not None, "it answers")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)
        assert answers_at_once(connection)
        body = json.dumps({"prompt": "Hi", "stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert b"first" in response.readline()
        process.begin_stop()
        wait_for(lambda: not gateway_is_up(port), "it takes no more requests")
        proceed.set()
        rest = response.read()
        assert b"last" in rest
        assert b"[DONE]" in rest
        connection.close()
    finally:
        proceed.set()
        process.stop()
        server.stop()
    assert process.exit_status == 0


def test_one_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_process, "_KILL_SECONDS", 0.1)
    monkeypatch.setattr(gateway_process, "gateway_command", lambda _: ["sleep", "600"])
    process = GatewayProcess(options("--openai-port=9000"), tmp_path / "log")
    process.stop()
    assert process.exit_status == -signal.SIGKILL
