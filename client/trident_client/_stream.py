"""The life of one request on its own RPC: first token, final mark, cut, cancel, retry, deadline.

Owns what each event of an RPC means; does no I/O and never waits, so that the blocking and the
asyncio client share it. Invariant: a request is tried again only while none of its output has been
seen, and its output counts as whole only once the server's final mark was read.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from trident_client._channel import Settings
from trident_client._request_ids import request_id as current_request_id
from trident_client.errors import (
    Cancelled,
    ConnectionFailed,
    DeadlineExceeded,
    StreamInterrupted,
    TridentError,
    Unavailable,
    from_status,
    from_text,
)
from trident_client.results import ModelInfo
from trident_client.wire import Response, Value, build_request, parse_response

__all__ = ["Exchange", "model_info", "stream_metadata"]

_EARLY_SECONDS = 0.005  # gRPC's timers may be that early


def stream_metadata(settings: Settings, model: ModelInfo) -> tuple[tuple[str, str], ...]:
    """Headers of a request's RPC.

    The texts of other backends carry no code, so of them we ask that an error ends the stream with a
    real status. Trident's texts do, and servers log a fault of their own for each such status.
    """
    if "control" in model.inputs:
        return settings.metadata
    return (*settings.metadata, ("triton_grpc_error", "true"))


def model_info(message: Any) -> ModelInfo:
    """Read a ``ModelMetadataResponse``."""
    return ModelInfo(
        name=message.name,
        versions=tuple(message.versions),
        platform=message.platform,
        inputs={tensor.name: tensor.datatype for tensor in message.inputs},
        outputs={tensor.name: tensor.datatype for tensor in message.outputs},
    )


class Exchange:
    """State of one call. The caller reports what its RPC did and is told what that means."""

    def __init__(
        self,
        settings: Settings,
        timeout: float | None,
        *,
        request_id: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._timeout = settings.deadline(timeout)
        self._deadline = None if self._timeout is None else clock() + self._timeout
        self._attempts = 0
        self.request_id = request_id or current_request_id.get() or uuid.uuid4().hex
        self.started = False
        self.final = False
        self.cancelled = False
        self.ending = False  # the last message was the RPC's last, output or error
        self._failure: TridentError | None = None

    def remaining(self) -> float | None:
        """Seconds left, None without a deadline. Raises `DeadlineExceeded` when none are."""
        if self._deadline is None:
            return None
        left = self._deadline - self._clock()
        if left <= 0:
            raise self.timed_out()
        return left

    def timed_out(self) -> DeadlineExceeded:
        """The error that says that the call's time is over."""
        return DeadlineExceeded(
            f"not done within the timeout of {self._timeout:g} s",
            code="DEADLINE_EXCEEDED",
            request_id=self.request_id,
        )

    def message(self, inputs: Mapping[str, Value]) -> Any:
        """The request to send in this attempt; its own timeout is what is left of the call's."""
        return build_request(
            self._settings.model,
            inputs,
            version=self._settings.model_version,
            request_id=self.request_id,
            timeout=self.remaining(),
        )

    def cancel(self) -> bool:
        """Mark the request cancelled by us; False if it had ended, or been cancelled, already."""
        if self.final or self.cancelled:
            return False
        self.cancelled = True
        return True

    def check_alive(self) -> None:
        """Raise what the request failed with, or `Cancelled` if this client cancelled it."""
        if self._failure is not None:
            raise self._failure
        if self.cancelled:
            raise self._cancelled()

    def feed(self, message: Any) -> Response:
        """A message arrived. Raises the error it tells of."""
        self.check_alive()
        response = parse_response(message)
        self.ending = response.final
        if response.error:
            raise from_text(response.error, request_id=self.request_id)
        self.started = True
        self.final = self.final or response.final
        return response

    def ended(self) -> None:
        """The RPC ended well. Raises `StreamInterrupted` if it did so before the final mark."""
        self.check_alive()
        if not self.final:
            raise self._interrupted("the server ended the stream without its final mark")

    def failed(self, status: grpc.StatusCode, details: str | None) -> TridentError:
        """The error that the RPC's failure means."""
        error = from_status(status, details, request_id=self.request_id)
        if self.cancelled:
            return self._cancelled()
        if self._timeout is not None and self._is_timeout(status):
            return self.timed_out()
        # A cancel that nobody here asked for and that has no text of the model: the endpoint closed.
        closed = isinstance(error, Cancelled) and error.field is None and error.code == status.name
        closed = closed and not (details or "").startswith(("CANCELLED", "Request was cancelled"))
        if self.started and (closed or isinstance(error, ConnectionFailed)):
            return self._interrupted(f"the connection was lost: {details}")
        if closed or type(error) is ConnectionFailed:
            return ConnectionFailed(
                f"no connection to {self._settings.url}: {details}",
                code=error.code,
                request_id=self.request_id,
            )
        return error

    def _is_timeout(self, status: grpc.StatusCode) -> bool:
        """Whether the RPC failed since its time was over, for which gRPC has more than one word.

        What the deadline cuts short while gRPC begins it is "Internal error from Core", and a server
        that sees the deadline first may call it a cancel.
        """
        if status is grpc.StatusCode.DEADLINE_EXCEEDED:
            return True
        other = status in (grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)
        assert self._deadline is not None
        return other and self._clock() >= self._deadline - _EARLY_SECONDS

    def retry_delay(self, error: TridentError) -> float:
        """Seconds to wait before trying again after `error`, which is raised if we must not."""
        retry = self._settings.retry
        delay = retry.delay(self._attempts)
        again = isinstance(error, Unavailable) and not self.started and not self.cancelled
        again = again and self._attempts < retry.limit
        if self._deadline is not None and self._clock() + delay >= self._deadline:
            again = False
        if not again:
            self._failure = error
            raise error
        self._attempts += 1
        return delay

    def _cancelled(self) -> Cancelled:
        return Cancelled(
            "the request was cancelled by this client",
            code="CANCELLED",
            request_id=self.request_id,
        )

    def _interrupted(self, reason: str) -> StreamInterrupted:
        return StreamInterrupted(
            f"the output is cut: {reason}", code="UNAVAILABLE", request_id=self.request_id
        )
