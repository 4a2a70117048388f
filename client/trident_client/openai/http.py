"""The body of a request, and its caller's leaving: what every endpoint needs of HTTP.

Knows nothing of models. Invariant: work done with `until_gone` ends at once when its caller leaves.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive

from trident_client.openai.errors import ApiError, bad_request

__all__ = ["ClientGone", "JSONAnswer", "disconnected", "json_bytes", "read_json", "until_gone"]

_T = TypeVar("_T")
_MAX_DEPTH = 64


class ClientGone(Exception):
    """The caller has left; nobody reads an answer."""


def json_bytes(content: Any) -> bytes:
    """`content` as compact JSON. A lone half of a character has no UTF-8 form and stays escaped."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace")


class JSONAnswer(JSONResponse):
    """A response in JSON, whatever a model has written."""

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


def _refuse_constant(text: str) -> Any:
    raise ValueError(text)


async def read_json(request: Request) -> Any:
    """The JSON value of the body. Raises `ApiError`, whose text never repeats the body."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "Send the body with the header Content-Type: application/json")
    raw = await request.body()
    try:
        value = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise bad_request(None, "The body must be valid JSON in UTF-8", "invalid_json") from None
    if _too_deep(value):
        raise bad_request(None, f"The body must be nested at most {_MAX_DEPTH} levels deep")
    return value


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        if not inner:
            return False
        level = inner
    return True


async def disconnected(receive: Receive) -> None:
    """Returns once the caller has left. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """What `work` gives. Raises `ClientGone`, and cancels it, if the caller leaves before."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
