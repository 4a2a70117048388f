"""Machines that lack something: shared memory, disk, files, a home. A clear word, and no hang."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Serve, wait_for
from tests.e2e.server import RunningServer
from tests.e2e.test_requests import prompt
from trident_client import TridentError, Unavailable

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
GREEDY = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


def own_mounts(commands: str) -> list[str]:
    """What follows it runs in a mount namespace of its own, where ``commands`` have been run."""
    return ["unshare", "--mount", "sh", "-ec", f'{commands}; exec "$@"', "sh"]


def can_mount() -> bool:
    try:
        command = [*own_mounts("mount -t tmpfs tmpfs /dev/shm"), "true"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


needs_mounts = pytest.mark.skipif(not can_mount(), reason="only root may mount")


@contextmanager
def serving(folder: Path, model: Path, *arguments: str, **options: Any) -> Iterator[RunningServer]:
    with RunningServer(
        folder, f"--model={model}", "--dtype=float32", "--no-self-check", "--num-blocks=400",
        "--max-num-seqs=8", "--max-waiting=64", *arguments, **options,
    ) as server:  # fmt: skip
        yield server


def fill(file: Path) -> None:
    """Leaves no room on the file system that ``file`` is to be on."""

    def write() -> None:
        while True:
            out.write(bytes(2**20))

    with file.open("wb", buffering=0) as out, pytest.raises(OSError, match="No space left"):
        write()


@needs_mounts
def test_little_shared_memory_and_then_none(tmp_path: Path, tiny_model: Path) -> None:
    mounts = own_mounts("mount -t tmpfs -o size=64m tmpfs /dev/shm")
    sampling = {"max_tokens": 30, "ignore_eos": True, "temperature": 0.8}
    with serving(tmp_path, tiny_model, wrapper=mounts) as server, server.client() as client:
        alone = [client.generate(prompt(n), seed=n, **sampling).token_ids for n in range(48)]
        streams = [client.stream(prompt(n), seed=n, **sampling) for n in range(48)]
        assert [stream.result().token_ids for stream in streams] == alone
        filler = server.path("/dev/shm/filler")
        fill(filler)
        with (
            server.client(retries=0) as impatient,
            pytest.raises(Unavailable, match="shared memory"),
        ):
            impatient.generate(prompt(0), seed=0, **sampling)
        filler.unlink()
        assert client.generate(prompt(0), seed=0, **sampling).token_ids == alone[0]
        server.idle_stats()


@needs_mounts
def test_no_room_to_start(tmp_path: Path, tiny_model: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    with Serve(
        tmp_path, f"--model={tiny_model}", "--no-self-check",
        wrapper=own_mounts(f"mount -t tmpfs -o size=4k tmpfs {full}"),
        variables={"TMPDIR": str(full)},
    ) as serve:  # fmt: skip
        assert serve.wait_for_end() == 1
        (line,) = serve.err.splitlines()
        assert line.startswith(f"error: {full}/trident-")
        assert "No space left on device; make room there, or set TMPDIR" in line


@needs_mounts
def test_a_disk_that_runs_full_stops_the_log_and_nothing_else(
    tmp_path: Path, tiny_model: Path
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    with serving(
        tmp_path, tiny_model,
        wrapper=own_mounts(f"mount -t tmpfs -o size=4m tmpfs {full}"),
        variables={"TMPDIR": str(full)},
    ) as server, server.client(retries=0) as client:  # fmt: skip
        expected = client.generate("hello", **GREEDY).text
        fill(server.path(f"{full}/filler"))
        for _ in range(50):  # each would be a line
            assert client.generate("hello", **GREEDY).text == expected
        grammar = {"structured_outputs": {"regex": "a+"}, "max_tokens": 3}
        assert set(client.generate("hello", **grammar).text) <= {"a"}
        server.idle_stats()


@needs_mounts
def test_nothing_but_the_temporary_folder_can_be_written(tmp_path: Path, tiny_model: Path) -> None:
    """Neither the home folder nor the package's own, where compiled kernels are kept."""
    home = tmp_path / "home"
    home.mkdir()
    commands = [
        f"mount --bind {ROOT} {ROOT}", f"mount -o remount,bind,ro {ROOT}",
        f"mount --bind {home} {home}", f"mount -o remount,bind,ro {home}",
    ]  # fmt: skip
    variables = {"HOME": str(home), "XDG_CACHE_HOME": "", "NUMBA_CACHE_DIR": ""}
    with serving(
        tmp_path, tiny_model, wrapper=own_mounts("; ".join(commands)), variables=variables
    ) as server, server.client() as client:  # fmt: skip
        assert client.generate("hello", **GREEDY).text
        with pytest.raises(OSError, match="Read-only"):
            server.path(f"{home}/x").touch()
    assert list(home.iterdir()) == []


def test_too_little_memory_for_the_pool(tmp_path: Path, tiny_model: Path) -> None:
    with Serve(
        tmp_path, f"--model={tiny_model}", "--no-self-check", "--num-blocks=1000000000000"
    ) as serve:
        assert serve.wait_for_end() == 1
        last = serve.err.splitlines()[-1]
        assert last.startswith("error: the KV pool of 1000000000000 blocks needs ")
        assert last.endswith("lower num_blocks or kv_cache_memory_bytes")
        assert "Traceback" not in serve.err


def with_open_files(soft: int, hard: int) -> list[str]:
    return ["prlimit", f"--nofile={soft}:{hard}"]


def test_too_few_open_files(tmp_path: Path, tiny_model: Path) -> None:
    with Serve(tmp_path, f"--model={tiny_model}", wrapper=with_open_files(64, 100)) as serve:
        assert serve.wait_for_end() == 1
        (line,) = serve.err.splitlines()
        assert line.startswith(
            "error: only 100 files may be open at once, and the server needs 256"
        )


def test_connections_that_take_all_files(tmp_path: Path, tiny_model: Path) -> None:
    """Nobody else comes in, but who is there is served; later all is as it was."""
    with serving(
        tmp_path, tiny_model, wrapper=with_open_files(64, 300)
    ) as server, server.client(retries=0) as client:  # fmt: skip
        expected = client.generate("hello", **GREEDY).text
        with ExitStack() as connections:
            for _ in range(400):
                connections.enter_context(socket.create_connection(("127.0.0.1", server.http_port)))
            for _ in range(5):
                assert client.generate("hello", **GREEDY).text == expected
        wait_for(lambda: client.generate("hello", **GREEDY).text == expected, "it answers")
        body = {"text_input": "hello", "parameters": GREEDY}
        wait_for(lambda: answers(server, body), "new connections are taken")
        server.idle_stats()


def answers(server: RunningServer, body: dict[str, Any]) -> bool:
    try:
        return server.post("/v2/models/llm/generate", body)[0] == 200
    except (OSError, TridentError):
        return False
