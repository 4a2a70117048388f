"""The server's process with a stand-in for tritonserver: a shell script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.command import processes_of_group_of, wait_for
from trident_llm.cli import keeper
from trident_llm.cli.server_process import (
    ServerProcess,
    ServerSettings,
    log_tail,
    reason_in_log,
    server_command,
)
from trident_llm.cli.server_run import RestartBudget
from trident_llm.cli.triton_server import TritonServer

# A server with one child, which the server does not end.
_PATIENT = """\
: > "$SHM"; trap 'echo asked; exit 0' TERM
sleep 60 & echo started; wait
"""
_STUBBORN = """\
: > "$SHM"; trap '' TERM
echo started; while :; do sleep 60; done
"""


def make_settings(folder: Path) -> ServerSettings:
    return ServerSettings(
        http_port=1,
        grpc_port=2,
        metrics_port=3,
        model_control_mode="none",
        repository=folder / "models",
        complete_config=True,
        run_directory=folder,
        log_file=folder / "server.log",
        drain_seconds=2.5,
        shm_prefix=f"trident_test_{os.getpid()}_",
    )


def start(folder: Path, script: str) -> ServerProcess:
    settings = make_settings(folder)
    binary = folder / "server"
    binary.write_text(f"#!/bin/sh\n{script}")
    binary.chmod(0o755)
    shared = f"/dev/shm/{settings.shm_prefix}region"
    process = ServerProcess(TritonServer(binary, None, {**os.environ, "SHM": shared}), settings)
    wait_for(lambda: "started" in process.read_log() or process.exit_status is not None, "start")
    return process


def assert_gone(process: ServerProcess) -> None:
    assert process.pid is not None
    assert processes_of_group_of(process.pid) == []
    assert not list(Path("/dev/shm").glob(f"{process.settings.shm_prefix}*"))


def pause() -> None:
    time.sleep(0.02)


def test_stopping_asks_the_server_and_ends_what_it_leaves(tmp_path: Path) -> None:
    process = start(tmp_path, _PATIENT)
    assert process.pid is not None
    assert len(processes_of_group_of(process.pid)) == 2
    assert process.exit_status is None
    assert process.stop(pause) == 0
    assert process.read_log() == ["started", "asked"]
    assert_gone(process)


def test_a_server_that_does_not_listen_is_ended_at_once(tmp_path: Path) -> None:
    process = start(tmp_path, _STUBBORN)
    assert process.stop(pause, at_once=True) == 128 + signal.SIGKILL
    assert_gone(process)


def test_a_server_that_ends_by_itself_is_cleaned_up(tmp_path: Path) -> None:
    process = start(tmp_path, ': > "$SHM"; sleep 60 & exit 7')
    wait_for(lambda: process.exit_status is not None, "end")
    assert process.exit_status == 7
    assert_gone(process)
    assert process.stop(pause) == 7


def test_a_killed_keeper_takes_the_server_with_it(tmp_path: Path) -> None:
    process = start(tmp_path, _STUBBORN)
    assert process.pid is not None
    parent = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    wait_for(lambda: process.exit_status is not None, "the keeper's end")
    assert process.exit_status == 128 + signal.SIGKILL
    wait_for(lambda: not processes_of_group_of(process.pid or 0), "the server's end")
    process.stop(pause)
    assert_gone(process)


def test_the_keeper_ends_a_server_that_ignores_the_end_of_its_pipe(tmp_path: Path) -> None:
    script = tmp_path / "server"
    ignores = tmp_path / "ignores"
    script.write_text(f"#!/bin/sh\ntrap '' TERM\n: > '{ignores}'\nwhile :; do sleep 60; done\n")
    script.chmod(0o755)
    command = [sys.executable, "-I", "-S", str(keeper.__file__), "0.2", "none_", str(tmp_path)]
    with subprocess.Popen(
        [*command, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        server = int(process.stdout.readline())
        wait_for(ignores.exists, "the server ignores the signal")
        process.stdin.close()
        assert process.wait(30) == 128 + signal.SIGKILL
        assert processes_of_group_of(server) == []
    assert tmp_path.exists()  # its parent lives and removes it


def test_a_program_that_cannot_start_is_in_the_log(tmp_path: Path) -> None:
    process = start(tmp_path, "")
    process.stop(pause)
    binary = TritonServer(tmp_path / "absent", None, dict(os.environ))
    process = ServerProcess(binary, make_settings(tmp_path))
    wait_for(lambda: process.exit_status is not None, "end")
    assert process.exit_status == 127
    assert process.read_log()[-1].endswith("absent: No such file or directory")
    process.stop(pause)


def test_the_server_s_command_line(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    own = server_command(TritonServer(Path("/s"), tmp_path / "backends", {}), settings)
    assert own[0] == "/s"
    assert f"--backend-directory={tmp_path}/backends" in own
    assert "--disable-auto-complete-config" in own
    assert f"--backend-config=python,shm-region-prefix-name={settings.shm_prefix}" in own
    timeout = next(int(o.split("=")[1]) for o in own if o.startswith("--exit-timeout-secs="))
    assert timeout >= settings.drain_seconds + 10
    assert not any("load-model" in option for option in own)
    installed = server_command(TritonServer(Path("/s"), None, {}), settings)
    assert not any("backend-directory" in option for option in installed)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "E1003 08:43:05.612345 123 model_lifecycle.cc:642] \"failed to load 'llm' version 1: "
            'Internal: TritonModelException: no tensor x\\n\\nAt:\\n  /m.py(3): initialize\\n"',
            "no tensor x",
        ),
        (
            'E1003 08:43:05.612345 123 main.cc:330] "failed to start HTTP service: in use"',
            "failed to start HTTP service: in use",
        ),
        ("I1003 08:43:05.612345 123 model_lifecycle.cc:777] \"failed to load 'llm'\"", None),
        ('E1003 08:43:05.612345 123 server.cc:241] "CudaDriverHelper"', None),
    ],
)
def test_the_reason_is_found_in_the_log(line: str, reason: str | None) -> None:
    assert reason_in_log(["first", line, "I1003 08:43:06.0 123 x.cc:1] later"]) == reason


def test_the_tail_of_the_log_is_what_tells_something() -> None:
    lines = ["one", "| a | b |", "+---+", "", "I1003 08:43:05 1 x.cc:1] fine", "x" * 1000, "last"]
    assert log_tail(lines, 2) == ["x" * 400, "last"]
    assert log_tail(lines, 9) == ["one", "x" * 400, "last"]


def test_restarts_are_limited_within_the_window() -> None:
    budget = RestartBudget(limit=2, window=100.0)
    assert [budget.take(now) for now in (0.0, 50.0, 99.0, 100.0, 101.0, 151.0)] == [
        True, True, False, True, False, True,
    ]  # fmt: skip
