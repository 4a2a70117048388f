"""Errors as OpenAI's clients expect them, made of the model server's.

Owns statuses, types, codes and the names of parameters in them. Invariant: no text of a fault that
the model did not word itself reaches a caller, and none repeats what the caller sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trident_client import (
    AccessDenied,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    TridentError,
    Unavailable,
)

__all__ = ["ApiError", "bad_request", "from_trident", "unknown_model"]

RETRY_AFTER = {"Retry-After": "1"}

_NAMES = {
    "text_input": "prompt",
    "input_ids": "prompt",
    "control.text": "prompt",
    "control.token_ids": "tokens",
    "chat": "messages",
}
_PREFIX = re.compile(
    r"^(?:\[request id: [^\]]*\] )?[A-Z_]+ (?P<field>[^\s:]+): (?P<reason>.*)$", re.S
)
_PLACE = re.compile(r"^(?:messages|tools|chat_template_kwargs|continue_final_message)[\w.\[\]]*")
_TOO_LONG = re.compile(r"\bmax_model_len\b|^is too long\b")


class ApiError(Exception):
    """An error with everything its HTTP response needs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON of the response, or of an event in a stream."""
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


def bad_request(param: str | None, reason: str, code: str | None = None) -> ApiError:
    """The caller's mistake in `param`; `reason` says what to change."""
    return ApiError(400, f"{param}: {reason}" if param else reason, param=param, code=code)


def unknown_model(name: str) -> ApiError:
    """The model is not served here."""
    shown = name if re.fullmatch(r"[\w./:@-]{1,128}", name) else "of that name"
    return ApiError(404, f"The model {shown} does not exist", param="model", code="model_not_found")


def from_trident(error: TridentError, renames: Mapping[str, str] | None = None) -> ApiError:
    """What a call failed with; `renames` tells under which names this endpoint has parameters."""
    worded = _PREFIX.match(str(error)) if error.code else None
    if isinstance(error, InvalidArgument):
        return _invalid(error, worded, renames or {})
    if isinstance(error, NotFound):
        return ApiError(
            404, "The model server does not have the model", param="model", code="model_not_found"
        )
    if isinstance(error, DeadlineExceeded) or error.field == "timeout":
        return ApiError(
            504, "The request was not done in time", type="timeout_error", code="timeout"
        )
    if isinstance(error, Unavailable):
        return _unavailable(error, worded)
    if isinstance(error, Cancelled):
        return ApiError(499, "The request was cancelled", type="cancelled", code="cancelled")
    if isinstance(error, AccessDenied):
        return ApiError(502, "The model server refused this gateway", type="server_error")
    reason = f"{worded['field']} {worded['reason']}" if worded else "The model server failed"
    suffix = f" (request {error.request_id})" if error.request_id else ""
    return ApiError(500, reason + suffix, type="server_error", code="server_error")


def _invalid(
    error: InvalidArgument, worded: re.Match[str] | None, renames: Mapping[str, str]
) -> ApiError:
    field = error.field
    reason = worded["reason"] if worded else "The request is not valid for this model"
    if field is None:
        return bad_request(None, reason)
    param = field.removeprefix("sampling_parameters.").removeprefix("chat.")
    if field == "chat" and (place := _PLACE.match(reason)):
        return ApiError(400, reason, param=place[0].rstrip("."))
    param = _NAMES.get(param, param)
    first, dot, rest = param.partition(".")
    param = renames.get(param, renames.get(first, first) + dot + rest)
    return bad_request(
        param, reason, "context_length_exceeded" if _TOO_LONG.search(reason) else None
    )


def _unavailable(error: Unavailable, worded: re.Match[str] | None) -> ApiError:
    if error.field == "queue" or "maximum queue size" in str(error):
        return ApiError(
            429,
            "Too many requests wait already; try again later",
            type="rate_limit_error",
            code="overloaded",
            headers=RETRY_AFTER,
        )
    reason = f"The {worded['field']} {worded['reason']}" if worded else "The model is not available"
    return ApiError(
        503, reason, type="service_unavailable", code="unavailable", headers=RETRY_AFTER
    )
