"""One HTTP connection: uvicorn's, with an end to waiting for a caller that neither sends nor reads.

uvicorn waits for ever for the rest of a request's head, and for an answer that was given whole to be
read. Here each waits as long as an idle connection may be kept (``timeout_keep_alive``).
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["Connection"]


class Connection(H11Protocol):
    """Closes itself when a head is not whole in time, or when an answer waits and nothing is read."""

    _head_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._head_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_reading()

    def _await_head(self) -> None:
        """The time runs from the first byte of a head; further ones do not prolong it."""
        if self.conn.their_state is not h11.IDLE:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _await_reading(self) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread and self._unread_timer is None:
            self._unread_timer = self.loop.call_later(
                self.timeout_keep_alive, self._check_reading, unread
            )

    def _check_reading(self, before: int) -> None:
        self._unread_timer = None
        # An answer that is still being made has a limit of its own.
        if self.cycle.response_complete and self.transport.get_write_buffer_size() >= before:
            self.transport.abort()
        else:
            self._await_reading()
