"""Errors that reach a user, each with the code it travels under.

The text of a :class:`RequestError` begins with its code and the field at fault, since errors inside
a stream carry no code of their own; it says what to change and never echoes the request's content.
"""

from __future__ import annotations

from enum import Enum


class ErrorCode(Enum):
    """Why a request ended without a result; the names are Triton server's error codes."""

    INVALID_ARG = "INVALID_ARG"  # the caller's mistake
    UNAVAILABLE = "UNAVAILABLE"  # overload, shutting down, unhealthy
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"  # ours


class ConfigError(ValueError):
    """A setting that the engine cannot work with; raised only while loading."""


class RequestError(Exception):
    """A request that is answered with an error.

    ``field`` names the input at fault (``sampling_parameters.temperature``, ``text_input``, ``queue``).
    """

    def __init__(self, code: ErrorCode, field: str, reason: str) -> None:
        super().__init__(f"{code.value} {field}: {reason}")
        self.code = code
        self.field = field
        self.reason = reason


def invalid(field: str, reason: str) -> RequestError:
    """The caller's mistake in ``field``; ``reason`` says what the value must be."""
    return RequestError(ErrorCode.INVALID_ARG, field, reason)
