"""A ``trident serve`` that runs for the length of a test or a session."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.cli.command import Serve, free_ports, wait_for
from tests.e2e.metrics import Scrape
from trident_client import Client


class RunningServer:
    """Started when entered; when left it must stop cleanly and leave nothing behind.

    ``orderly``: false where Triton's own front end may have kept a request, so that it is ended by force.
    """

    def __init__(self, folder: Path, *arguments: str, orderly: bool = True, **options: Any) -> None:
        self._orderly = orderly
        self.grpc_port, self.metrics_port = free_ports(2)
        self._serve = Serve(
            folder,
            *arguments,
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            **options,
        )

    def __enter__(self) -> RunningServer:
        wait_for(
            lambda: "ready" in self._serve.out or self._serve.process.poll() is not None,
            "the server is ready",
            seconds=240,
        )
        wait_for(self._is_ready, "the model is ready", seconds=60)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._serve:
            if error is not None:
                print(self.log)
        if error is None:
            assert self._serve.process.returncode == 0 or not self._orderly, self.log
            assert self._serve.left_behind() == []

    @property
    def log(self) -> str:
        return self._serve.out + self._serve.err

    def client(self, **settings: Any) -> Client:
        return Client(f"localhost:{self.grpc_port}", **settings)

    def post(self, path: str, body: Any) -> tuple[int, str]:
        """Status and text of an HTTP POST; ``body`` is sent as JSON, bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url(path), data, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    @property
    def http_port(self) -> int:
        return self._serve.http_port

    def url(self, path: str) -> str:
        return f"http://localhost:{self._serve.http_port}{path}"

    def idle_stats(self) -> dict[str, Any]:
        """The engine's counts once nothing is left of any request; fails if something stays."""
        with self.client() as client:
            wait_for(lambda: client.stats()["num_requests"] == 0, "all requests end", seconds=30)
            stats = client.stats()
        assert stats["num_held_blocks"] == 0
        assert stats["num_running_seqs"] == stats["num_waiting_seqs"] == 0
        assert stats["integrity_failures"] == 0
        wait_for(self._each_has_one_outcome, "every request is counted by its outcome", seconds=30)
        return stats

    def _each_has_one_outcome(self) -> bool:
        """Of all requests since the start; one that is accepted meanwhile makes it look wrong."""
        with self.client() as client:
            accepted = client.stats()["num_accepted_requests"]
        return sum(Scrape(self.metrics_port).outcomes().values()) == accepted

    def path(self, absolute: str) -> Path:
        """A file as the server sees it, which may have mounts of its own."""
        return Path(f"/proc/{self._serve.process.pid}/root{absolute}")

    def send_signal(self, number: int) -> None:
        """As a terminal does on Ctrl-C."""
        self._serve.process.send_signal(number)

    @property
    def exit_status(self) -> int | None:
        return self._serve.process.poll()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url("/v2/models/llm/ready"), timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False
