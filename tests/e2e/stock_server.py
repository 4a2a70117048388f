"""A tritonserver started as its users start it: by its name, without ``trident serve``."""

from __future__ import annotations

import signal
import subprocess
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tests.cli.command import free_ports, wait_for
from trident_llm.cli.triton_server import find_tritonserver, prepare_server


class StockServer:
    """Runs while entered. ``python`` is what the packages are installed for.

    Only what a container brings is made here: the Python backend in one place, and the paths to
    libraries and to ``python3``. The packages must be found because they are installed.
    """

    def __init__(
        self,
        folder: Path,
        repository: Path,
        *arguments: str,
        python: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        server = prepare_server(find_tritonserver(None), folder)
        self.environment = {**server.environment, **(environment or {})}
        del self.environment["PYTHONPATH"]
        if python is not None:
            self.environment["PATH"] = f"{python.parent}:{self.environment['PATH']}"
        command = [
            str(server.binary), f"--model-repository={repository}",
            f"--http-port={self.http_port}", f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}", *arguments,
        ]  # fmt: skip
        if server.backend_directory is not None:
            command.append(f"--backend-directory={server.backend_directory}")
        self._log = folder / "tritonserver.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for_end(self) -> int:
        """The exit status of a server that ends by itself."""
        return self._process.wait(120)

    def __enter__(self) -> StockServer:
        try:
            wait_for(
                lambda: self._answers("/v2/health/ready") or self._process.poll() is not None,
                "the server is ready",
                seconds=240,
            )
            assert self._process.poll() is None
        except BaseException:
            print(self.log)
            self._process.kill()
            self._process.wait()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            print(self.log)
            raise
        if error is not None:
            print(self.log)
        else:
            assert status == 0, self.log

    def _answers(self, path: str) -> bool:
        try:
            url = f"http://localhost:{self.http_port}{path}"
            with urllib.request.urlopen(url, timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False
