"""The asyncio client's connection: a channel, the calls on it, and what the model is.

Owns all awaiting; the counterpart of `trident_client._connection`, with the same invariant: one RPC
per request, so that cancelling one, or the task that waits for it, never touches another. The
channel belongs to the event loop of the first call.
"""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from trident_client._channel import Settings
from trident_client._request import BuildInputs
from trident_client._stream import Exchange, model_info, stream_metadata
from trident_client.errors import DeadlineExceeded, NotFound, TridentError, Unavailable
from trident_client.results import ModelInfo
from trident_client.wire import Response, Value

__all__ = ["AsyncCall", "AsyncConnection", "last_response"]

_T = TypeVar("_T")
_CANCELLED_HERE = "Locally cancelled by application!"  # as gRPC tells it of a cancel on this side


class AsyncCall:
    """One request's RPC, repeated where that is allowed. Nothing is sent before `start`."""

    def __init__(
        self, connection: AsyncConnection, build: BuildInputs, timeout: float | None
    ) -> None:
        self.exchange = Exchange(connection.settings, timeout)
        self._connection = connection
        self._build = build
        self._inputs: Mapping[str, Value] = {}
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._woken = asyncio.Event()
        self._rpc: Any = None

    async def start(self) -> None:
        """Send the request, once. Raises what is wrong with it; the answer comes from `read`."""
        if self._rpc is None:
            model = await self._connection.model(self.exchange)
            self._inputs = self._build(model)
            self._metadata = stream_metadata(self._connection.settings, model)
            self._send()

    async def read(self) -> Response | None:
        """The next response; None after the last one."""
        if self.exchange.final:
            await self._drain()
            return None
        self.exchange.check_alive()
        await self.start()
        while True:
            try:
                return await self._read_once()
            except TridentError as error:
                await self._end_rpc()
                delay = self.exchange.retry_delay(error)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._woken.wait(), delay)
            self._send()

    def cancel(self) -> None:
        """Cancel on the server, now; harmless after the end."""
        self.exchange.cancel()
        self._woken.set()
        if self._rpc is not None:
            self._rpc.cancel()

    def _send(self) -> None:
        self.exchange.check_alive()
        message = self.exchange.message(self._inputs)
        self._rpc = self._connection.open_rpc(
            self, message, self.exchange.remaining(), self._metadata
        )

    async def _read_once(self) -> Response | None:
        try:
            message = await self._rpc.read()
        except asyncio.CancelledError:
            # gRPC raises it for an RPC that we or the server cancelled, too; then it is not this task's.
            if self._rpc.cancelled():
                if self.exchange.cancelled:
                    self.exchange.check_alive()
                details = await self._rpc.details()
                if details != _CANCELLED_HERE:
                    raise self.exchange.failed(grpc.StatusCode.CANCELLED, details) from None
            raise
        except grpc.RpcError as error:
            raise self.exchange.failed(error.code(), error.details()) from None
        if message is not grpc.aio.EOF:
            return self.exchange.feed(message)
        status = await self._rpc.code()
        if status is not grpc.StatusCode.OK:
            raise self.exchange.failed(status, await self._rpc.details())
        self.exchange.ended()
        return None

    async def _end_rpc(self) -> None:
        """After an error: the RPC ends by itself if the error was its last message."""
        if self.exchange.ending:
            await self._drain()
        else:
            self._rpc.cancel()

    async def _drain(self) -> None:
        """Let the RPC end by itself: a cancel now would count as one on the server."""
        with suppress(grpc.RpcError):  # what it was to bring is here already
            while await self._rpc.read() is not grpc.aio.EOF:
                pass


