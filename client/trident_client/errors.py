"""The errors a call can end with, and how they are read from what the server sent.

Owns the mapping from an error text and a gRPC status to an exception; knows nothing about requests
or channels. Invariant: whatever goes wrong with a call surfaces as a `TridentError`.

    TridentError
    +-- InvalidArgument         the request is wrong; `field` names what to change
    |   +-- UnsupportedFeature  the served model lacks an input that the call needs
    +-- NotFound                the server does not have that model
    +-- AccessDenied            the server or a proxy wants other credentials
    +-- Unavailable             overloaded, shutting down or unhealthy; trying again may help
    |   +-- ConnectionFailed    the server cannot be reached, or went away before the first token
    +-- Cancelled               the request was cancelled, by this client or by the server
    +-- DeadlineExceeded        the call's `timeout` ran out
    +-- StreamInterrupted       the output was cut: it ended without the server's final mark
    +-- ServerError             a fault in the server
"""

from __future__ import annotations

import re

import grpc

__all__ = [
    "AccessDenied",
    "Cancelled",
    "ConnectionFailed",
    "DeadlineExceeded",
    "InvalidArgument",
    "NotFound",
    "ServerError",
    "StreamInterrupted",
    "TridentError",
    "Unavailable",
    "UnsupportedFeature",
    "from_status",
    "from_text",
    "invalid",
]


class TridentError(Exception):
    """Any failure of a call.

    `code` is the server's code (``INVALID_ARG``, ``UNAVAILABLE``, ...) or the gRPC status' name where
    the server gave none; `field` the input at fault, where one is known; `request_id` the request's
    id as the server's log shows it, where a request was made.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        field: str | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.field = field
        self.request_id = request_id


class InvalidArgument(TridentError):
    """The request is wrong; `field` names what to change."""


def invalid(field: str, reason: str) -> InvalidArgument:
    """The caller's mistake in `field`, found before anything was sent; worded as the server would."""
    return InvalidArgument(f"INVALID_ARG {field}: {reason}", code="INVALID_ARG", field=field)


class UnsupportedFeature(InvalidArgument):
    """The served model lacks the input that a call needs; `field` names that input."""


class NotFound(TridentError):
    """The server does not have the model."""


class AccessDenied(TridentError):
    """The server, or a proxy in front of it, wants other credentials."""


class Unavailable(TridentError):
    """The server is overloaded, shutting down or unhealthy; trying again later may help."""


class ConnectionFailed(Unavailable):
    """The server cannot be reached, or the connection went away before the first token."""


class Cancelled(TridentError):
    """The request was cancelled, by this client or by the server."""


class DeadlineExceeded(TridentError):
    """The call's `timeout` ran out."""


class StreamInterrupted(TridentError):
    """The output was cut: it ended without the server's final mark."""


class ServerError(TridentError):
    """A fault in the server."""


# Triton server puts the request's id before some of its own texts.
_CODED = re.compile(
    r"^(?:\[request id: [^\]]*\] )?"
    r"(?P<code>INVALID_ARG|UNAVAILABLE|CANCELLED|INTERNAL)\b:? *(?:(?P<field>[^\s:]+): )?",
)

_BY_CODE: dict[str, type[TridentError]] = {
    "INVALID_ARG": InvalidArgument,
    "UNAVAILABLE": Unavailable,
    "CANCELLED": Cancelled,
    "INTERNAL": ServerError,
}

_BY_STATUS: dict[grpc.StatusCode, type[TridentError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgument,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedFeature,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.UNAUTHENTICATED: AccessDenied,
    grpc.StatusCode.PERMISSION_DENIED: AccessDenied,
    grpc.StatusCode.UNAVAILABLE: ConnectionFailed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Unavailable,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}

# Triton server's own texts, which carry no code, by what they mean.
_SERVER_TEXTS: tuple[tuple[re.Pattern[str], type[TridentError]], ...] = (
    (re.compile(r"^(\[request id: [^\]]*\] )?(expected \d+ inputs|unexpected )"), InvalidArgument),
    (re.compile(r"Request for unknown model"), NotFound),
    (
        re.compile(
            r"Exceeds maximum queue size|Request timeout expired|is shutting down|is not ready|"
            r"Model is unavailable|protocol is restricted"
        ),
        Unavailable,
    ),
)


def _server_kind(text: str) -> type[TridentError] | None:
    return next((kind for pattern, kind in _SERVER_TEXTS if pattern.search(text)), None)


def from_text(text: str, *, request_id: str | None = None) -> TridentError:
    """The error that an in-band text tells of.

    Errors inside a stream carry no status, so a Trident text begins with the code and the field:

    >>> error = from_text("INVALID_ARG sampling_parameters.top_p: must be in (0, 1]")
    >>> type(error).__name__, error.field
    ('InvalidArgument', 'sampling_parameters.top_p')

    A text without a code is the server's fault as far as one can tell:

    >>> type(from_text("Error generating stream: out of memory")).__name__
    'ServerError'
    """
    coded = _CODED.match(text)
    if coded is None:
        return (_server_kind(text) or ServerError)(text, request_id=request_id)
    code = coded["code"]
    return _BY_CODE[code](text, code=code, field=coded["field"], request_id=request_id)


def from_status(
    status: grpc.StatusCode, details: str | None, *, request_id: str | None = None
) -> TridentError:
    """The error that a gRPC status and its text tell of; a code in the text goes before the status.

    >>> error = from_status(grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE queue: 64 requests wait")
    >>> type(error).__name__, error.code, error.field
    ('Unavailable', 'UNAVAILABLE', 'queue')
    >>> type(from_status(grpc.StatusCode.UNAVAILABLE, "failed to connect")).__name__
    'ConnectionFailed'
    """
    text = details or f"the server answered {status.name} without a text"
    if _CODED.match(text):
        return from_text(text, request_id=request_id)
    kind = _BY_STATUS.get(status, ServerError)
    if kind is ConnectionFailed:  # the network's status, but the server's as well
        kind = _server_kind(text) or kind
    return kind(text, code=status.name, request_id=request_id)
