"""A request's grammar and where each of its sequences stands in it. Owned by the engine's thread.

A sequence's state follows the tokens that are known to the host; preempting the sequence does not
touch it, since its tokens stay.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trident_llm.core.request import Sequence
from trident_llm.text.grammar.matcher import CompiledGrammar, GrammarMatcher, allocate_bitmask

# The stop reason where the model has no token that ends an output.
COMPLETE = "complete"


class OutputGrammar:
    """What the sequences of one request may say next.

    Args:
        end_ids: tokens that end a sequence, which ``min_tokens`` puts off while there is another.
    """

    def __init__(
        self, grammar: CompiledGrammar, num_sequences: int, min_tokens: int, end_ids: frozenset[int]
    ) -> None:
        self._matchers = [grammar.new_matcher() for _ in range(num_sequences)]
        self._min_tokens = min_tokens
        vocabulary = grammar.backend.vocabulary
        self.vocab_size = vocabulary.vocab_size
        self._has_stop_ids = bool(vocabulary.stop_ids)
        self._no_ends = allocate_bitmask(1, self.vocab_size)[0]  # allows all but the ends
        for end in end_ids:
            self._no_ends.view(np.uint32)[end // 32] &= ~np.uint32(1 << end % 32)

    def fill(self, seq: Sequence, bits: npt.NDArray[np.int32], line: int) -> str | None:
        """Writes what ``seq`` may say next into ``bits[line]``; says why, if nothing is left."""
        matcher = self._matchers[seq.index]
        if not matcher.fill_mask(bits, line):
            return _refusal(matcher)
        if seq.num_output_tokens < self._min_tokens:
            longer = bits[line] & self._no_ends
            if longer.any():
                bits[line] = longer
        return None

    def accept(self, seq: Sequence, token_ids: list[int]) -> str | None:
        """Follows the tokens that ``seq`` gained; says why, if one does not fit."""
        matcher = self._matchers[seq.index]
        for token_id in token_ids:
            if not matcher.accept(token_id):
                return _refusal(matcher)
        return None

    def is_over(self, seq: Sequence) -> bool:
        """Whether the output of ``seq`` has ended, whatever else the request says of its end."""
        return self._matchers[seq.index].is_terminated()

    @property
    def stop_reason(self) -> str | None:
        """What to tell of such an end: nothing if a token made it, as for any request."""
        return None if self._has_stop_ids else COMPLETE


def _refusal(matcher: GrammarMatcher) -> str:
    assert matcher.refusal is not None
    return matcher.refusal
