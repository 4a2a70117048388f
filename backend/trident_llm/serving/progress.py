"""Tells how far loading is: to the log, and to whoever started the server.

``trident serve`` names a file in the environment; each event is one JSON line appended to it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from typing import Any

logger = logging.getLogger("trident")

ENVIRONMENT_VARIABLE = "TRIDENT_PROGRESS"


class Progress:
    """Phases of loading, one after another; used by one thread at a time.

    Args:
        model: the name under which events tell of it, since several may load at once.
    """

    def __init__(self, model: str = "") -> None:
        self._model = model
        self._path = os.environ.get(ENVIRONMENT_VARIABLE)
        self._phase: str | None = None
        self._began = 0.0

    def begin(self, phase: str) -> None:
        """Ends the phase before, if one runs, and begins ``phase``."""
        self.end()
        self._phase, self._began = phase, time.monotonic()
        self._write({"event": "begin", "phase": phase})

    def end(self) -> None:
        """Ends the running phase."""
        if self._phase is None:
            return
        seconds = time.monotonic() - self._began
        logger.info("%s: %.2f s", self._phase, seconds)
        self._write({"event": "end", "phase": self._phase, "seconds": round(seconds, 3)})
        self._phase = None

    def count(self, done: int, total: int) -> None:
        """How much of the running phase is done."""
        self._write({"event": "progress", "phase": self._phase, "done": done, "total": total})

    def settings(self, text: str) -> None:
        """The effective settings."""
        logger.info("settings: %s", text)
        self._write({"event": "settings", "text": text})

    def warn(self, text: str) -> None:
        logger.warning("%s", text)
        self._write({"event": "warning", "text": text})

    def error(self, text: str) -> None:
        """Why loading failed, in one sentence; always told inside a phase."""
        if self._phase is None:  # outside of one it would be a fault of a model that runs
            self.begin("settings")
        logger.error("%s", text)
        self._write({"event": "error", "text": text})

    def fault(self, text: str) -> None:
        """Why a model that was loaded serves no more; whoever started the server restarts it."""
        logger.error("%s", text)
        self._write({"event": "error", "text": text})

    def _write(self, event: dict[str, Any]) -> None:
        if self._model:
            event = {"event": event["event"], "model": self._model, **event}
        if self._path:
            # Where the disk is full nobody hears of it, but the model goes on.
            with contextlib.suppress(OSError), open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
