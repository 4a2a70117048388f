"""The outputs of one HTTP request, read at the server's pace and kept until its caller reads on.

Owns the buffer between the model server and a slow reader. Invariants: what is kept is bounded, since
unread deltas of one choice are merged and a limit of bytes ends the request; and every stream is
cancelled on the server once the pump is left, however that comes.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from trident_client import AsyncStream, Delta, Result, TridentError

__all__ = ["AT_ONCE", "Pump", "SlowReader", "merge"]

AT_ONCE = 16
"""Prompts of one request under way at the same time."""

_LOGPROB_BYTES = 150


class SlowReader(Exception):
    """The caller reads so slowly that more output waits than may."""


def merge(first: Delta, second: Delta) -> Delta:
    """Both deltas of one choice as one."""
    return dataclasses.replace(
        second,
        text=first.text + second.text,
        token_ids=_joined(first.token_ids, second.token_ids),
        num_tokens=_joined(first.num_tokens, second.num_tokens),
        logprobs=_joined(first.logprobs, second.logprobs),
    )


def _joined(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _size(delta: Delta) -> int:
    """About how many bytes the delta makes on the wire."""
    candidates = sum(map(len, delta.logprobs or ()))
    return len(delta.text) + 8 * len(delta.token_ids or ()) + _LOGPROB_BYTES * candidates


class Pump:
    """Reads the streams of one request, one for each prompt.

    An async context manager: entered, it reads; left, it cancels what has not ended.
    """

    def __init__(self, streams: Sequence[AsyncStream], *, max_unread_bytes: int) -> None:
        self._streams = streams
        self._max_unread_bytes = max_unread_bytes
        self._places = asyncio.Semaphore(AT_ONCE)
        self._tasks: list[asyncio.Task[None]] = []
        self._unread: dict[tuple[int, int], Delta] = {}
        self._unread_bytes = 0
        self._running = len(streams)
        self._news = asyncio.Event()
        self._failure: Exception | None = None
        self.results: list[Result | None] = [None] * len(streams)
        self.overflowed = asyncio.Event()

    async def __aenter__(self) -> Pump:
        self._tasks = [
            asyncio.ensure_future(self._read(index)) for index in range(len(self._streams))
        ]
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cancel(self) -> None:
        """Cancel what has not ended, on the server too."""
        for task, stream in zip(self._tasks, self._streams):
            stream.cancel()
            task.cancel()

    async def next(self, timeout: float) -> list[tuple[int, Delta]] | None:
        """What is new, as (prompt, delta); nothing after `timeout` seconds; None after the end.

        Raises what the request failed with, after all that came before it has been given.
        """
        if not self._news.is_set():
            alarm = asyncio.get_running_loop().call_later(timeout, self._news.set)
            try:
                await self._news.wait()
            finally:
                alarm.cancel()
        self._news.clear()
        if self._unread:
            deltas = [(prompt, delta) for (prompt, _), delta in self._unread.items()]
            self._unread, self._unread_bytes = {}, 0
            self._wake_if_over()
            return deltas
        if self._failure is not None:
            raise self._failure
        return None if self._running == 0 else []

    def _wake_if_over(self) -> None:
        if self._running == 0 or self._failure is not None:
            self._news.set()

    async def _read(self, prompt: int) -> None:
        stream = self._streams[prompt]
        try:
            async with self._places, stream:
                async for delta in stream:
                    self._keep(prompt, delta)
                self.results[prompt] = await stream.result()
        except (TridentError, SlowReader) as error:
            self._fail(error)
        self._running -= 1
        self._wake_if_over()

    def _keep(self, prompt: int, delta: Delta) -> None:
        key = (prompt, delta.index)
        kept = self._unread.get(key)
        self._unread[key] = delta if kept is None else merge(kept, delta)
        self._unread_bytes += _size(delta)
        self._news.set()
        if self._unread_bytes > self._max_unread_bytes:
            raise SlowReader

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
            if isinstance(error, SlowReader):
                self._unread = {}
                self.overflowed.set()
            for stream in self._streams:
                stream.cancel()
        self._news.set()
