"""One running tritonserver: its flags, its start, its log, its end.

Between us and the server stands the keeper (:mod:`trident_llm.cli.keeper`), which ends it and cleans
up even if we are killed. Invariant: after :meth:`ServerProcess.stop`, or once :attr:`exit_status` is
known, no process and no shared memory of this server is left.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trident_llm.cli import keeper
from trident_llm.cli.line_tail import LineTail
from trident_llm.cli.triton_server import TritonServer

# After its drain a model ends what is left and joins its threads; Triton looks once a second.
_LEAVE_SECONDS = 15
_KILL_SECONDS = 10
_PROGRESS_VARIABLE = "TRIDENT_PROGRESS"
_STUB_NAME = "(triton_python_b"  # as /proc shows it: 15 characters
_ERROR_LINE = re.compile(r"E\d{4} [\d:.]+ \d+ \S+?:\d+\] (.*)")
_IDLE_LINE = re.compile(
    r"[|+]|I\d{4} |Error: Failed to initialize NVML|W\d{4} .*(DCGM|CUDA driver)"
)
_LINE_WIDTH = 400
_BOILERPLATE = re.compile(
    r"failed to load model '[^']*'|failed to load '.*?: |Internal: |TritonModelException: |^\"|\"$"
)


@dataclass(frozen=True)
class ServerSettings:
    """What a server is started with; the same for every restart."""

    http_port: int
    grpc_port: int
    metrics_port: int
    model_control_mode: str
    repository: Path
    complete_config: bool  # every config.pbtxt in the repository is complete
    run_directory: Path
    log_file: Path
    drain_seconds: float
    shm_prefix: str

    @property
    def exit_timeout(self) -> int:
        """Seconds that the server waits for its models after SIGTERM."""
        return math.ceil(self.drain_seconds) + _LEAVE_SECONDS

    @property
    def progress_file(self) -> Path:
        return self.run_directory / "progress.jsonl"


class ServerProcess:
    """Starts a server at once; ask :attr:`exit_status` whether it still runs."""

    def __init__(self, server: TritonServer, settings: ServerSettings) -> None:
        self.settings = settings
        settings.progress_file.write_bytes(b"")
        with settings.log_file.open("ab") as log:
            self.log_start = log.tell()
            self._keeper = subprocess.Popen(
                [
                    sys.executable, "-I", "-S", str(keeper.__file__),
                    str(settings.exit_timeout + _KILL_SECONDS), settings.shm_prefix,
                    str(settings.run_directory), *server_command(server, settings),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=settings.run_directory,  # the stub's Python also searches the current folder
                env={**server.environment, _PROGRESS_VARIABLE: str(settings.progress_file)},
                start_new_session=True,  # Ctrl-C in the terminal reaches only us
            )  # fmt: skip
        assert self._keeper.stdout is not None
        first_line = self._keeper.stdout.readline()
        self.pid = int(first_line) if first_line.strip().isdigit() else None
        self._most_stubs = 0

    @property
    def exit_status(self) -> int | None:
        """None while the server runs; else its status, 128 + N for signal N."""
        status = self._keeper.poll()
        if status is not None and status < 0:  # someone killed the keeper
            self._clean_up()
            return 128 - status
        return status

    def stop(self, wait: Callable[[], None], at_once: bool = False) -> int:
        """Ends the server, its requests first unless ``at_once``; calls ``wait`` until it is gone."""
        assert self._keeper.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already
            if at_once:
                self._keeper.stdin.write(b"!")
            self._keeper.stdin.close()
        while (status := self.exit_status) is None:
            wait()
        assert self._keeper.stdout is not None
        self._keeper.stdout.close()
        return status

    def stub_died(self, num_models: int = 1) -> bool:
        """Whether each of ``num_models`` models had a process that runs it, and now one has none."""
        alive = self._num_stubs()
        if alive is None:
            return False
        self._most_stubs = max(self._most_stubs, alive)
        return alive < num_models <= self._most_stubs

    def read_log(self) -> list[str]:
        """All lines of the log since this server's start."""
        return LineTail(self.settings.log_file, self.log_start).read_new()

    def _num_stubs(self) -> int | None:
        """Live stubs among the server's children; None where the system does not tell."""
        tasks = Path(f"/proc/{self.pid}/task")
        children: list[str] = []
        try:
            for task in tasks.iterdir():
                with contextlib.suppress(ProcessLookupError):
                    children += (task / "children").read_text().split()
        except OSError:
            return None
        count = 0
        for child in children:
            with contextlib.suppress(OSError):
                name, _, rest = Path(f"/proc/{child}/stat").read_text().rpartition(")")
                count += name.endswith(_STUB_NAME) and rest.split()[0] not in ("Z", "X")
        return count

    def _clean_up(self) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        keeper.remove_shared_memory(self.settings.shm_prefix)


def server_command(server: TritonServer, settings: ServerSettings) -> list[str]:
    """The command line of tritonserver."""
    command = [
        str(server.binary),
        f"--model-repository={settings.repository}",
        f"--http-port={settings.http_port}",
        f"--grpc-port={settings.grpc_port}",
        f"--metrics-port={settings.metrics_port}",
        f"--exit-timeout-secs={settings.exit_timeout}",
        f"--backend-config=python,shm-region-prefix-name={settings.shm_prefix}",
        f"--model-control-mode={settings.model_control_mode}",
    ]
    if settings.model_control_mode == "explicit":
        command.append("--load-model=*")
    if settings.complete_config:  # else Triton asks the model, in a process of its own
        command.append("--disable-auto-complete-config")
    if server.backend_directory is not None:
        command.append(f"--backend-directory={server.backend_directory}")
    return command


def reason_in_log(lines: list[str]) -> str | None:
    """The sentence of the log's last error, without Triton's prefixes; None if there is none."""
    for line in reversed(lines):
        match = _ERROR_LINE.match(line)
        text = match[1] if match is not None else ""
        if "failed to load" in text or "failed to start" in text:
            text = text.split("\\n")[0]
            while (shorter := _BOILERPLATE.sub("", text).strip()) != text:
                text = shorter
            if text:
                return text
    return None


def log_tail(lines: list[str], count: int = 12) -> list[str]:
    """The last lines that tell something: no tables, nothing of what merely informs."""
    telling = [line for line in lines if line.strip() and not _IDLE_LINE.match(line)]
    return [line[:_LINE_WIDTH] for line in telling[-count:]]
