"""A compiled grammar, the state of one sequence in it, and the masks of a batch.

Owns the per-sequence state. It must not know requests, the sampler or tensors: a mask is a numpy
row of bits, and whoever samples applies all rows in one pass.

Invariant: a matcher's state is that of a new matcher which accepted the same ids.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trident_llm.text.grammar.backend import Backend
from trident_llm.text.grammar.spec import GrammarSpec

# A sequence may spend this much time of a processor in its grammar: so much at once, and so much
# for each token. An ambiguous grammar can grow without bound with the text that it has matched.
ALLOWED_SECONDS = 1.0
ALLOWED_SECONDS_PER_TOKEN = 0.01

Bitmask = NDArray[np.int32]


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar ready to be matched. Safe for many threads; shared by equal requests.

    num_bytes: memory that it takes, about. seconds: what compiling took.
    """

    spec: GrammarSpec
    num_bytes: int
    seconds: float
    backend: Backend
    compiled: Any

    def new_matcher(self) -> GrammarMatcher:
        """Return the state of a sequence that has no output yet."""
        return GrammarMatcher(self, self.backend.matcher(self.compiled))


def allocate_bitmask(rows: int, vocab_size: int) -> Bitmask:
    """Return masks that allow everything: [rows, ceil(vocab_size / 32)], bit i of a row is token i.

    Bit i is bit ``i % 32`` of word ``i // 32``, least significant first.
    """
    return np.full((rows, (vocab_size + 31) // 32), -1, dtype=np.int32)


class GrammarMatcher:
    """The state of one sequence. Not safe for several threads at once.

    grammar: what it matches. num_accepted: ids accepted so far. refusal: why the last `accept` or
    `fill_mask` refused; None if it did not.
    """

    __slots__ = ("_matcher", "_tail", "grammar", "num_accepted", "refusal", "seconds")

    def __init__(self, grammar: CompiledGrammar, matcher: Any) -> None:
        """matcher: the library's, which nobody else uses. See CompiledGrammar.new_matcher."""
        self.grammar = grammar
        self._matcher = matcher
        self.num_accepted = 0
        self.refusal: str | None = None
        self.seconds = 0.0
        used = grammar.backend.vocabulary.vocab_size % 32
        self._tail = np.int32((1 << used) - 1) if used else np.int32(-1)

    def accept(self, token_id: int) -> bool:
        """Take the token that was sampled. False: it does not fit, and `refusal` says why; the
        state is as before, and the request must end with an error.
        """
        if self._matcher.is_terminated() and self.grammar.backend.vocabulary.stop_ids:
            self.refusal = "the output was already complete"
            return False
        start = time.thread_time()
        accepted = bool(self._matcher.accept_token(token_id))
        self.seconds += time.thread_time() - start
        self.num_accepted += accepted
        self.refusal = None if accepted else "the grammar does not allow the token"
        return accepted

    def fill_mask(self, bitmask: Bitmask, row: int) -> bool:
        """Write which tokens may come next into ``bitmask[row]`` (see `allocate_bitmask`).

        False: none may, or the grammar takes too long, and `refusal` says which; the request must
        end with an error. The sequence must not be terminated.
        """
        assert not self.is_terminated(), "a terminated sequence is not sampled again"
        start = time.thread_time()
        self._matcher.fill_next_token_bitmask(bitmask, row)
        self.seconds += time.thread_time() - start
        bitmask[row, -1] &= self._tail
        if self.seconds > ALLOWED_SECONDS + ALLOWED_SECONDS_PER_TOKEN * self.num_accepted:
            self.refusal = "the grammar takes too long for each token; make it less ambiguous"
            return False
        if not bitmask[row].any():
            self.refusal = "no token of the model can continue the output in its grammar"
            return False
        self.refusal = None
        return True

    def is_terminated(self) -> bool:
        """Whether the output has ended: a stop token was accepted, or, where the model has none,
        the output is complete.
        """
        return bool(self._matcher.is_terminated())

    def is_completed(self) -> bool:
        """Whether the output so far is one that the grammar describes whole."""
        return bool(self._matcher.is_completed())
