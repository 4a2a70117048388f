"""Log-probabilities of prompts: with an echo in OpenAI's shape, by themselves in vLLM's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from trident_client import AsyncClient, Result
from trident_client.openai.usage import completion_logprobs, finite

__all__ = ["echoed_logprobs", "first_pieces", "listed"]


async def first_pieces(client: AsyncClient, prompts: Sequence[str | list[int]]) -> list[str]:
    """The text of each prompt's first token. It has no log-probability, so nothing else tells it."""

    async def piece(prompt: str | list[int]) -> str:
        ids = await client.tokenize(prompt) if isinstance(prompt, str) else prompt
        return await client.detokenize(ids[:1])

    return list(await asyncio.gather(*map(piece, prompts)))


def echoed_logprobs(
    result: Result, choice_logprobs: Any, *, first: str, echo: str, num_top: int
) -> dict[str, Any]:
    """Of the prompt's tokens and then of one choice's; the first token's are null."""
    # A token that only begins the sequence is not part of the echoed text.
    offset = len(first) if echo.startswith(first) else 0
    known = [token for token in result.prompt_logprobs or () if token is not None]
    parts = completion_logprobs([*known, *(choice_logprobs or ())], num_top, offset)
    return {
        "tokens": [first, *parts["tokens"]],
        "token_logprobs": [None, *parts["token_logprobs"]],
        "top_logprobs": None if parts["top_logprobs"] is None else [None, *parts["top_logprobs"]],
        "text_offset": [0, *parts["text_offset"]],
    }


def listed(result: Result) -> list[dict[str, Any] | None] | None:
    """As vLLM gives them: for each token its candidates by id."""
    if result.prompt_logprobs is None:
        return None
    return [
        None
        if token is None
        else {
            str(each.token_id): {
                "logprob": finite(each.logprob),
                "rank": each.rank,
                "decoded_token": each.decoded_token,
            }
            for each in token
        }
        for token in result.prompt_logprobs
    ]
