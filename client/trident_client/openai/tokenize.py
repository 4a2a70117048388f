"""``POST /tokenize`` and ``/detokenize``, as vLLM has them: the model server's control operations."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from trident_client.openai.fields import Body, parse_body
from trident_client.openai.gateway import Gateway
from trident_client.openai.http import read_json

__all__ = ["detokenize", "tokenize"]


class TokenizeRequest(Body):
    """A text to tokenize."""

    prompt: str
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    """Token ids to read."""

    tokens: list[int]


async def tokenize(gateway: Gateway, request: Request) -> Response:
    """The token ids of a text."""
    body = parse_body(TokenizeRequest, await read_json(request))
    job = gateway.job(request, body, "tokenize")
    work = job.client.control(
        {"op": "tokenize", "text": body.prompt, "add_special_tokens": body.add_special_tokens}
    )
    return await gateway.answer(
        request,
        job,
        work,
        lambda reply: {
            "count": len(reply["token_ids"]),
            "max_model_len": reply.get("max_model_len"),
            "tokens": reply["token_ids"],
        },
    )


async def detokenize(gateway: Gateway, request: Request) -> Response:
    """The text of token ids."""
    body = parse_body(DetokenizeRequest, await read_json(request))
    job = gateway.job(request, body, "detokenize")
    return await gateway.answer(
        request, job, job.client.detokenize(body.tokens), lambda text: {"prompt": text}
    )
