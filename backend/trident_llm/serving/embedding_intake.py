"""The door of a model that embeds; see :mod:`trident_llm.serving.door`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trident_llm.core.embedding import EmbeddingRequest, check_dimensions, check_text_length
from trident_llm.core.errors import invalid
from trident_llm.engine.embedding import EmbeddingEngine
from trident_llm.engine.loop import EngineLoop
from trident_llm.serving.door import Door
from trident_llm.serving.embedding_protocol import (
    EmbeddingBuilder,
    ParsedEmbedding,
    parse_embedding_request,
)
from trident_llm.serving.protocol import RawRequest
from trident_llm.serving.responder import RequestHandle, Responder
from trident_llm.text.tokenizer import Tokenizer, TokenizerError


@dataclass(frozen=True)
class EmbeddingFacts:
    """What the checks at the door need of the loaded model."""

    tokenizer: Tokenizer
    max_model_len: int
    vocab_size: int
    num_dimensions: int


class EmbeddingIntake(Door):
    """Reads, tokenizes and checks requests for embeddings."""

    # To the tokenizers of encoders a word of up to 100 characters may be one unknown token.
    least_chars_per_token = 100

    def __init__(
        self,
        facts: EmbeddingFacts,
        loop: EngineLoop[EmbeddingEngine],
        responder: Responder,
        *,
        stats: Callable[[bool], dict[str, Any]],
    ) -> None:
        super().__init__(facts, responder, stats)
        self._facts = facts
        self._loop = loop

    def _take_in(self, handle: RequestHandle, raw: RawRequest) -> None:
        parsed = parse_embedding_request(raw)
        if parsed.control is not None:
            self._answer(handle, parsed.control)
            return
        ids = self._encode(parsed)
        check_text_length(len(ids), self._facts.max_model_len, parsed.field)
        check_dimensions(parsed.params, self._facts.num_dimensions, parsed.params_field)
        handle.builder = EmbeddingBuilder(parsed)
        request = EmbeddingRequest(handle.request_id, ids, parsed.params)
        self._loop.add(request.request_id, lambda engine: engine.add(request, handle.arrival))
        if handle.abort_error is not None:
            # A cancel may have been seen before the engine knew the request.
            self._loop.abort(handle.request_id, handle.abort_error)

    def _encode(self, parsed: ParsedEmbedding) -> list[int]:
        """The text's token ids, at least one, all in the vocabulary."""
        facts, most = self._facts, parsed.params.truncate_prompt_tokens
        if most is not None:
            most = facts.max_model_len if most < 0 else min(most, facts.max_model_len)
        if parsed.token_ids is not None:
            ids = parsed.token_ids[:most]
        elif most is None:
            assert parsed.text is not None
            ids = self._encode_text(parsed.text, parsed.field)
        else:
            assert parsed.text is not None
            # What stands far behind the cut need not be encoded, which would take long.
            text = parsed.text[: self._max_chars]
            try:
                ids = facts.tokenizer.encode_beginning(text, most)
            except TokenizerError as error:
                raise invalid(parsed.field, str(error)) from None
        self._check_ids(parsed.field, ids)
        return ids
