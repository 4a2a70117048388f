"""Notices an engine that has work and gets nowhere: a step that hangs, or one that never comes.

A device can hang without an error, and the engine's thread hangs with it; only another thread can
tell. Who waits gets an error then, and whoever started the server restarts it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from trident_llm.engine.loop import EngineLoop

logger = logging.getLogger("trident")


class Watchdog:
    """Looks at the engine's progress on a thread of its own.

    Time in which this thread did not run either (a suspended machine, a stopped process, no free
    core) says nothing of the engine, and is not counted.

    Args:
        seconds: without progress, while there is work; then the engine counts as stuck.
        on_stuck: called each time that it becomes so; must not block.
    """

    def __init__(self, loop: EngineLoop[Any], seconds: float, on_stuck: Callable[[], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._on_stuck = on_stuck
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trident-watchdog", daemon=True)
        self.stuck = False  # until it gets on, if ever

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        stalled = 0.0
        looked = time.monotonic()
        while not self._stop.wait(period := min(1.0, self._seconds / 4)):
            now = time.monotonic()
            since_last_look, looked = now - looked, now
            if self._loop.seconds_without_progress < since_last_look:
                stalled = 0.0
            else:
                stalled += min(since_last_look, 2 * period)
            stuck = stalled > self._seconds
            if stuck and not self.stuck:
                logger.error("the engine has made no progress for %g s", self._seconds)
                self.stuck = True
                self._on_stuck()
            elif self.stuck and not stuck:
                logger.warning("the engine makes progress again")
                self.stuck = False
