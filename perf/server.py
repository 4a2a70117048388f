"""A ``trident serve`` of a benchmark's own, on free ports, for as long as the benchmark runs.

Owns starting and stopping it; knows nothing of workloads. Invariant: when the ``with`` is left, the
server is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

MODEL_NAME = "llm"
_START_SECONDS = 240.0
_STOP_SECONDS = 60.0


class Server:
    """A server that runs between entering and leaving; ``settings`` as in ``model.json``."""

    def __init__(
        self, settings: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> None:
        self.http_port, self.grpc_port, self.metrics_port = _free_ports(3)
        self._arguments = [_argument(name, value) for name, value in settings.items()]
        self._environment = {**os.environ, **(environment or {})}

    @property
    def url(self) -> str:
        """Where it takes gRPC."""
        return f"localhost:{self.grpc_port}"

    @property
    def http_url(self) -> str:
        """Where it takes HTTP."""
        return f"localhost:{self.http_port}"

    def __enter__(self) -> Server:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "trident_llm.cli.main", "serve", "--no-self-check",
                f"--http-port={self.http_port}", f"--grpc-port={self.grpc_port}",
                f"--metrics-port={self.metrics_port}", *self._arguments,
            ],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
            env=self._environment,
        )  # fmt: skip
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def processes(self) -> list[int]:
        """Process ids of the server and all that it started, in no order."""
        found, pending = [], [self._process.pid]
        while pending:
            pid = pending.pop()
            found.append(pid)
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                pending += [int(child) for child in task.read_text().split()]
        return found

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                raise RuntimeError(f"the server did not start:\n{self._log.read()[-4000:]}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            url = f"http://{self.http_url}/v2/models/{MODEL_NAME}/ready"
            with urllib.request.urlopen(url, timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()


def _argument(name: str, value: object) -> str:
    """An engine setting as an option of the command line."""
    option = name.replace("_", "-")
    if str(value).lower() in ("true", "false"):
        return f"--{option}" if str(value).lower() == "true" else f"--no-{option}"
    return f"--{option}={value}"


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("0.0.0.0", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
