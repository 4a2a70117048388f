"""``trident serve`` with a real tritonserver and a fake model: start, stop and every way to fail."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import Serve, fake_repository, processes_of_group_of, wait_for
from trident_llm.cli.errors import CommandError
from trident_llm.cli.http_check import model_is_ready, stream_answer
from trident_llm.cli.triton_server import find_tritonserver, prepare_server

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", autouse=True)
def _server_is_installed(tmp_path_factory: pytest.TempPathFactory) -> None:
    try:
        prepare_server(find_tritonserver(None), tmp_path_factory.mktemp("probe"))
    except CommandError as error:
        pytest.skip(f"no usable tritonserver: {error}")


def test_serves_and_finishes_requests_before_it_stops(tmp_path: Path) -> None:
    repository = fake_repository(tmp_path, drain_seconds=7)
    with Serve(tmp_path, f"--model-repository={repository}") as serve:
        serve.wait_for_output("Ctrl-C stops")
        phases = [line.split()[0] for line in serve.out.splitlines()[:2]]
        assert phases == ["server", "weights"]
        assert "  weights         0.2 s\n  dtype=float32\nready after" in serve.out
        assert "It is Paris.\nfirst token after" in serve.out
        assert f"localhost:{serve.http_port}/v2/models/llm/generate" in serve.out
        assert serve.err == "warning: swap_space does not apply\n"

        texts: list[str] = []
        first = threading.Event()

        def on_text(text: str) -> None:
            texts.append(text)
            first.set()

        def ask() -> None:
            _stream_text(serve.http_port, {"text_input": "slow"}, on_text)

        client = threading.Thread(target=ask)
        client.start()
        assert first.wait(30)
        server = serve.server()
        serve.process.send_signal(signal.SIGINT)
        serve.wait_for_output("stopping: finishing requests in flight (at most 7 s)")
        serve.process.send_signal(signal.SIGINT)
        serve.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "already stopping" in serve.err, "it says so")
        (repository / "llm" / "1" / "go_on").touch()
        assert serve.wait_for_end() == 0
        client.join(30)
        assert "".join(texts) == "It is Paris."
        assert serve.out.endswith("stopped\n")
        assert processes_of_group_of(server) == []
        assert serve.left_behind() == []


def _stream_text(port: int, body: dict[str, str], on_text: Callable[[str], object]) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v2/models/llm/generate_stream", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        for line in response:
            if line.startswith(b"data: "):
                on_text(json.loads(line[6:])["text_output"])


@pytest.mark.parametrize("load_seconds", [0, 60])
def test_a_killed_command_leaves_nothing(tmp_path: Path, load_seconds: int) -> None:
    repository = fake_repository(tmp_path, load_seconds=load_seconds)
    with Serve(tmp_path, f"--model-repository={repository}", "--no-self-check") as serve:
        serve.wait_for_output("weights" if not load_seconds else "server")
        if not load_seconds:
            serve.wait_for_output("Ctrl-C stops")
        server = serve.server()
        assert len(processes_of_group_of(server)) == 2
        assert len(serve.left_behind()) == 2
        serve.process.kill()
        serve.wait_for_end()
        wait_for(lambda: not processes_of_group_of(server), "server and stub have ended")
        wait_for(lambda: not serve.left_behind(), "shared memory and run directory are gone")


def test_a_signal_while_loading_stops_at_once(tmp_path: Path) -> None:
    repository = fake_repository(tmp_path, load_seconds=60)
    with Serve(tmp_path, f"--model-repository={repository}") as serve:
        serve.wait_for_output("server")
        server = serve.server()
        serve.process.send_signal(signal.SIGTERM)
        assert serve.wait_for_end() == 128 + signal.SIGTERM
        assert processes_of_group_of(server) == []
        assert serve.left_behind() == []


@pytest.mark.parametrize("tell_error", [True, False])
def test_a_model_that_does_not_load_is_one_sentence(tmp_path: Path, tell_error: bool) -> None:
    reason = "model.safetensors: tensor lm_head.weight is missing"
    repository = fake_repository(tmp_path, load_error=reason, tell_error=tell_error)
    with Serve(tmp_path, f"--model-repository={repository}") as serve:
        assert serve.wait_for_end() == 1
        assert serve.err.splitlines()[-1] == f"error: {reason}"
        assert "Traceback" not in serve.err
        assert serve.left_behind() == []


def test_a_failed_self_check_stops_the_server(tmp_path: Path) -> None:
    repository = fake_repository(tmp_path, chat_error="INTERNAL engine: broken")
    with Serve(tmp_path, f"--model-repository={repository}") as serve:
        assert serve.wait_for_end() == 1
        assert serve.err.splitlines()[-1].endswith("no answer: INTERNAL engine: broken")
        assert serve.left_behind() == []


def test_a_model_without_chat_template_is_asked_plainly(tmp_path: Path) -> None:
    repository = fake_repository(tmp_path, chat_error="INVALID_ARG chat: no template")
    arguments = (f"--model-repository={repository}", "--model-control-mode=explicit")
    with Serve(tmp_path, *arguments) as serve:
        serve.wait_for_output("Ctrl-C stops")
        assert "It is Paris.\n" in serve.out
        # Unloading ends the model's process, which is no reason to restart the server.
        stub = serve.stub()
        _post(serve.http_port, "unload")
        wait_for(lambda: not os.path.exists(f"/proc/{stub}"), "the model is unloaded")
        unloaded = time.monotonic()
        wait_for(lambda: time.monotonic() > unloaded + 2.5, "two looks at the server's health")
        assert "restarting" not in serve.out
        _post(serve.http_port, "load")
        serve.wait_for_output("weights", 2)
        assert model_is_ready(serve.http_port, "llm")


def _post(port: int, action: str) -> None:
    url = f"http://127.0.0.1:{port}/v2/repository/models/llm/{action}"
    with urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=30) as response:
        assert response.status == 200


def test_what_fails_is_restarted(tmp_path: Path) -> None:
    repository = fake_repository(tmp_path)
    with Serve(tmp_path, f"--model-repository={repository}", "--no-self-check") as serve:
        serve.wait_for_output("Ctrl-C stops")
        os.kill(serve.server(), signal.SIGKILL)
        serve.wait_for_output("ready again after", 1)
        assert "the server ended by itself (signal 9)" in serve.err

        os.kill(serve.stub(), signal.SIGKILL)
        serve.wait_for_output("ready again after", 2)
        assert "the process that runs the model has died" in serve.err

        _stream_text(serve.http_port, {"text_input": "fail the engine"}, lambda text: None)
        serve.wait_for_output("ready again after", 3)
        assert "the engine stopped computing" in serve.err

        texts: list[str] = []
        stream_answer(serve.http_port, "llm", "Paris?", 8, texts.append)
        assert "".join(texts) == "It is Paris."

        os.kill(serve.server(), signal.SIGKILL)
        assert serve.wait_for_end() == 1
        assert "not restarted again after 3 restarts" in serve.err
        assert serve.left_behind() == []
