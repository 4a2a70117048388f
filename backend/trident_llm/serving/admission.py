"""Whether a request may come in now: decided in ``execute()``, before anything is done for it.

The engine keeps ``max_waiting`` requests, so that it sees the priorities, cancels and prefixes of all
that wait; those for which a place in the batch is free do not count. Beyond that a request is either refused at once (``reject``) or kept waiting in ``execute()``
(``block``), which holds up Triton's own queue: a ``dynamic_batching`` block's priority levels,
``max_queue_size`` and queue timeouts then work. Lower ``max_waiting`` to leave more to that queue.
A control operation does not queue: whoever looks at a server that is full gets an answer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Literal

from trident_llm.core.errors import ErrorCode, RequestError
from trident_llm.engine.loop import LEAVING
from trident_llm.serving.responder import RequestHandle

# The head of the queue looks this often whether it was cancelled, and at every step for room.
SLICE_SECONDS = 0.1
# A response that finds no room fails, and with it the request; the region grows by such steps.
MIN_SHARED_MEMORY = 2**20
_SHARED_MEMORY = "/dev/shm"


class Admission:
    """One per instance; :meth:`refusal` is called by the main thread alone.

    Args:
        num_waiting: requests that wait for a place, wherever they are.
        leaving: set once the server leaves.
    """

    def __init__(
        self,
        mode: Literal["reject", "block"],
        max_waiting: int,
        num_waiting: Callable[[], int],
        leaving: threading.Event,
    ) -> None:
        self._mode = mode
        self._max_waiting = max_waiting
        self._num_waiting = num_waiting
        self._leaving = leaving
        self._stepped = threading.Event()
        self.num_blocked = 0  # 1 while a request waits for room: Triton's queue counts it no more

    def stepped(self) -> None:
        """The engine has done a step: there may be room now."""
        self._stepped.set()

    def refusal(self, handle: RequestHandle, *, control: bool = False) -> RequestError | None:
        """Why the request may not come in; None if it may. Waits for room if so configured.

        Args:
            control: it asks for a control operation. As many of these as requests may be unanswered.
        """
        free = free_shared_memory()
        if free is not None and free < MIN_SHARED_MEMORY:
            return RequestError(
                ErrorCode.UNAVAILABLE,
                "server",
                f"has too little shared memory left in {_SHARED_MEMORY}; give it more",
            )
        if control:
            crowded = self._num_waiting() >= 2 * self._max_waiting
            return self._full() if crowded else None
        try:
            return self._wait_for_room(handle)
        finally:
            self.num_blocked = 0

    def _wait_for_room(self, handle: RequestHandle) -> RequestError | None:
        while not self._leaving.is_set():
            self._stepped.clear()
            if handle.abort_error is not None:
                return handle.abort_error
            if self._num_waiting() < self._max_waiting:
                return None
            if self._mode == "reject":
                return self._full()
            self.num_blocked = 1
            self._stepped.wait(SLICE_SECONDS)
        return LEAVING

    def _full(self) -> RequestError:
        return RequestError(
            ErrorCode.UNAVAILABLE,
            "queue",
            f"is full: {self._max_waiting} requests wait already; try again later",
        )


def free_shared_memory() -> int | None:
    """Bytes left where requests and responses travel; None where that cannot be told."""
    try:
        status = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
