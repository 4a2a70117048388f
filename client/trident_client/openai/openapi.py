"""``GET /openapi.json``: the paths and the bodies they take, made of the models that read them.

Answers are OpenAI's and are not described again. A description made by hand would grow apart from what
is read: only the summaries are written here.
"""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from trident_client.openai.chat_request import ChatRequest
from trident_client.openai.completions import CompletionRequest
from trident_client.openai.embeddings import EmbeddingRequest
from trident_client.openai.fields import Body
from trident_client.openai.responses_request import ResponsesRequest
from trident_client.openai.tokenize import DetokenizeRequest, TokenizeRequest

__all__ = ["document"]

_POSTS: dict[str, tuple[str, type[Body]]] = {
    "/v1/chat/completions": ("A conversation, answered", ChatRequest),
    "/v1/completions": ("Texts or token ids, continued", CompletionRequest),
    "/v1/responses": ("A conversation, answered in items; nothing is stored", ResponsesRequest),
    "/v1/embeddings": ("Texts or token ids as vectors", EmbeddingRequest),
    "/tokenize": ("The token ids of a text", TokenizeRequest),
    "/detokenize": ("The text of token ids", DetokenizeRequest),
}
_GETS = {
    "/v1/models": "The models",
    "/health": "Whether the gateway answers",
    "/health/ready": "Whether every model takes requests",
    "/metrics": "Counts of the gateway, and of the model server if it was told where",
    "/version": "The gateway's version",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_KEY = {"type": "http", "scheme": "bearer"}


def document(version: str) -> dict[str, Any]:
    """The description, in OpenAPI 3.1."""
    models = [(model, "validation") for _, model in _POSTS.values()]
    references, schemas = models_json_schema(
        models,  # type: ignore[arg-type]
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {path: {"get": _operation(text)} for path, text in _GETS.items()}
    for path, (text, model) in _POSTS.items():
        body = {"application/json": {"schema": references[model, "validation"]}}
        paths[path] = {
            "post": {**_operation(text), "requestBody": {"required": True, "content": body}}
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Trident's gateway for OpenAI's API", "version": version},
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": _ERROR},
            "securitySchemes": {"key": _KEY},
        },
        "security": [{}, {"key": []}],
    }


def _operation(summary: str) -> dict[str, Any]:
    refusal = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "summary": summary,
        "responses": {
            "200": {"description": "The answer"},
            "4XX": {"description": "The caller's mistake, or its limit", "content": refusal},
            "5XX": {"description": "The server's fault, or its absence", "content": refusal},
        },
    }
