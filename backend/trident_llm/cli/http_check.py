"""Asks the server over HTTP, as a user would: is the model ready, and does it answer."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_READY_TIMEOUT_SECONDS = 1.0
_ANSWER_TIMEOUT_SECONDS = 120.0
_PREFIX = b"data: "


class AnswerError(Exception):
    """The model did not answer; the text says what came instead."""


@dataclass(frozen=True)
class Answer:
    """Times of one streamed answer, in seconds from the request."""

    first_token_seconds: float
    total_seconds: float
    num_responses: int


def model_is_ready(port: int, model_name: str) -> bool:
    """Whether the server on ``port`` takes requests for the model."""
    return _is_ok(port, f"/v2/models/{model_name}/ready")


def gateway_is_up(port: int) -> bool:
    """Whether the OpenAI-compatible gateway on ``port`` answers."""
    return _is_ok(port, "/health")


def _is_ok(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_READY_TIMEOUT_SECONDS)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def stream_answer(
    port: int, model_name: str, question: str, max_tokens: int, on_text: Callable[[str], None]
) -> Answer:
    """Asks ``question`` and passes the text on as it is made; greedy.

    A model without a chat template refuses ``chat``; then the question is its plain prompt.
    Raises :class:`AnswerError`.
    """
    chat = json.dumps({"messages": [{"role": "user", "content": question}]})
    try:
        return _stream(port, model_name, {"chat": chat}, max_tokens, on_text)
    except AnswerError as error:
        if not str(error).startswith("INVALID_ARG"):
            raise
    return _stream(port, model_name, {"text_input": question}, max_tokens, on_text)


def _stream(
    port: int,
    model_name: str,
    prompt: dict[str, Any],
    max_tokens: int,
    on_text: Callable[[str], None],
) -> Answer:
    sampling = json.dumps({"max_tokens": max_tokens, "temperature": 0})
    body = json.dumps({**prompt, "stream": True, "sampling_parameters": sampling})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_TIMEOUT_SECONDS)
    began = time.monotonic()
    first = 0.0
    count = 0
    try:
        connection.request("POST", f"/v2/models/{model_name}/generate_stream", body)
        for event in connection.getresponse():
            # An error that comes before any response is plain JSON.
            text = _text(event.removeprefix(_PREFIX))
            if text is None:
                continue
            first = first or time.monotonic() - began
            count += 1
            on_text(text)
    except TimeoutError:
        raise AnswerError(f"nothing came for {_ANSWER_TIMEOUT_SECONDS:.0f} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise AnswerError(f"the connection broke: {error or type(error).__name__}") from None
    finally:
        connection.close()
    if count == 0:
        raise AnswerError("the answer was empty")
    return Answer(first, time.monotonic() - began, count)


def _text(event: bytes) -> str | None:
    """The text of one event; None for the empty lines between them."""
    if not event.strip():
        return None
    try:
        content = json.loads(event)
    except ValueError:
        raise AnswerError(f"not JSON: {event[:200]!r}") from None
    if "error" in content:
        raise AnswerError(str(content["error"]))
    text = content.get("text_output", "")
    return "".join(text) if isinstance(text, list) else str(text)