class AsyncConnection:
    """A channel to one model of a server."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._closed = False
        self._live: weakref.WeakSet[AsyncCall] = weakref.WeakSet()
        self._info: ModelInfo | None = None
        self._info_lock = asyncio.Lock()  # held while the model's metadata is fetched

    async def close(self) -> None:
        """Cancel what is under way; any later call raises RuntimeError."""
        self._closed = True
        for call in list(self._live):
            call.cancel()
        if self._channel is not None:
            await self._channel.close()

    async def run_all(
        self, calls: Sequence[AsyncCall], collect: Callable[[AsyncCall], Awaitable[_T]]
    ) -> list[_T]:
        """What `collect` makes of each call, several at a time."""
        places = asyncio.Semaphore(self.settings.concurrency)

        async def run(call: AsyncCall) -> _T:
            async with places:
                try:
                    return await collect(call)
                finally:
                    call.cancel()

        tasks = [asyncio.ensure_future(run(call)) for call in calls]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def open_rpc(
        self,
        call: AsyncCall,
        message: Any,
        timeout: float | None,
        metadata: tuple[tuple[str, str], ...],
    ) -> Any:
        """A running RPC for `call`."""
        stub = self._connected()
        self._live.add(call)
        return stub.ModelStreamInfer(iter((message,)), timeout=timeout, metadata=metadata)

    def _connected(self) -> Any:
        """The stub. The channel is made here, since it belongs to the loop that runs now."""
        if self._closed:
            raise RuntimeError("this client is closed: make a new one")
        if self._channel is None:
            url, options = self.settings.url, self.settings.options()
            credentials = self.settings.credentials()
            self._channel = (
                grpc.aio.insecure_channel(url, options)
                if credentials is None
                else grpc.aio.secure_channel(url, credentials, options)
            )
            self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        return self._stub

    async def _unary(self, name: str, request: Any, exchange: Exchange) -> Any:
        while True:
            try:
                return await getattr(self._connected(), name)(
                    request, timeout=exchange.remaining(), metadata=self.settings.metadata
                )
            except grpc.aio.AioRpcError as error:
                failure = exchange.failed(error.code(), error.details())
            await asyncio.sleep(exchange.retry_delay(failure))
            exchange.check_alive()

    async def live(self, timeout: float | None) -> bool:
        """Whether the server answers."""
        return await self._healthy("ServerLive", service_pb2.ServerLiveRequest(), "live", timeout)

    async def ready(self, timeout: float | None) -> bool:
        """Whether the server and the model take requests."""
        server = service_pb2.ServerReadyRequest()
        model = service_pb2.ModelReadyRequest(
            name=self.settings.model, version=self.settings.model_version
        )
        return await self._healthy("ServerReady", server, "ready", timeout) and (
            await self._healthy("ModelReady", model, "ready", timeout)
        )

    async def _healthy(self, name: str, request: Any, field: str, timeout: float | None) -> bool:
        exchange = Exchange(dataclasses.replace(self.settings, retries=0), timeout)
        try:
            return bool(getattr(await self._unary(name, request, exchange), field))
        except (Unavailable, DeadlineExceeded, NotFound):
            return False

    async def model(self, exchange: Exchange) -> ModelInfo:
        """What the model offers, asked for once."""
        if self._info is not None:
            return self._info
        try:
            return await asyncio.wait_for(self._fetch_model_once(exchange), exchange.remaining())
        except asyncio.TimeoutError:
            raise exchange.timed_out() from None

    async def _fetch_model_once(self, exchange: Exchange) -> ModelInfo:
        async with self._info_lock:
            if self._info is None:
                self._info = await self._fetch_model(exchange)
            return self._info

    async def refresh_model(self, timeout: float | None) -> ModelInfo:
        """What the model offers, asked for again."""
        self._info = await self._fetch_model(Exchange(self.settings, timeout))
        return self._info

    async def _fetch_model(self, exchange: Exchange) -> ModelInfo:
        request = service_pb2.ModelMetadataRequest(
            name=self.settings.model, version=self.settings.model_version
        )
        return model_info(await self._unary("ModelMetadata", request, exchange))


async def last_response(call: AsyncCall) -> Response:
    """The outputs of a call that answers at once, flags-only final mark aside."""
    last = Response({}, False)
    while (response := await call.read()) is not None:
        last = response if response.outputs else last
    return last
