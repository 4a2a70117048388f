"""Outputs of requests as the engine makes them."""

from __future__ import annotations

import time

from trident_llm.core.errors import RequestError
from trident_llm.core.request import FinishReason
from trident_llm.engine.output import RequestOutput, RequestTimes, SequenceDelta


def make_output(
    request_id: str,
    *deltas: SequenceDelta,
    finished: bool = False,
    error: RequestError | None = None,
    times: RequestTimes | None = None,
) -> RequestOutput:
    now = time.monotonic()
    return RequestOutput(
        request_id=request_id,
        deltas={delta.index: delta for delta in deltas},
        num_prompt_tokens=5,
        num_cached_tokens=0,
        finished=finished or error is not None,
        error=error,
        times=times or RequestTimes(now - 3, now - 2, now - 1, now, now if finished else 0.0),
    )


def token(text: str, index: int = 0, end: FinishReason | None = None) -> SequenceDelta:
    return SequenceDelta(index, text, [len(text)], finish_reason=end)
