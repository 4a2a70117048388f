"""The outputs of one HTTP request, read at the server's pace and kept until its caller reads on.

Owns the buffer between the model server and a slow reader. Invariants: what is kept is bounded, since
unread deltas of one choice are merged and a limit of bytes ends the request; and every stream is
cancelled on the server once the pump is left, however that comes.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TypeVar

from trident_client import AsyncStream, Delta, Result, TridentError

__all__ = ["AT_ONCE", "Pump", "SlowReader", "merge"]

AT_ONCE = 16
"""Prompts of one request under way at the same time."""

_LOGPROB_BYTES = 150
_MOST_PARTS = 64  # deltas of a choice that wait by themselves

_T = TypeVar("_T")


class SlowReader(Exception):
    """The caller reads so slowly that more output waits than may."""


def merge(deltas: Sequence[Delta]) -> Delta:
    """Deltas of one choice, in order, as one."""
    if len(deltas) == 1:
        return deltas[0]
    counts = [delta.num_tokens for delta in deltas if delta.num_tokens is not None]
    return dataclasses.replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=_chained(delta.token_ids for delta in deltas),
        num_tokens=sum(counts) if counts else None,
        logprobs=_chained(delta.logprobs for delta in deltas),
    )


def _chained(parts: Iterable[tuple[_T, ...] | None]) -> tuple[_T, ...] | None:
    known = [part for part in parts if part is not None]
    return tuple(chain.from_iterable(known)) if known else None


def _size(delta: Delta) -> int:
    """About how many bytes the delta makes on the wire."""
    candidates = sum(map(len, delta.logprobs or ()))
    return len(delta.text) + 8 * len(delta.token_ids or ()) + _LOGPROB_BYTES * candidates


class Pump:
    """Reads the streams of one request, one for each prompt.

    An async context manager: entered, it reads; left, it cancels what has not ended.
    """

    def __init__(
        self,
        streams: Sequence[AsyncStream],
        *,
        max_unread_bytes: int,
        charge: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self._streams = streams
        self._max_unread_bytes = max_unread_bytes
        self._charge = charge
        self._places = asyncio.Semaphore(AT_ONCE)
        self._tasks: list[asyncio.Task[None]] = []
        self._unread: dict[tuple[int, int], list[Delta]] = {}  # by prompt and choice
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
            deltas = [(prompt, merge(parts)) for (prompt, _), parts in self._unread.items()]
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
        finally:
            self._charge((stream.usage.prompt_tokens or 0) + (stream.usage.completion_tokens or 0))
        self._running -= 1
        self._wake_if_over()

    def _keep(self, prompt: int, delta: Delta) -> None:
        parts = self._unread.setdefault((prompt, delta.index), [])
        parts.append(delta)
        # Not one by one, which would copy all that waits for each token.
        if len(parts) > _MOST_PARTS:
            parts[:] = [merge(parts)]
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
