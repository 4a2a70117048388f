"""``POST /v1/embeddings``: texts or token ids, as vectors."""

from __future__ import annotations

import base64
from typing import Any, Literal, cast

from pydantic import Field, field_validator
from starlette.requests import Request
from starlette.responses import Response

from trident_client import Embeddings
from trident_client.openai.errors import bad_request
from trident_client.openai.fields import Body, parse_body
from trident_client.openai.gateway import Gateway
from trident_client.openai.http import read_json
from trident_client.openai.prompts import Prompt, checked_prompts, split_prompts

__all__ = ["EmbeddingRequest", "embeddings"]

MAX_INPUTS = 2048  # of one request, as with OpenAI
_POOLING = ("dimensions", "normalize", "truncate_prompt_tokens")
# Where the model server names what a caller sent under another name.
_RENAMES = {
    "embedding_request.input": "input",
    **{f"embedding_request.pooling_params.{name}": name for name in _POOLING},
}


class EmbeddingRequest(Body):
    """The body."""

    input: Any = Field()
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    # vLLM's
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None

    @field_validator("input")
    @classmethod
    def _input(cls, value: Any) -> Any:
        return checked_prompts(value)

    def texts(self) -> list[Prompt]:
        """Each text."""
        return split_prompts(self.input)


async def embeddings(gateway: Gateway, request: Request) -> Response:
    """The endpoint."""
    body = parse_body(EmbeddingRequest, await read_json(request))
    texts = body.texts()
    if len(texts) > MAX_INPUTS:
        raise bad_request("input", f"must hold at most {MAX_INPUTS} texts")
    job = gateway.embedding_job(request, body, _RENAMES)
    work = job.client.embed(
        cast("list[str]", texts),  # or of lists of ids
        dimensions=body.dimensions,
        normalize=body.normalize,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )

    def shape(result: Embeddings) -> dict[str, Any]:
        tokens = result.usage.prompt_tokens or 0
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _encoded(vector, body)}
                for index, vector in enumerate(result.vectors)
            ],
            "model": job.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    return await gateway.answer(request, job, work, shape)


def _encoded(vector: Any, body: EmbeddingRequest) -> Any:
    """Numbers, or the base64 of their float32 in little-endian order."""
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
