"""The OpenAI-compatible gateway as a child process: its command line, start and end.

It is the client package's command, started as users may start it themselves; nothing of it is imported.
It ends when its standard input does, which also happens when we are killed. Invariant: after
:meth:`GatewayProcess.stop` it is gone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

from trident_llm.cli.errors import CommandError
from trident_llm.cli.options import ServeOptions

_MODULES = ("trident_client", "fastapi", "uvicorn")
_KILL_SECONDS = 5.0


def check_gateway() -> None:
    """Refuses to go on where the gateway is not installed."""
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(
            f"--openai-port needs {', '.join(missing)}; run: pip install 'trident-client[openai]'"
        )


def gateway_command(options: ServeOptions) -> list[str]:
    """The command line of the gateway; what the user adds comes last and so wins."""
    return [
        sys.executable, "-m", "trident_client.cli", "openai",
        f"--url=localhost:{options.grpc_port}", f"--model={options.model_name}",
        # As widely as the server itself listens.
        "--host=0.0.0.0", f"--port={options.openai_port}",
        f"--metrics-url=http://localhost:{options.metrics_port}/metrics",
        *(f"--embed-model={name}" for name in options.models[1:]),
        *options.openai_args, "--stop-at-eof",
    ]  # fmt: skip


class GatewayProcess:
    """Starts a gateway at once; ask :attr:`exit_status` whether it still runs."""

    def __init__(self, options: ServeOptions, log_file: Path) -> None:
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                gateway_command(options),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal reaches only us
            )

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def begin_stop(self) -> None:
        """Ask it to take no more requests, and to leave once the last one has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def stop(self) -> None:
        """End it, after a few seconds by force."""
        self.begin_stop()
        try:
            self._process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):  # its workers are of its group
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
