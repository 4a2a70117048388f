"""What the endpoints share: a client for each model, and the running of one request.

Invariant: a request's calls end when it does, whether it was answered, failed, or left by its caller.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from trident_client import AsyncClient, AsyncStream, TridentError
from trident_client.openai.errors import ApiError, bad_request, from_trident, unknown_model
from trident_client.openai.fields import Body
from trident_client.openai.http import JSONAnswer, until_gone
from trident_client.openai.pump import AT_ONCE, Pump
from trident_client.openai.settings import GatewaySettings
from trident_client.openai.sse import EventMaker, EventStream

__all__ = ["Gateway", "Job"]

_T = TypeVar("_T")

EMBEDDINGS_AT_ONCE = 64
"""Texts of one request under way at the same time: enough to fill the steps of the model."""
_DEFAULT_EMBED_MODEL = "embed"


@dataclass(frozen=True)
class Job:
    """One request on its way: whom it asks, and under which names its answer goes."""

    client: AsyncClient
    model: str
    id: str
    salt: str | None  # keeps its cached prefixes apart from other callers'
    renames: Mapping[str, str] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    charge: Callable[[int], None] = lambda tokens: None  # of what the request has used, at its end

    def head(self, object: str, *, created: str = "created") -> dict[str, Any]:
        """The fields that every answer and every chunk begins with."""
        return {"id": self.id, "object": object, created: self.created, "model": self.model}

    def options(self, cache_salt: str | None) -> dict[str, Any]:
        """The salt for the server: the caller's own within the one of its key."""
        parts = [part for part in (self.salt, cache_salt) if part]
        return {"cache_salt": "/".join(parts)} if parts else {}

    def translate(self, error: TridentError) -> ApiError:
        """What a failure means, in the names of this request."""
        return from_trident(error, self.renames)


class Gateway:
    """Clients of the models that are served. Belongs to one event loop."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.created = int(time.time())
        self.clients = {model: self._connect(model, AT_ONCE) for model in settings.models}
        self.embed_model = settings.embed_model or _DEFAULT_EMBED_MODEL
        self._embedder = self._connect(self.embed_model, EMBEDDINGS_AT_ONCE)

    def _connect(self, model: str, concurrency: int) -> AsyncClient:
        settings = self.settings
        return AsyncClient(
            settings.url,
            model,
            timeout=settings.timeout,
            ssl=settings.ssl(),
            headers=dict(settings.headers),
            # A caller that is told to come back later does so by itself: nothing is repeated here.
            retries=0,
            concurrency=concurrency,
        )

    async def close(self) -> None:
        """Cancel what is under way and close the connections."""
        for client in (*self.clients.values(), self._embedder):
            await client.close()

    async def served(self) -> dict[str, AsyncClient]:
        """All models, by name: the one that embeds, too, unless nobody named it and it is not there."""
        embeds = self.settings.embed_model is not None
        if not embeds and self.embed_model not in self.clients:
            try:
                embeds = await self._embedder.is_ready(timeout=2.0)
            except TridentError:
                embeds = False
        return {**self.clients, **({self.embed_model: self._embedder} if embeds else {})}

    def client(self, model: str | None) -> tuple[str, AsyncClient]:
        """The client of a model; without a name, of the only one. Raises `ApiError`."""
        if model is None and len(self.clients) == 1:
            model = next(iter(self.clients))
        if model is None:
            raise bad_request("model", "is required", "missing_required_parameter")
        if model not in self.clients and model == self.embed_model:
            raise bad_request("model", "is one that embeds and does not generate")
        if model not in self.clients:
            raise unknown_model(model)
        return model, self.clients[model]

    def job(
        self, request: Request, body: Body, prefix: str, renames: Mapping[str, str] | None = None
    ) -> Job:
        """The beginning of a request."""
        model, client = self.client(body.model)
        return Job(
            client,
            model,
            f"{prefix}-{uuid.uuid4().hex}",
            request.scope.get("trident_salt"),
            renames or {},
            charge=request.scope["trident_charge"],
        )

    def embedding_job(self, request: Request, body: Body, renames: Mapping[str, str]) -> Job:
        """The beginning of a request for embeddings."""
        model = body.model or self.embed_model
        if model != self.embed_model and model in self.clients:
            raise bad_request("model", f"generates and does not embed; use {self.embed_model}")
        if model != self.embed_model:
            raise unknown_model(model)
        return Job(self._embedder, model, f"embd-{uuid.uuid4().hex}", None, renames)

    async def answer(
        self,
        request: Request,
        job: Job,
        work: Coroutine[Any, Any, _T],
        shape: Callable[[_T], dict[str, Any]],
    ) -> Response:
        """The whole answer, once `work` is done."""
        try:
            made = shape(await until_gone(request, work))
        except TridentError as error:
            raise job.translate(error) from None
        job.charge(made.get("usage", {}).get("total_tokens", 0))
        return JSONAnswer(made)

    async def stream(
        self, request: Request, job: Job, streams: Sequence[AsyncStream], maker: EventMaker
    ) -> Response:
        """The answer as events. What is refused before any output is an ordinary error."""
        settings = self.settings
        pump = Pump(streams, max_unread_bytes=settings.max_unread_bytes, charge=job.charge)
        await pump.__aenter__()
        try:
            begun = await until_gone(request, pump.next(settings.heartbeat))
        except TridentError as error:
            await pump.__aexit__()
            raise job.translate(error) from None
        except BaseException:
            await pump.__aexit__()
            raise
        return EventStream(
            pump,
            maker,
            begun,
            heartbeat=settings.heartbeat,
            write_timeout=settings.write_timeout,
        )
