"""The command: its output, its exit status, and what Ctrl-C does to the server."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from trident_client.bench import percentiles
from trident_client.cli import main

from .fake_server import VLLM_INPUTS, WAIT, FakeServer, Request, forever, message


def run(server: FakeServer, *arguments: str) -> int:
    command, *rest = arguments
    return main([command, "--url", server.url, *rest])


def test_complete(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    status = run(
        server, "complete", "Hi", "--max-tokens", "7", "-p", "top_k=3", "-p", "stop=END",
        "--header", "x-team: a:b",
    )  # fmt: skip
    assert status == 0
    assert capsys.readouterr().out == "Hello there\n"
    (request,) = server.requests
    assert request.inputs["text_input"] == "Hi"
    assert request.inputs["stream"] is True
    assert request.sampling == {"max_tokens": 7, "top_k": 3, "stop": "END"}
    assert request.headers["x-team"] == "a:b"


def test_complete_reads_stdin(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert run(server, "complete") == 0
    assert server.requests[0].inputs["text_input"] == "from a pipe"


def test_chat_line_by_line(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
    assert run(server, "chat", "--system", "Be brief.") == 0
    assert capsys.readouterr().out == "Hello there\nHello there\n"
    roles = [
        [(each["role"], each["content"]) for each in json.loads(request.inputs["chat"])["messages"]]
        for request in server.requests
    ]
    first = [("system", "Be brief."), ("user", "one")]
    assert roles == [first, [*first, ("assistant", "Hello there"), ("user", "two")]]


def test_chat_one_message(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, "chat", "Hi") == 0
    assert capsys.readouterr().out == "Hello there\n"


def test_an_error_is_one_line(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    text = "INVALID_ARG sampling_parameters.top_k: must be\n0 or more"
    server.script = lambda request: iter([message(error=text, final=True)])
    assert run(server, "complete", "Hi") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == ("trident-client: INVALID_ARG sampling_parameters.top_k: must be 0 or more\n")


def test_a_file_that_is_not_there(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, "complete", "Hi", "--ca", "/no/such.pem") == 1
    assert "/no/such.pem" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["-p", "top_k"], ["--header", "x"], ["--max-tokens", "x"], ["--no-such-option"]],
)
def test_wrong_arguments_exit_2(server: FakeServer, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(server, "complete", "Hi", *arguments)
    assert caught.value.code == 2
    assert not server.requests


def test_health(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, "health") == 0
    assert capsys.readouterr().out == f"{server.url}: live\nllm: ready\n"
    server.ready = False
    assert run(server, "health") == 1
    assert "llm: not ready" in capsys.readouterr().out


def _command(server: FakeServer, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trident_client.cli", arguments[0], "--url", server.url]
    return subprocess.Popen(
        [*command, *arguments[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ctrl_c_cancels_on_the_server_and_exits_130(server: FakeServer) -> None:
    server.script = forever
    with _command(server, "complete", "Hi") as process:
        assert process.stdout is not None
        assert process.stdout.read(5) == "first"  # streamed: it is there before the end
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT)
    assert process.returncode == 130
    assert err.strip() == ""
    assert server.one().cancelled()


def test_a_reader_that_leaves_cancels_on_the_server(server: FakeServer) -> None:
    def script(request: Request) -> Iterator[Any]:
        while not request.ended.is_set():
            yield message(text_output=["again and again "])

    server.script = script
    with _command(server, "complete", "Hi") as process:
        assert process.stdout is not None
        assert process.stdout.read(5) == "again"
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(WAIT) == 1
    assert server.one().cancelled()


def _bench_script(request: Request) -> Iterator[Any]:
    if "control" in request.inputs:
        text = json.loads(request.inputs["control"])["text"]
        yield message(control_output=[json.dumps({"token_ids": list(map(ord, text))})], final=True)
        return
    count = request.sampling["max_tokens"]
    prompt = request.inputs.get("input_ids") or request.inputs["text_input"].split()
    for number in range(count):
        yield message(
            text_output=["a"],
            num_input_tokens=[len(prompt)],
            num_output_tokens=[1],
            final=number == count - 1,
        )


@pytest.mark.parametrize("vllm", [False, True])
def test_bench(server: FakeServer, capsys: pytest.CaptureFixture[str], vllm: bool) -> None:
    server.script = _bench_script
    if vllm:
        server.inputs = dict(VLLM_INPUTS)
    status = run(
        server, "bench", "--concurrency", "3", "--requests", "7",
        "--prompt-tokens", "200", "--output-tokens", "5",
    )  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    outcome = json.loads(lines[-1])
    assert status == 0
    assert outcome["completed"] == outcome["requests"] == 7
    assert outcome["errors"] == {}
    assert outcome["prompt_tokens_total"] == 7 * 200
    assert outcome["output_tokens_total"] == 7 * 5
    assert outcome["output_tokens_per_s"] > 0
    assert 0 < outcome["ttft_ms"]["p50"] <= outcome["e2e_ms"]["p99"]
    assert set(outcome["itl_ms"]) == {"mean", "p50", "p90", "p99"}
    assert any(line.startswith("TTFT") for line in lines)
    runs = [request for request in server.requests if "sampling_parameters" in request.inputs]
    assert len(runs) == 7
    prompts = {
        str(request.inputs.get("input_ids") or request.inputs["text_input"]) for request in runs
    }
    assert len(prompts) == 7
    assert all(request.sampling["ignore_eos"] is True for request in runs)


def test_bench_counts_failures(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    def script(request: Request) -> Iterator[Any]:
        if "control" not in request.inputs and len(server.requests) % 2:
            yield message(error="UNAVAILABLE queue: full", final=True)
        else:
            yield from _bench_script(request)

    server.script = script
    assert run(server, "bench", "--requests", "4", "--concurrency", "1") == 1
    outcome = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert outcome["completed"] == 2
    assert outcome["errors"] == {"Unavailable: UNAVAILABLE queue: full": 2}


def test_percentiles() -> None:
    assert percentiles([]) is None
    assert percentiles([4.0]) == {"mean": 4.0, "p50": 4.0, "p90": 4.0, "p99": 4.0}
