"""Notices that the server leaves, which nothing tells a model.

At shutdown or unload Triton calls ``finalize()`` only after the last final flag, so requests in flight
must be brought to an end before. The sign is that the server no longer calls this model ready.

The question may only be asked while a request has not got its final flag: such a request keeps the
model from being taken down, and a question that crosses the taking down can crash the server. So the
output thread asks, between two sends, and nobody asks while nothing is in flight.
"""

from __future__ import annotations

import logging
import time

import triton_python_backend_utils as pb_utils

logger = logging.getLogger("trident")

POLL_SECONDS = 0.5


class ServerWatch:
    """Asks whether the model is still ready, at most every half second."""

    def __init__(self, model_name: str, model_version: str) -> None:
        self._model = (model_name, model_version)
        self._was_ready = False  # a server may warm a model up before it calls it ready
        self._next_poll = 0.0

    def server_leaves(self) -> bool:
        """Whether the server is leaving; call only while a request is without its final flag."""
        now = time.monotonic()
        if now < self._next_poll:
            return False
        self._next_poll = now + POLL_SECONDS
        ready = self._is_ready()
        leaves = self._was_ready and not ready
        self._was_ready = self._was_ready or ready
        return leaves

    def _is_ready(self) -> bool:
        name, version = self._model
        try:
            return bool(pb_utils.is_model_ready(model_name=name, model_version=version))
        except Exception:  # a server on its way out answers with an error
            return False
