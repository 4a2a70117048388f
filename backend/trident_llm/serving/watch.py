"""Notices that the server leaves, which nothing tells a model.

At shutdown or unload Triton calls ``finalize()`` only after the last final flag, so requests in flight
must be brought to an end before. The sign is that the server no longer calls this model ready. It is
asked over HTTP on the loopback interface, as any client would: the Python backend's own
``is_model_ready`` damages the memory that it shares with the server when the answer is an error, which
is just what a leaving server gives, and takes model and server down with it.

Where the server has no HTTP endpoint, leaving goes unnoticed: requests then run to their end.
"""

from __future__ import annotations

import http.client
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("trident")

POLL_SECONDS = 0.5
# Until the model is called ready for the first time, which is a moment after it has loaded.
FIRST_POLL_SECONDS = 0.05
_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True)
class Endpoint:
    """Where the server's HTTP endpoint listens."""

    host: str
    port: int


def find_endpoint(command_line: list[str]) -> Endpoint | None:
    """The HTTP endpoint that a tritonserver with this command line has, if it has one."""
    if not command_line or Path(command_line[0]).name != "tritonserver":
        return None
    options: dict[str, str] = {}
    for number, argument in enumerate(command_line[1:], start=1):
        name, has_value, value = argument.partition("=")
        if not has_value:
            value = command_line[number + 1] if number + 1 < len(command_line) else ""
        options[name] = value
    if options.get("--allow-http", "true").lower() in ("false", "0"):
        return None
    host = options.get("--http-address", "0.0.0.0")
    port = options.get("--http-port", "8000")
    if not port.isdigit():
        return None
    return Endpoint("127.0.0.1" if host == "0.0.0.0" else host, int(port))


def parent_endpoint() -> Endpoint | None:
    """The HTTP endpoint of the server that started this process."""
    try:
        content = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return None
    return find_endpoint(content.decode(errors="replace").split("\0")[:-1])


class ServerWatch:
    """Asks every half second whether the model is still ready, on a thread of its own."""

    def __init__(self, model_name: str, model_version: str, endpoint: Endpoint | None) -> None:
        self._path = f"/v2/models/{model_name}/versions/{model_version}/ready"
        self._endpoint = endpoint
        self._was_ready = False  # a server may warm a model up before it calls it ready
        self._leaves = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trident-watch", daemon=True)

    def start(self) -> None:
        if self._endpoint is None:
            logger.warning("no HTTP endpoint found: a shutdown waits until all requests have ended")
        else:
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def server_leaves(self) -> bool:
        """Whether the server was seen leaving."""
        return self._leaves

    def _run(self) -> None:
        while not self._leaves:
            if self._stop.wait(POLL_SECONDS if self._was_ready else FIRST_POLL_SECONDS):
                return
            ready = self._ask()
            if ready is not None:
                self._leaves = self._was_ready and not ready
                self._was_ready = self._was_ready or ready

    def _ask(self) -> bool | None:
        """Whether the server calls the model ready; None where that cannot be told."""
        assert self._endpoint is not None
        connection = http.client.HTTPConnection(
            self._endpoint.host, self._endpoint.port, timeout=_TIMEOUT_SECONDS
        )
        try:
            connection.request("GET", self._path)
            status = connection.getresponse().status
        except ConnectionRefusedError:
            return False  # the endpoint is closed already
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        if status == 200:
            return True
        return None if status in (401, 403) else False  # a server may keep this question for some
