"""A ``trident serve`` of a benchmark's own, and a gateway before it, on free ports.

Knows nothing of workloads. Invariant: when the ``with`` is left, the server is gone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from perf.child import Child, free_ports

MODEL_NAME = "llm"


class Server:
    """A server that runs between entering and leaving; ``settings`` as in ``model.json``."""

    def __init__(
        self, settings: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> None:
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        self._child = Child(
            [
                sys.executable, "-m", "trident_llm.cli.main", "serve", "--no-self-check",
                f"--http-port={self.http_port}", f"--grpc-port={self.grpc_port}",
                f"--metrics-port={self.metrics_port}",
                *(_argument(name, value) for name, value in settings.items()),
            ],
            f"http://{self.http_url}/v2/models/{MODEL_NAME}/ready",
            environment,
        )  # fmt: skip

    @property
    def url(self) -> str:
        """Where it takes gRPC."""
        return f"localhost:{self.grpc_port}"

    @property
    def http_url(self) -> str:
        """Where it takes HTTP."""
        return f"localhost:{self.http_port}"

    def __enter__(self) -> Server:
        self._child.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._child.stop()

    def processes(self) -> list[int]:
        """Process ids of the server and all that it started, in no order."""
        found, pending = [], [self._child.pid]
        while pending:
            pid = pending.pop()
            found.append(pid)
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                pending += [int(child) for child in task.read_text().split()]
        return found


class Gateway(Child):
    """A gateway for OpenAI's API before the server that takes gRPC at ``server_url``."""

    def __init__(self, server_url: str, *arguments: str) -> None:
        (port,) = free_ports(1)
        self.url = f"http://localhost:{port}"
        super().__init__(
            [
                sys.executable, "-m", "trident_client.cli", "openai", f"--url={server_url}",
                f"--model={MODEL_NAME}", f"--port={port}", *arguments,
            ],
            f"{self.url}/health/ready",
        )  # fmt: skip


def _argument(name: str, value: object) -> str:
    """An engine setting as an option of the command line."""
    option = name.replace("_", "-")
    if str(value).lower() in ("true", "false"):
        return f"--{option}" if str(value).lower() == "true" else f"--no-{option}"
    return f"--{option}={value}"
