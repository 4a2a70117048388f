"""From sampled tokens to what a client reads: text, ends, and the merging of unread deltas.

Owned by the engine's thread up to :class:`RequestOutput`, which is handed over as a value. This module
knows nothing of Triton: :mod:`trident_llm.serving` turns outputs into responses.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from trident_llm.core.errors import RequestError
from trident_llm.core.messages import TokenLogprob
from trident_llm.core.request import FinishReason, Request, Sequence
from trident_llm.core.step import SequenceUpdate
from trident_llm.engine.grammar import OutputGrammar
from trident_llm.text.detokenizer import Detokenizer
from trident_llm.text.stop import StopMatcher
from trident_llm.text.tokenizer import Tokenizer


@dataclass
class SequenceDelta:
    """What is new of one sequence since its last delta. Unread deltas are merged in place."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)  # one list per token, if asked
    cumulative_logprob: float = 0.0  # of all tokens so far
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def merge(self, later: SequenceDelta) -> None:
        """Appends the delta that follows this one."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.cumulative_logprob = later.cumulative_logprob
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


@dataclass
class RequestTimes:
    """Moments in a request's life, ``time.monotonic()`` seconds; 0.0 while they have not come."""

    arrival: float = 0.0
    first_scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0  # the newest so far
    finished: float = 0.0


@dataclass
class RequestOutput:
    """News of one request. ``error`` ends it without a result; ``finished`` is said exactly once."""

    request_id: str
    deltas: dict[int, SequenceDelta]
    num_prompt_tokens: int
    num_cached_tokens: int
    finished: bool
    error: RequestError | None
    times: RequestTimes
    # Per prompt token, in the first output only and only if asked for; the first has None.
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    embedding: npt.NDArray[np.float32] | None = None  # [dimensions], of a model that embeds

    def merge(self, later: RequestOutput) -> None:
        """Takes in the output that follows this one, when this one is still unread."""
        for index, delta in later.deltas.items():
            mine = self.deltas.get(index)
            if mine is None:
                self.deltas[index] = delta
            else:
                mine.merge(delta)
        self.num_cached_tokens = later.num_cached_tokens
        self.finished = later.finished
        self.error = later.error


class _SequenceText:
    """Detokenization and stop strings of one sequence."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        self._matcher = (
            StopMatcher(params.stop, include_stop_str=params.include_stop_str_in_output)
            if params.stop
            else None
        )
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def push(self, token_ids: SequenceOf[int]) -> tuple[str, str | None]:
        """New text to show, and the stop string that ends it, if one does."""
        if self._detokenizer is None:
            return "", None
        shown = ""
        for token_id in token_ids:
            self._num_tokens += 1
            text = self._detokenizer.push((token_id,))
            if self._matcher is None:
                shown += text
            elif self._num_tokens <= self._min_tokens:
                shown += self._matcher.skip(text)
            else:
                match = self._matcher.push(text)
                shown += match.text
                if match.stop is not None:
                    return shown, match.stop
        return shown, None

    def after(self, token_id: int) -> tuple[_SequenceText, str | None]:
        """As :class:`trident_llm.core.beam.BeamText` has it; this one stays as it is."""
        other = copy.copy(self)
        other._detokenizer = self._detokenizer and self._detokenizer.fork()
        other._matcher = self._matcher and self._matcher.fork()
        return other, other.push((token_id,))[1]

    def flush(self) -> tuple[str, str | None]:
        """What was held back, once no more tokens come."""
        if self._detokenizer is None:
            return "", None
        text = self._detokenizer.flush()
        if self._matcher is None:
            return text, None
        match = self._matcher.push(text)
        if match.stop is not None:
            return match.text, match.stop
        return match.text + self._matcher.flush(), None


class ActiveRequest:
    """A request in the engine, with the text state of its sequences.

    With best_of above n nothing is known of the outcome before the last sequence has ended: deltas
    are kept until then, and the n sequences with the highest cumulative log-probability are told. A
    beam search has chosen in the core: its beams come at once, ended.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.request = request
        self.grammar: OutputGrammar | None = None  # set by the engine
        self.times = RequestTimes(arrival=time.monotonic())
        num_told = params.n if params.use_beam_search else params.num_sequences
        self._texts = [_SequenceText(request, tokenizer) for _ in range(num_told)]
        self._cumulative = [0.0] * num_told
        self._chooses = num_told > params.n
        self._kept: dict[int, SequenceDelta] = {}
        self._prompt_told = params.prompt_logprobs is None
        if params.use_beam_search and params.stop:
            request.beam_text = _SequenceText(request, tokenizer)

    def process(self, update: SequenceUpdate) -> tuple[SequenceDelta, str | None]:
        """The delta of one update; the second value is the stop string that ends the sequence."""
        seq = update.sequence
        text = self._texts[seq.index]
        if update.token_ids:
            self.times.last_token = time.monotonic()
            self.times.first_token = self.times.first_token or self.times.last_token
        visible = update.token_ids
        if self._ends_hidden(seq):
            visible = visible[:-1]
        shown, stop = text.push(visible)
        finish, reason = seq.finish_reason, seq.stop_reason
        if stop is None and finish is not None:
            rest, stop = text.flush()
            shown += rest
        if stop is not None:
            finish, reason = FinishReason.STOP, stop
        for logprobs in update.logprobs or ():
            self._cumulative[seq.index] += logprobs[0].logprob
        if update.cumulative_logprob is not None:
            self._cumulative[seq.index] = update.cumulative_logprob
        delta = SequenceDelta(
            index=seq.index,
            text=shown,
            token_ids=list(update.token_ids),
            logprobs=[] if self.request.params.logprobs is None else list(update.logprobs or ()),
            cumulative_logprob=self._cumulative[seq.index],
            finish_reason=finish,
            stop_reason=reason,
        )
        return delta, stop

    def _ends_hidden(self, seq: Sequence) -> bool:
        """Whether the last token is an end token whose text is not part of the output."""
        params = self.request.params
        by_token = seq.finish_reason is FinishReason.STOP and not isinstance(seq.stop_reason, str)
        return by_token and not params.include_stop_str_in_output

    def progress(self, deltas: dict[int, SequenceDelta]) -> RequestOutput | None:
        """The output of one step's deltas, by sequence index; None while it has to wait."""
        if not self._chooses:
            return self.output(deltas)
        for index, delta in deltas.items():
            if index in self._kept:
                self._kept[index].merge(delta)
            else:
                self._kept[index] = delta
        if not self.request.finished:
            return None
        ranked = sorted(self._kept.values(), key=lambda d: (-d.cumulative_logprob, d.index))
        best = ranked[: self.request.params.n]
        return self.output({i: replace(delta, index=i) for i, delta in enumerate(best)})

    def output(
        self, deltas: dict[int, SequenceDelta], error: RequestError | None = None
    ) -> RequestOutput:
        """An output with these deltas; it is the last one if the request has ended."""
        finished = error is not None or self.request.finished
        if finished:
            self.times.finished = time.monotonic()
        prompt_logprobs = None
        if not self._prompt_told and error is None:
            prompt_logprobs = [None, *self.request.prompt_logprobs]
            self._prompt_told = True
        return RequestOutput(
            request_id=self.request.request_id,
            deltas=deltas,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=self.request.sequences[0].num_cached_tokens
            if self.request.sequences
            else 0,
            finished=finished,
            error=error,
            times=self.times,
            prompt_logprobs=prompt_logprobs,
        )
