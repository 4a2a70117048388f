"""Turns SIGINT, SIGTERM and SIGHUP into one request to stop.

Owns the handlers of the three signals while the command runs. Invariant: only the first signal has
an effect; later ones tell that the command is stopping already, so cleaning up is never cut short.
By default a signal only sets a flag, so that it never tears bookkeeping apart; blocking work that
cleans up after itself asks to be interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_SECONDS = 0.05


class StopRequested(BaseException):
    """The user wants the command to stop. Not an Exception, as KeyboardInterrupt is not."""


class StopSignals:
    """A context manager; main thread only."""

    def __init__(self) -> None:
        self.received: int | None = None  # the first signal's number
        self._raising = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in _SIGNALS:
            # Under nohup the user has asked that a closed terminal be no reason to stop.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises :class:`StopRequested` once a signal has arrived."""
        if self.received is not None:
            raise StopRequested

    def sleep(self, seconds: float = _POLL_SECONDS) -> None:
        """Sleeps, but raises :class:`StopRequested` soon after a signal."""
        end = time.monotonic() + seconds
        self.check()
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_SECONDS))
            self.check()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, a signal raises :class:`StopRequested` out of whatever is running."""
        try:
            self._raising = True
            self.check()
            yield
        finally:
            self._raising = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            # Not through a buffered stream: this may interrupt a write to one.
            with contextlib.suppress(OSError):
                os.write(2, b"\nalready stopping, please wait\n")
            return
        self.received = number
        if self._raising:
            self._raising = False
            raise StopRequested
