"""Runs ``trident serve`` as a user does, and looks for what it leaves behind."""

from __future__ import annotations

import glob
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import trident_llm

_FAKE_MODEL = Path(__file__).parent / "fake_model"
_DEADLINE_SECONDS = 60.0


def wait_for(
    condition: Callable[[], object], what: str, seconds: float = _DEADLINE_SECONDS
) -> None:
    """Polls until ``condition`` holds; fails with ``what`` when it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.02)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("0.0.0.0", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def fake_repository(folder: Path, **settings: object) -> Path:
    """A model repository with the fake model; ``settings`` are what its model.json says."""
    version = folder / "models" / "llm" / "1"
    version.mkdir(parents=True)
    shutil.copy(_FAKE_MODEL / "config.pbtxt", version.parent)
    shutil.copy(_FAKE_MODEL / "model.py", version)
    (version / "model.json").write_text(json.dumps(settings))
    return folder / "models"


def processes_of_group_of(keeper_child: int) -> list[int]:
    """Live processes in the process group led by ``keeper_child``."""
    found = []
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            fields = Path(path).read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == keeper_child and fields[0] not in ("Z", "X"):
            found.append(int(path.split("/")[2]))
    return found


class Serve:
    """One ``trident serve``; a context manager that ends it if the test did not.

    ``wrapper`` is a command that becomes the one that follows it, as ``env`` does.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        wrapper: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.http_port, grpc_port, metrics_port = free_ports(3)
        self._out = folder / "out.txt"
        self._err = folder / "err.txt"
        roots = [str(Path(path).parent) for path in trident_llm.__path__]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*roots, os.environ.get("PYTHONPATH", "")]),
            "TMPDIR": str(folder),
            **(variables or {}),
        }
        self.temporary = folder
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [
                    *wrapper, sys.executable, "-m", "trident_llm.cli.main", "serve",
                    f"--http-port={self.http_port}", f"--grpc-port={grpc_port}",
                    f"--metrics-port={metrics_port}", *arguments,
                ],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment,
            )  # fmt: skip

    def __enter__(self) -> Serve:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(_DEADLINE_SECONDS)
        if error is not None:
            print(self.out, self.err, sep="\n--- err\n")

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_for_output(self, text: str, count: int = 1) -> None:
        wait_for(
            lambda: self.out.count(text) >= count or self.process.poll() is not None, repr(text)
        )
        assert self.out.count(text) >= count, self.out + self.err

    def wait_for_end(self) -> int:
        return self.process.wait(_DEADLINE_SECONDS)

    def server(self) -> int:
        """The process id of tritonserver."""
        (server,) = self.children(self.children(self.process.pid)[0])
        return server

    def stub(self) -> int:
        """The process id of the process that runs the model."""
        (stub,) = self.children(self.server())
        return stub

    def left_behind(self) -> list[str]:
        """Run directories and shared memory of this run that are still there."""
        pid = self.process.pid
        patterns = (f"{self.temporary}/trident-{pid}-*", f"/dev/shm/trident_{pid}_*")
        return [path for pattern in patterns for path in glob.glob(pattern)]

    def children(self, pid: int) -> list[int]:
        """The processes that process ``pid`` has started."""
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]
