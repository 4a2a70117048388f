"""The blocking client's connection: a channel, the calls on it, and what the model is.

Owns all blocking I/O: it knows when to wait and when to cancel. What goes into a request and what
an answer means is decided elsewhere. Invariants: one RPC per request, so that cancelling one never
touches another; a `Connection` may be used from any number of threads.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from trident_client._channel import Settings
from trident_client._request import BuildInputs
from trident_client._stream import Exchange, model_info, stream_metadata
from trident_client.errors import DeadlineExceeded, NotFound, TridentError, Unavailable
from trident_client.results import ModelInfo
from trident_client.wire import Response, Value

__all__ = ["Call", "Connection", "last_response"]

_T = TypeVar("_T")


class Call:
    """One request's RPC, repeated where that is allowed. Nothing is sent before `start`."""

    def __init__(self, connection: Connection, build: BuildInputs, timeout: float | None) -> None:
        self.exchange = Exchange(connection.settings, timeout)
        self._connection = connection
        self._build = build
        self._inputs: Mapping[str, Value] = {}
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._woken = threading.Event()
        self._rpc: Any = None

    def start(self) -> None:
        """Send the request, once. Raises what is wrong with it; the answer comes from `read`."""
        if self._rpc is not None:
            return
        model = self._connection.model(self.exchange, self._woken)
        self._inputs = self._build(model)
        self._metadata = stream_metadata(self._connection.settings, model)
        self._send()

    def read(self) -> Response | None:
        """The next response; None after the last one."""
        if self.exchange.final:
            self._drain()
            return None
        self.exchange.check_alive()
        self.start()
        while True:
            try:
                return self._read_once()
            except TridentError as error:
                self._end_rpc()
                delay = self.exchange.retry_delay(error)
            self._woken.wait(delay)
            self._send()

    def cancel(self) -> None:
        """Cancel on the server, now; from any thread, harmless after the end."""
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
        if self.exchange.cancelled:  # by another thread, which still saw the RPC before this one
            self._rpc.cancel()

    def _read_once(self) -> Response | None:
        try:
            message = next(self._rpc)
        except StopIteration:
            self.exchange.ended()
            return None
        except grpc.RpcError as error:
            raise self.exchange.failed(error.code(), error.details()) from None
        return self.exchange.feed(message)

    def _end_rpc(self) -> None:
        """After an error: the RPC ends by itself if the error was its last message."""
        if self.exchange.ending:
            self._drain()
        else:
            self._rpc.cancel()

    def _drain(self) -> None:
        """Let the RPC end by itself: a cancel now would count as one on the server."""
        with suppress(grpc.RpcError):  # what it was to bring is here already
            for _ in self._rpc:
                pass


class Connection:
    """A channel to one model of a server."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        credentials = settings.credentials()
        options = settings.options()
        self._channel = (
            grpc.insecure_channel(settings.url, options)
            if credentials is None
            else grpc.secure_channel(settings.url, credentials, options)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._lock = threading.Lock()  # guards the next two
        self._closed = False
        self._live: weakref.WeakSet[Call] = weakref.WeakSet()
        self._info: ModelInfo | None = None
        self._info_lock = threading.Lock()  # held while the model's metadata is fetched

    def close(self) -> None:
        """Cancel what is under way; any later call raises RuntimeError."""
        with self._lock:
            self._closed = True
            live = list(self._live)
        for call in live:
            call.cancel()
        self._channel.close()

    def run_all(self, calls: Sequence[Call], collect: Callable[[Call], _T]) -> list[_T]:
        """What `collect` makes of each call, several at a time."""

        def run(call: Call) -> _T:
            try:
                return collect(call)
            finally:
                call.cancel()

        if len(calls) == 1:
            return [run(calls[0])]
        with ExitStack() as cleanup:
            pool = ThreadPoolExecutor(min(len(calls), self.settings.concurrency))
            cleanup.enter_context(pool)
            for call in calls:
                cleanup.callback(call.cancel)  # before the pool waits for its threads
            futures = [pool.submit(run, call) for call in calls]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failures = [error for future in done if (error := future.exception()) is not None]
            if failures:
                raise failures[0]
            return [future.result() for future in futures]

    def open_rpc(
        self,
        call: Call,
        message: Any,
        timeout: float | None,
        metadata: tuple[tuple[str, str], ...],
    ) -> Any:
        """A running RPC for `call`."""
        with self._lock:
            self._check_open()
            self._live.add(call)
            return self._stub.ModelStreamInfer(iter((message,)), timeout=timeout, metadata=metadata)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this client is closed: make a new one")

    def _unary(self, name: str, request: Any, exchange: Exchange, woken: threading.Event) -> Any:
        while True:
            self._check_open()
            try:
                return getattr(self._stub, name)(
                    request, timeout=exchange.remaining(), metadata=self.settings.metadata
                )
            except grpc.RpcError as error:
                failure = exchange.failed(error.code(), error.details())
            except ValueError:  # gRPC's own for a channel that another thread just closed
                self._check_open()
                raise
            woken.wait(exchange.retry_delay(failure))
            exchange.check_alive()

    def live(self, timeout: float | None) -> bool:
        """Whether the server answers."""
        return self._healthy("ServerLive", service_pb2.ServerLiveRequest(), "live", timeout)

    def ready(self, timeout: float | None) -> bool:
        """Whether the server and the model take requests."""
        server = service_pb2.ServerReadyRequest()
        model = service_pb2.ModelReadyRequest(
            name=self.settings.model, version=self.settings.model_version
        )
        return self._healthy("ServerReady", server, "ready", timeout) and self._healthy(
            "ModelReady", model, "ready", timeout
        )

    def _healthy(self, name: str, request: Any, field: str, timeout: float | None) -> bool:
        exchange = Exchange(dataclasses.replace(self.settings, retries=0), timeout)
        try:
            return bool(getattr(self._unary(name, request, exchange, threading.Event()), field))
        except (Unavailable, DeadlineExceeded, NotFound):
            return False

    def model(self, exchange: Exchange, woken: threading.Event) -> ModelInfo:
        """What the model offers, asked for once."""
        if self._info is not None:
            return self._info
        left = exchange.remaining()
        if not self._info_lock.acquire(timeout=-1 if left is None else left):
            raise exchange.timed_out()
        try:
            if self._info is None:
                self._info = self._fetch_model(exchange, woken)
            return self._info
        finally:
            self._info_lock.release()

    def refresh_model(self, timeout: float | None) -> ModelInfo:
        """What the model offers, asked for again."""
        self._info = self._fetch_model(Exchange(self.settings, timeout), threading.Event())
        return self._info

    def _fetch_model(self, exchange: Exchange, woken: threading.Event) -> ModelInfo:
        request = service_pb2.ModelMetadataRequest(
            name=self.settings.model, version=self.settings.model_version
        )
        return model_info(self._unary("ModelMetadata", request, exchange, woken))


def last_response(call: Call) -> Response:
    """The outputs of a call that answers at once, flags-only final mark aside."""
    last = Response({}, False)
    while (response := call.read()) is not None:
        last = response if response.outputs else last
    return last
