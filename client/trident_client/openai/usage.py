"""Counts, log-probabilities and reasons in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from trident_client import Logprob, Result
from trident_client.openai.errors import ApiError

__all__ = ["chat_logprobs", "completion_logprobs", "finish_reason", "finite", "usage"]

_FLOOR = -9999.0
Logprobs = Sequence[Sequence[Logprob]]


def usage(results: Iterable[Result], reasoning: int | None = None) -> dict[str, Any]:
    """The tokens of a request's prompts and outputs; `reasoning` tells how many of these were that."""
    counts = [result.usage for result in results]
    prompt = sum(count.prompt_tokens or 0 for count in counts)
    completion = sum(count.completion_tokens or 0 for count in counts)
    cached = sum(count.cached_tokens or 0 for count in counts)
    counted: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if reasoning is not None:
        counted["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return counted


def finish_reason(reason: str | None) -> str:
    """How a choice ended. Raises `ApiError` unless it ended well: cut output never passes for whole."""
    if reason == "repetition":  # asked for with `repetition_detection`, which OpenAI does not have
        return "stop"
    if reason in ("stop", "length"):
        return reason
    raise ApiError(500, "The output was cut short", type="server_error", code="server_error")


def chat_logprobs(logprobs: Logprobs, num_top: int) -> dict[str, Any]:
    """Of some tokens; the first candidate of each is the one that was chosen."""
    content = [
        {
            **_candidate(token[0]),
            "top_logprobs": [_candidate(each) for each in _top(token, num_top)],
        }
        for token in logprobs
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(logprobs: Logprobs, num_top: int, offset: int) -> dict[str, Any]:
    """Of some tokens, the first of which stands at `offset` in the returned text."""
    tokens = [token[0].decoded_token or "" for token in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [finite(token[0].logprob) for token in logprobs],
        "top_logprobs": [
            {each.decoded_token or "": finite(each.logprob) for each in token} for token in logprobs
        ]
        if num_top
        else None,
        "text_offset": offsets,
    }


def _top(token: Sequence[Logprob], num_top: int) -> list[Logprob]:
    """The most likely candidates. The chosen token is among them only if it is one of these."""
    ranked = sorted(token, key=lambda each: (-each.logprob, each.rank or 0))
    return ranked[:num_top]


def _candidate(candidate: Logprob) -> dict[str, Any]:
    text, data = candidate.decoded_token or "", candidate.token_bytes
    # A token that is part of a character has no text of its own; not every server sends its bytes.
    if data is None and "\N{REPLACEMENT CHARACTER}" not in text:
        data = text.encode()
    return {
        "token": text,
        "logprob": finite(candidate.logprob),
        "bytes": None if data is None else list(data),
    }


def finite(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, _FLOOR)
