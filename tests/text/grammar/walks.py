"""Random outputs under a grammar: what a model with hot, meaningless logits would write."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trident_llm.text.grammar.backend import Backend, Vocabulary
from trident_llm.text.grammar.matcher import CompiledGrammar, GrammarMatcher, allocate_bitmask
from trident_llm.text.grammar.spec import GrammarSpec

MAX_TOKENS = 4000


def compile_here(backend: Backend, spec: GrammarSpec) -> CompiledGrammar:
    """Compile without a worker."""
    compiled = backend.compile(spec)
    return CompiledGrammar(spec, compiled.memory_size_bytes, 0.0, backend, compiled)


def allowed_ids(matcher: GrammarMatcher) -> NDArray[Any]:
    """The ids that may come next."""
    vocab_size = matcher.grammar.backend.vocabulary.vocab_size
    bitmask = allocate_bitmask(1, vocab_size)
    assert matcher.fill_mask(bitmask, 0), matcher.refusal
    return np.flatnonzero(np.unpackbits(bitmask.view(np.uint8)[0], bitorder="little"))


def walk(
    grammar: CompiledGrammar, rng: np.random.Generator, *, hot_tokens: int, prefer: bytes = b'"}]'
) -> tuple[bytes, list[int]]:
    """Sample one output to its end: the text, and its ids with the stop token.

    hot_tokens: so many are drawn with equal chances. After them, a token out of ``prefer`` or the
    stop token is taken where one is allowed, so that every output ends.
    """
    vocabulary: Vocabulary = grammar.backend.vocabulary
    closing = np.array(
        [
            id_ in vocabulary.stop_ids or (len(token) == 1 and token in prefer)
            for id_, token in enumerate(vocabulary.tokens)
        ]
    )
    matcher = grammar.new_matcher()
    ids: list[int] = []
    while not matcher.is_terminated():
        assert len(ids) < MAX_TOKENS, "the output does not end"
        allowed = allowed_ids(matcher)
        if len(ids) >= hot_tokens and rng.random() < 0.9 and closing[allowed].any():
            allowed = allowed[closing[allowed]]
        token_id = int(rng.choice(allowed))
        assert matcher.accept(token_id), matcher.refusal
        ids.append(token_id)
    return b"".join(vocabulary.tokens[id_] for id_ in ids), ids
