"""A stream of server-sent events: its start, heartbeats, errors, and its end with the caller.

Owns the HTTP side of a stream; what the events hold is the `EventMaker`'s. Invariants: ``[DONE]`` and
the like come only after success; an error is an event of its own, after which nothing comes; and when
the caller has left, or does not read, the request is cancelled on the model server at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trident_client import Delta, Result, TridentError
from trident_client.openai.errors import ApiError
from trident_client.openai.http import disconnected, json_bytes
from trident_client.openai.pump import Pump, SlowReader

__all__ = ["EventMaker", "EventStream", "event"]

_HEARTBEAT = b": waiting\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(content: Any, name: str | None = None) -> bytes:
    """One event; `content` becomes JSON."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json_bytes(content) + b"\n\n"


class EventMaker(Protocol):
    """Makes the events of one endpoint."""

    def first(self) -> bytes:
        """Events before any output."""

    def feed(self, prompt: int, delta: Delta) -> bytes:
        """The events of one delta."""

    async def last(self, results: Sequence[Result]) -> bytes:
        """Events after all output."""

    def failed(self, error: ApiError) -> bytes:
        """The event that tells of an error."""

    def translate(self, error: TridentError) -> ApiError:
        """What a failure of the model server means at this endpoint."""


class EventStream(Response):
    """The response. `pump` is entered, and is left when the response is over; `begun` is its start.

    `scope["trident_outcome"]` tells how it ended, where that was not well.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        pump: Pump,
        maker: EventMaker,
        begun: Sequence[tuple[int, Delta]] | None,
        *,
        heartbeat: float,
        write_timeout: float,
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._pump = pump
        self._maker = maker
        self._begun = begun
        self._heartbeat = heartbeat
        self._write_timeout = write_timeout
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send_all(scope, send))
        watch = asyncio.ensure_future(disconnected(receive))
        overflow = asyncio.ensure_future(self._pump.overflowed.wait())
        try:
            await self._wait(sender, watch, overflow)
            if not sender.done():
                scope["trident_outcome"] = "client_gone" if watch.done() else "slow_reader"
                self._pump.cancel()
                sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            if not sender.cancelled():
                sender.result()
        finally:
            for task in (sender, watch, overflow):
                task.cancel()
            await asyncio.gather(sender, watch, overflow, return_exceptions=True)
            await self._pump.__aexit__(None, None, None)

    async def _wait(self, *tasks: asyncio.Task[Any]) -> None:
        """Until one of `tasks` is done, or a write has not moved for too long."""
        while True:
            done, _ = await asyncio.wait(
                tasks, timeout=self._write_timeout / 4, return_when=asyncio.FIRST_COMPLETED
            )
            now = asyncio.get_running_loop().time()
            began = self._sending_since
            if done or (began is not None and now - began > self._write_timeout):
                return

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        try:
            deltas = self._begun
            data = self._maker.first()
            while deltas is not None:
                data += b"".join(self._maker.feed(prompt, delta) for prompt, delta in deltas)
                await self._send(send, data or _HEARTBEAT)
                data = b""
                deltas = await self._pump.next(self._heartbeat)
            results = [result for result in self._pump.results if result is not None]
            data += await self._maker.last(results)
        except (TridentError, ApiError) as error:
            scope["trident_outcome"] = "error"
            told = error if isinstance(error, ApiError) else self._maker.translate(error)
            data = self._maker.failed(told)
        except SlowReader:
            scope["trident_outcome"] = "slow_reader"
            return
        await self._send(send, data)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        self._sending_since = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._sending_since = None
