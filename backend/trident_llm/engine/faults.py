"""How requests and engines of every kind fail."""

from __future__ import annotations

from trident_llm.core.errors import ErrorCode, RequestError

# Steps that may fail in a row before the engine gives up: one bad step can be a bad input of its own,
# several mean that the device or the model is broken.
MAX_FAILED_STEPS = 3

INTERNAL_STEP = RequestError(
    ErrorCode.INTERNAL, "engine", "a step failed while computing this request; send it again"
)
NOT_FINITE = RequestError(
    ErrorCode.INTERNAL, "engine", "the model's output for this request was not finite"
)
CANCELLED = RequestError(ErrorCode.CANCELLED, "request", "cancelled by the client")


class EngineDeadError(RuntimeError):
    """Too many steps failed in a row: the engine computes nothing any more."""
