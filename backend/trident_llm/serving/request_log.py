"""One line of the log at the end of each request: JSON, and nothing of what its user wrote.

Written by the output thread, like all that is told once a request is accepted. A caller's own words are
kept only where they can do no harm: an id made of a few plain characters, and the id of a trace.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Any, NamedTuple

from trident_llm.engine.output import RequestOutput

logger = logging.getLogger("trident")

_PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
# https://www.w3.org/TR/trace-context: version, trace id, parent id, flags.
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class Caller(NamedTuple):
    """By which names whoever sent a request knows it; empty where they are not given."""

    request_id: str = ""
    trace_id: str = ""

    @classmethod
    def of(cls, request: Any) -> Caller:
        """Reads them from Triton's request.

        The trace is the server's own, where it traces by OpenTelemetry, else the one of a
        ``traceparent`` among the request parameters, which is where headers arrive that Triton forwards.
        """
        own = request.request_id()
        return cls(own if _PLAIN_ID.fullmatch(own) else "", _trace_id(request))


def _trace_id(request: Any) -> str:
    contexts = [request.parameters()]
    if hasattr(request, "trace"):  # older servers have none
        contexts.insert(0, request.trace().get_context())
    for context in contexts:
        if context and "traceparent" in context:
            try:
                found = _TRACEPARENT.fullmatch(json.loads(context)["traceparent"])
            except (ValueError, KeyError, TypeError):
                continue
            if found is not None:
                return found[1]
    return ""


def log_end(
    caller: Caller, number: str, arrival: float, outcome: str, now: float,
    *, num_tokens: int = 0, output: RequestOutput | None = None,
) -> None:  # fmt: skip
    """Logs that a request has ended.

    Args:
        number: our own number of the request, which stands in for an id that its caller did not give.
        arrival: when it came, ``time.monotonic()`` seconds, as ``now`` is.
        outcome: "stop", "length", "control", or the code of the error that ended it.
        num_tokens: generated and sent.
        output: the engine's last word of it, if it came so far.
    """
    entry: dict[str, Any] = {"id": caller.request_id or number, "outcome": outcome}
    if caller.trace_id:
        entry["trace_id"] = caller.trace_id
    if output is not None:
        entry["prompt_tokens"] = output.num_prompt_tokens
        entry["cached_tokens"] = output.num_cached_tokens
        entry["output_tokens"] = num_tokens
        times = output.times
        moments = [times.first_scheduled, times.first_token, times.finished or now]
        began = arrival
        for name, moment in zip(("queue_s", "prefill_s", "decode_s"), moments):
            ended = moment or now  # a phase that it had not left
            entry[name] = round(max(0.0, ended - began), 4)
            if not moment:
                break
            began = ended
    entry["total_s"] = round(now - arrival, 4)
    logger.info("request %s", json.dumps(entry))
