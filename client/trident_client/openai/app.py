"""The application: its paths, and what every answer goes through."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from trident_client import AsyncClient, TridentError
from trident_client.openai.access import Access, Keys, error_response
from trident_client.openai.chat import chat_completions
from trident_client.openai.completions import completions
from trident_client.openai.embeddings import embeddings
from trident_client.openai.errors import ApiError, from_trident, unknown_model
from trident_client.openai.gateway import Gateway
from trident_client.openai.http import ClientGone, JSONAnswer
from trident_client.openai.limits import TokenBudgets
from trident_client.openai.metrics import GatewayMetrics
from trident_client.openai.openapi import document
from trident_client.openai.responses import responses
from trident_client.openai.settings import ENVIRONMENT, GatewaySettings
from trident_client.openai.tokenize import detokenize, tokenize
from trident_client.openai.web_page import WebPage, stats

__all__ = ["create_app", "from_environment"]

_VERSION = importlib.metadata.version("trident-client")
Endpoint = Callable[[Gateway, Request], Awaitable[Response]]


def from_environment() -> ASGIApp:
    """The application of a worker process."""
    return create_app(GatewaySettings.from_json(os.environ[ENVIRONMENT]))


def create_app(settings: GatewaySettings) -> ASGIApp:
    """The application. Raises ValueError or OSError if its files cannot be used."""
    gateway = Gateway(settings)
    metrics = GatewayMetrics(settings.metrics_url)
    keys = Keys.read(settings.api_key_file)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await gateway.close()

    # FastAPI's own description would need no key, and knows nothing of the bodies.
    app = FastAPI(lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    _add_endpoints(app, gateway, metrics)
    page = WebPage(needs_key=bool(keys)) if settings.page else None
    if page is not None:
        _add_page(app, gateway, page)
    _add_error_handlers(app)
    served: ASGIApp = Access(
        app,
        keys=keys,
        open_paths=frozenset() if page is None else page.paths,
        metrics=metrics,
        max_body_bytes=settings.max_body_bytes,
        max_requests_per_key=settings.max_requests_per_key,
        budgets=TokenBudgets(settings.max_tokens_per_minute_per_key),
    )
    if settings.cors_origins:
        served = CORSMiddleware(
            served,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return served


def _add_endpoints(app: FastAPI, gateway: Gateway, metrics: GatewayMetrics) -> None:
    posts: dict[str, Endpoint] = {
        "/v1/completions": completions,
        "/v1/chat/completions": chat_completions,
        "/v1/responses": responses,
        "/v1/embeddings": embeddings,
        "/tokenize": tokenize,
        "/detokenize": detokenize,
    }
    gets: dict[str, Endpoint] = {
        "/v1/models": _models,
        "/v1/models/{model:path}": _model,
        "/health": _health,
        "/health/live": _health,
        "/health/ready": _ready,
        "/version": _version,
        "/openapi.json": _openapi,
    }

    def add(path: str, method: str, endpoint: Endpoint) -> None:
        async def call(request: Request) -> Response:
            return await endpoint(gateway, request)

        app.router.add_route(path, call, methods=[method])

    for path, endpoint in posts.items():
        add(path, "POST", endpoint)
    for path, endpoint in gets.items():
        add(path, "GET", endpoint)

    async def show_metrics(request: Request) -> Response:
        return PlainTextResponse(await metrics.text())

    app.router.add_route("/metrics", show_metrics, methods=["GET"])


def _add_page(app: FastAPI, gateway: Gateway, page: WebPage) -> None:
    async def show_stats(request: Request) -> Response:
        return await stats(gateway, request)

    for path in page.paths:
        app.router.add_route(path, page.serve, methods=["GET"])
    app.router.add_route("/stats", show_stats, methods=["GET"])


def _add_error_handlers(app: FastAPI) -> None:
    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    async def trident_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, TridentError)
        return error_response(from_trident(error))

    async def client_gone(request: Request, error: Exception) -> Response:
        request.scope["trident_outcome"] = "client_gone"
        return Response(status_code=499)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        reason = {404: "There is nothing at this path", 405: "This path takes another method"}
        text = reason.get(error.status_code, "The request cannot be served")
        return error_response(ApiError(error.status_code, text, code="not_found"))

    async def fault(request: Request, error: Exception) -> Response:
        return error_response(
            ApiError(500, "The gateway failed", type="server_error", code="server_error")
        )

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(TridentError, trident_error)
    app.add_exception_handler(ClientGone, client_gone)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, fault)


def _model_card(gateway: Gateway, name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": gateway.created, "owned_by": "trident"}


async def _models(gateway: Gateway, request: Request) -> Response:
    cards = [_model_card(gateway, name) for name in await gateway.served()]
    return JSONAnswer({"object": "list", "data": cards})


async def _model(gateway: Gateway, request: Request) -> Response:
    name = request.path_params["model"]
    if name not in gateway.clients and name not in await gateway.served():
        raise unknown_model(name)
    return JSONAnswer(_model_card(gateway, name))


async def _health(gateway: Gateway, request: Request) -> Response:
    return JSONAnswer({"status": "ok"})


async def _ready(gateway: Gateway, request: Request) -> Response:
    """Ready when every model takes requests and its engine answers."""
    models = await gateway.served()
    ready = {name: await _is_ready(client) for name, client in models.items()}
    return JSONAnswer({"models": ready}, 200 if all(ready.values()) else 503)


async def _is_ready(client: AsyncClient) -> bool:
    try:
        if not await client.is_ready(timeout=2.0):
            return False
        # A server may call a model ready whose engine is gone or stuck; this one asks the engine.
        if "control" in (await client.metadata(timeout=2.0)).inputs:
            await client.stats(timeout=2.0)
    except TridentError:
        return False
    return True


async def _version(gateway: Gateway, request: Request) -> Response:
    return JSONAnswer({"version": _VERSION})


async def _openapi(gateway: Gateway, request: Request) -> Response:
    return JSONAnswer(document(_VERSION))
