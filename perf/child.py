"""A process that runs as long as a benchmark needs it.

Invariant: when the ``with`` is left, however that comes, the process is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from types import TracebackType

_START_SECONDS = 240.0
_STOP_SECONDS = 60.0


class Child:
    """A command that serves HTTP: entered, it answers at ``ready_url`` with 200; left, it has ended."""

    def __init__(
        self,
        command: Sequence[str],
        ready_url: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = list(command)
        self._ready_url = ready_url
        self._environment = {**os.environ, **(environment or {})}

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Child:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
            env=self._environment,
        )  # fmt: skip
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends it, after a minute by force."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                raise RuntimeError(f"the server did not start:\n{self._log.read()[-4000:]}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self._ready_url, timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.create_server(("0.0.0.0", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
