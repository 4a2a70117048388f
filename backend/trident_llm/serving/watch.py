"""Notices that the server leaves, which nothing tells a model.

At shutdown or unload Triton calls ``finalize()`` only after the last final flag, so requests in flight
must be brought to an end before. The sign is that the server no longer calls this model ready.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import triton_python_backend_utils as pb_utils

logger = logging.getLogger("trident")

POLL_SECONDS = 0.5


class Watcher:
    """Polls the model's own readiness and calls ``leave`` once it ends, on its own thread."""

    def __init__(self, model_name: str, leave: Callable[[], None]) -> None:
        self._model_name = model_name
        self._leave = leave
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trident-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        was_ready = False
        while not self._stop.wait(POLL_SECONDS):
            ready = self._is_ready()
            if was_ready and not ready:
                logger.info("the server is leaving")
                self._leave()
                return
            was_ready = was_ready or ready

    def _is_ready(self) -> bool:
        try:
            return bool(pb_utils.is_model_ready(model_name=self._model_name))
        except Exception:  # a server on its way out answers with an error
            return False
