"""Beam search: which candidates go on, which have ended, and when no better end can come.

The rules are those of ``generate(num_beams=...)`` in Hugging Face transformers: of all beams'
candidates, by summed log-probability, those among the best ``width`` that end are kept as hypotheses,
and the best ``width`` that do not end go on. A hypothesis is worth ``logprob / length **
length_penalty``, its end token counted.

Knows beams by their number only: not their blocks, their rows or how they are scheduled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from trident_llm.core.messages import Candidate, Continuation
from trident_llm.core.request import FinishReason
from trident_llm.core.sampling_params import SamplingParams


class BeamText(Protocol):
    """The text of one beam, where stop strings are looked for."""

    def after(self, token_id: int) -> tuple[BeamText, str | None]:
        """The text with one token more, and the stop string that this token completes."""


class Choice(NamedTuple):
    """A beam's next token, and the beam that it continues."""

    parent: int
    token_id: int
    logprob: float  # of all output tokens so far
    text: BeamText | None


@dataclass(frozen=True)
class Hypothesis:
    """A finished beam."""

    token_ids: list[int]  # prompt and output
    logprob: float  # sum over the output tokens
    score: float
    finish_reason: FinishReason
    stop_reason: int | str | None


class BeamSearch:
    """The search of one request. Its beams are numbered as the request's sequences are."""

    def __init__(
        self,
        params: SamplingParams,
        num_prompt_tokens: int,
        eos_token_ids: frozenset[int],
        text: BeamText | None = None,
    ) -> None:
        assert params.max_tokens is not None
        self.width = params.num_sequences
        self.hypotheses: list[Hypothesis] = []  # best first, at most ``width``
        self.continuations: list[Continuation] = []  # chosen, and not told the device yet
        self.num_shared_tokens = 0  # that the beams start from when they are computed again
        self._params = params
        self._max_tokens = params.max_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        # At first all beams are equal: only the first one's candidates count.
        self._logprobs = [0.0] + [-math.inf] * (self.width - 1)
        self._texts = [text] * self.width

    def advance(
        self, token_ids: SequenceOf[list[int]], candidates: SequenceOf[SequenceOf[Candidate]]
    ) -> list[Choice]:
        """Each beam's next token, by number; nothing when the search is done.

        Args:
            token_ids: the tokens of each beam, prompt included.
            candidates: each beam's most likely next tokens: at least the best ``width``, and the
                best ``width`` that do not end it.
        """
        length = len(token_ids[0]) - self._num_prompt_tokens + 1
        ranked = [
            (self._logprobs[beam] + candidate.logprob, beam, candidate.token_id)
            for beam, own in enumerate(candidates)
            for candidate in own
        ]
        ranked.sort(key=lambda entry: -entry[0])
        choices: list[Choice] = []
        for rank, (logprob, beam, token_id) in enumerate(ranked):
            if logprob == -math.inf or (rank >= self.width and len(choices) == self.width):
                break
            text, reason, stop = self._after(beam, token_id, length)
            if reason is None:
                if len(choices) < self.width:
                    choices.append(Choice(beam, token_id, logprob, text))
            elif rank < self.width:
                score = logprob / length**self._params.length_penalty
                ids = [*token_ids[beam], token_id]
                self.hypotheses.append(Hypothesis(ids, logprob, score, reason, stop))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.width :]
        if not choices or self._is_done(choices[0].logprob, length):
            return []
        # Where less than ``width`` can go on, the other beams are copies that never count.
        copy = choices[0]._replace(logprob=-math.inf)
        choices += [copy] * (self.width - len(choices))
        choices = _in_place(choices)
        self._logprobs = [choice.logprob for choice in choices]
        self._texts = [choice.text for choice in choices]
        return choices

    def _after(
        self, beam: int, token_id: int, length: int
    ) -> tuple[BeamText | None, FinishReason | None, int | str | None]:
        """A beam's text with one token more, and whether it ends there."""
        text = self._texts[beam]
        if length >= self._params.min_tokens:
            if token_id in self._eos_token_ids:
                return text, FinishReason.STOP, None
            if token_id in self._params.stop_token_ids:
                return text, FinishReason.STOP, token_id
        if text is not None:
            text, stop = text.after(token_id)
            if stop is not None:
                return text, FinishReason.STOP, stop
        return text, FinishReason.LENGTH if length >= self._max_tokens else None, None

    def _is_done(self, best_logprob: float, length: int) -> bool:
        """Whether no running beam can, or need, become better than the hypotheses."""
        if len(self.hypotheses) < self.width:
            return False
        rule, penalty = self._params.early_stopping, self._params.length_penalty
        if rule is True:
            return True
        # As generate() guesses it; "never" assumes the most favourable length.
        if rule == "never" and penalty > 0:
            length = self._max_tokens
        best_score: float = best_logprob / length**penalty
        return best_score <= self.hypotheses[-1].score


def _in_place(choices: SequenceOf[Choice]) -> list[Choice]:
    """The choices in such an order that a parent's first child takes the parent's own place."""
    places: list[Choice | None] = [None] * len(choices)
    others: list[Choice] = []
    for choice in choices:
        if places[choice.parent] is None:
            places[choice.parent] = choice
        else:
            others.append(choice)
    return [place or others.pop(0) for place in places]
