"""Who may ask, how much, and how often at a time: keys, sizes and limits, before any endpoint.

Plain ASGI, so that the endpoints see when their caller leaves. Invariants: once there are keys, every
path but the health checks and the page's own files needs one; keys are kept as digests and compared in constant time; no more
of a body is read than may be sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import uuid
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trident_client import request_id as current_request_id
from trident_client.openai.errors import RETRY_AFTER, ApiError
from trident_client.openai.http import JSONAnswer
from trident_client.openai.limits import TokenBudgets
from trident_client.openai.metrics import GatewayMetrics

__all__ = ["MAX_HEADER_BYTES", "Access", "Keys", "error_response"]

MAX_HEADER_BYTES = 16 * 1024
KEYS_VARIABLE = "TRIDENT_API_KEYS"
_OPEN_PATHS = ("/health", "/health/live", "/health/ready")
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}")
_BODY_SECONDS = 60.0


class Keys:
    """Digests of the keys that are accepted; without any, all requests are."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @classmethod
    def read(cls, path: str | None, environment: Mapping[str, str] = os.environ) -> Keys:
        """Keys out of a file, one a line, and of the variable TRIDENT_API_KEYS, between commas.

        Raises ValueError if a source was named and holds none: that would leave the door open.
        """
        keys: list[str] = []
        for source, lines in (
            (path, Path(path).read_text().splitlines() if path is not None else None),
            (KEYS_VARIABLE, environment[KEYS_VARIABLE].split(",") if KEYS_VARIABLE in environment
             else None),
        ):  # fmt: skip
            if lines is not None:
                found = [line.strip() for line in lines]
                found = [line for line in found if line and not line.startswith("#")]
                if not found:
                    raise ValueError(f"{source} holds no API key")
                keys += found
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def caller(self, header: str) -> str | None:
        """A name for the holder of the key in an Authorization header; None if it holds none."""
        scheme, _, key = header.partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        # All are compared, so that the time tells nothing.
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest.hex() if any(found) and scheme.lower() == "bearer" else None


def error_response(error: ApiError) -> JSONAnswer:
    """The response that tells of an error."""
    return JSONAnswer(error.body(), error.status, error.headers)


class Access:
    """Around the application: request ids, keys, limits, the body's size, and the counting of it all."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        open_paths: frozenset[str] = frozenset(),
        metrics: GatewayMetrics,
        max_body_bytes: int,
        max_requests_per_key: int,
        budgets: TokenBudgets,
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths.union(_OPEN_PATHS)
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._max_requests_per_key = max_requests_per_key
        self._in_flight: Counter[str] = Counter()
        self._budgets = budgets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        status = 500
        current_request_id.set(request_id)  # under which the model server knows it too

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        self._metrics.began()
        try:
            await self._admit(scope, receive, send_on)
        finally:
            self._metrics.ended(scope["path"], scope.get("trident_outcome", str(status)))

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _head_bytes(scope) > MAX_HEADER_BYTES:
            await error_response(_LARGE_HEAD)(scope, receive, send)
            return
        caller = ""
        if self._keys and scope["path"] not in self._open_paths and scope["method"] != "OPTIONS":
            known = self._keys.caller(Headers(scope=scope).get("authorization", ""))
            if known is None:
                await error_response(_WRONG_KEY)(scope, receive, send)
                return
            caller = known
            scope["trident_salt"] = hashlib.sha256(b"cache salt " + known.encode()).hexdigest()[:32]
        scope["trident_charge"] = partial(self._budgets.charge, caller)
        refusal = self._refusal(caller) if scope["method"] == "POST" else None
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)
            return
        self._in_flight[caller] += 1
        try:
            body = await self._read_body(scope, receive)
            await self._app(scope, _replayed(body, receive), send)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        finally:
            self._in_flight[caller] -= 1
            if not self._in_flight[caller]:
                del self._in_flight[caller]

    def _refusal(self, caller: str) -> ApiError | None:
        """Why this caller may not ask for anything now."""
        if 0 < self._max_requests_per_key <= self._in_flight[caller]:
            return _TOO_MANY
        seconds = self._budgets.seconds_to_wait(caller)
        return _too_many_tokens(seconds) if seconds else None

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None if the caller left within it. Raises `ApiError` if it is too large."""
        length = Headers(scope=scope).get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self._max_body_bytes:
            raise self._too_large()
        try:
            return await asyncio.wait_for(self._read_parts(receive), _BODY_SECONDS)
        except asyncio.TimeoutError:
            raise ApiError(408, "The body did not come in time") from None

    async def _read_parts(self, receive: Receive) -> bytes | None:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"The body must have at most {self._max_body_bytes} bytes", code="body_too_large"
        )


_WRONG_KEY = ApiError(
    401,
    "A valid API key is needed: send the header Authorization: Bearer KEY",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)
_TOO_MANY = ApiError(
    429,
    "Too many requests of this key are in flight; wait until one has ended",
    type="rate_limit_error",
    code="rate_limit_exceeded",
    headers=RETRY_AFTER,
)


_LARGE_HEAD = ApiError(
    431,
    f"The path and the headers must have at most {MAX_HEADER_BYTES} bytes",
    code="headers_too_large",
)


def _head_bytes(scope: Scope) -> int:
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    return headers + len(scope.get("raw_path") or b"") + len(scope["query_string"])


def _too_many_tokens(seconds: int) -> ApiError:
    return ApiError(
        429,
        f"This key has used its tokens of the minute; ask again in {seconds} s",
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(seconds)},
    )


def _replayed(body: bytes | None, receive: Receive) -> Receive:
    """Gives the body in one piece, then what `receive` gives."""
    waiting: list[Message] = [
        {"type": "http.disconnect"}
        if body is None
        else {"type": "http.request", "body": body, "more_body": False}
    ]

    async def replay() -> Any:
        return waiting.pop() if waiting else await receive()

    return replay
