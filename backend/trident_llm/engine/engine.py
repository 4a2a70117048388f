"""The continuous-batching engine: one step schedules, runs and settles all running sequences.

Single-threaded: every method is called from the thread that owns the engine (see
:mod:`trident_llm.engine.loop`). A request that was added ends exactly once, in one
:class:`RequestOutput` whose ``finished`` is true.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trident_llm.core.config import SchedulerConfig
from trident_llm.core.errors import ErrorCode, RequestError
from trident_llm.core.messages import SchedulerOutput, StepResult
from trident_llm.core.request import FinishReason, Request
from trident_llm.core.scheduler import NOTHING_ALLOWED, Scheduler
from trident_llm.engine.faults import (
    CANCELLED,
    INTERNAL_STEP,
    MAX_FAILED_STEPS,
    NOT_FINITE,
    EngineDeadError,
)
from trident_llm.engine.grammar import OutputGrammar
from trident_llm.engine.output import ActiveRequest, RequestOutput, SequenceDelta
from trident_llm.text.grammar.compiler import FIELD as GRAMMAR_FIELD
from trident_llm.text.grammar.matcher import CompiledGrammar, allocate_bitmask
from trident_llm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from trident_llm.model.sampling.mask import TokenMask

logger = logging.getLogger("trident")

NUM_RECENT_STEPS = 256  # whose sizes are kept

NOTHING_TO_SAMPLE = RequestError(
    ErrorCode.INVALID_ARG,
    "sampling_parameters",
    "left no token to choose: allowed_token_ids, bad_words and min_tokens together forbid all; allow "
    "more",
)
OUTSIDE_GRAMMAR = RequestError(
    ErrorCode.INTERNAL, "structured_outputs", "could not be followed to the end; this is our fault"
)


class StepExecutor(Protocol):
    """What the engine needs of :class:`trident_llm.model.executor.Executor`."""

    def launch(self, output: SchedulerOutput, mask: TokenMask | None = None) -> Any:
        """Starts a step; ``mask`` says what the grammars of some sampled rows allow."""

    def collect(self, launched: Any) -> StepResult:
        """Waits for the oldest launched step."""


class Engine:
    """Scheduler, executor and detokenization, stepped from outside."""

    def __init__(
        self,
        executor: StepExecutor,
        config: SchedulerConfig,
        tokenizer: Tokenizer | None,
        *,
        launch_depth: int = 0,
    ) -> None:
        self.scheduler = Scheduler(config)
        self.config = config
        self._executor = executor
        self._tokenizer = tokenizer
        self._depth = launch_depth
        self._launched: deque[Any] = deque()
        self.active: dict[str, ActiveRequest] = {}  # by request id; others only read it
        self._ended: list[RequestOutput] = []  # outputs made outside a step's results
        self._failed_steps = 0
        # For who watches: step, sequences that computed one token, several tokens, tokens in all.
        self.recent_steps: deque[tuple[int, int, int, int]] = deque(maxlen=NUM_RECENT_STEPS)
        self.num_moves = 0  # steps launched, settled or failed: it gets on as long as this grows

    def add(
        self,
        request: Request,
        arrival: float | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """Takes a checked request in.

        Args:
            arrival: its ``time.monotonic()``, now if absent.
            grammar: what each of its sequences must follow.
        """
        assert request.request_id not in self.active, "request ids are unique"
        active = ActiveRequest(request, self._tokenizer)
        if grammar is not None:
            params = request.params
            ends = self.config.eos_token_ids.union(params.stop_token_ids)
            active.grammar = OutputGrammar(grammar, params.num_sequences, params.min_tokens, ends)
            request.in_lockstep = True  # a mask needs the token before it
        if arrival is not None:
            active.times.arrival = arrival
        self.active[request.request_id] = active
        self.scheduler.add(request)

    def abort(self, request_id: str, error: RequestError = CANCELLED) -> None:
        """Ends a request with ``error``; unknown or ended ids are ignored."""
        active = self.active.pop(request_id, None)
        if active is not None:
            self.scheduler.abort(active.request)
            self._ended.append(active.output({}, error))

    def abort_all(self, error: RequestError) -> None:
        """Ends every request with ``error``."""
        for request_id in list(self.active):
            self.abort(request_id, error)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self.active)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._ended)

    def step(self) -> list[RequestOutput]:
        """Launches a step if there is something to compute, settles one if enough are in flight.

        Raises:
            EngineDeadError: too many steps failed in a row; all requests have ended with INTERNAL,
                and their outputs are what :meth:`take_ended` returns.
        """
        outputs: list[RequestOutput] = []
        try:
            launched = self._launch()
            if self._launched and (len(self._launched) > self._depth or not launched):
                outputs = self._settle(self._executor.collect(self._launched.popleft()))
                self._failed_steps = 0
                self.num_moves += 1
        except Exception:  # whatever the device throws must not take other requests with it
            logger.exception("a step failed")
            self._recover()
        return self.take_ended() + outputs

    def check_idle(self) -> list[str]:
        """What is wrong with the blocks' accounts, which are exact when there is nothing to do."""
        problems = self.scheduler.check_integrity()
        if self.scheduler.pool.num_held:
            problems.append(f"{self.scheduler.pool.num_held} blocks are held by nobody")
        return problems

    def take_ended(self) -> list[RequestOutput]:
        """Outputs of requests that ended outside a step's results."""
        ended, self._ended = self._ended, []
        return ended

    def _launch(self) -> bool:
        output = self.scheduler.schedule()
        if output is None:
            return False
        if output.new_rows:
            now = time.monotonic()
            for seq in self.scheduler.running:
                times = self.active[seq.request.request_id].times
                times.first_scheduled = times.first_scheduled or now
        self._launched.append(self._executor.launch(output, self._token_mask()))
        num_single = sum(row.num_tokens == 1 for row in output.scheduled_rows)
        num_several = len(output.scheduled_rows) - num_single
        self.recent_steps.append((output.step, num_single, num_several, output.num_tokens))
        self.num_moves += 1
        return True

    def _token_mask(self) -> TokenMask | None:
        """What grammars allow the rows that sample in the step just scheduled."""
        masked = [
            (line, seq, grammar)
            for line, seq in enumerate(self.scheduler.newest_sampled)
            if seq.request.in_lockstep
            and (grammar := self.active[seq.request.request_id].grammar) is not None
        ]
        if not masked:
            return None
        from trident_llm.model.sampling.mask import TokenMask

        bits = allocate_bitmask(len(masked), masked[0][2].vocab_size)
        for place, (_, seq, grammar) in enumerate(masked):
            refusal = grammar.fill(seq, bits, place)
            if refusal is not None:  # the step goes on without it: its token will be dropped
                error = RequestError(ErrorCode.INVALID_ARG, GRAMMAR_FIELD, refusal)
                self.abort(seq.request.request_id, error)
        return TokenMask(np.asarray([line for line, _, _ in masked]), bits)

    def _settle(self, result: StepResult) -> list[RequestOutput]:
        """Outputs for one step's results."""
        deltas: dict[ActiveRequest, dict[int, SequenceDelta]] = {}
        for update in self.scheduler.update(result):
            seq = update.sequence
            active = self.active.get(seq.request.request_id)
            if active is None:
                continue  # another of its sequences has just failed
            if seq.finish_reason is FinishReason.ERROR:
                forbidden = seq.stop_reason == NOTHING_ALLOWED
                self.abort(seq.request.request_id, NOTHING_TO_SAMPLE if forbidden else NOT_FINITE)
                deltas.pop(active, None)
                continue
            if active.grammar is not None:
                refusal = active.grammar.accept(seq, update.token_ids)
                if refusal is not None:
                    logger.error("a sampled token was refused: %s", refusal)
                    self.abort(seq.request.request_id, OUTSIDE_GRAMMAR)
                    deltas.pop(active, None)
                    continue
                if active.grammar.is_over(seq):
                    self.scheduler.finish(seq, FinishReason.STOP, active.grammar.stop_reason)
            delta, stop = active.process(update)
            if stop is not None:
                self.scheduler.finish(seq, FinishReason.STOP, stop)
            deltas.setdefault(active, {})[seq.index] = delta
        outputs = []
        for active, changed in deltas.items():
            if active.request.request_id not in self.active:
                continue
            output = active.progress(changed)
            if output is not None:
                outputs.append(output)
            if active.request.finished:
                del self.active[active.request.request_id]
        return outputs

    def _recover(self) -> None:
        """After a failed step: its requests end with INTERNAL, the others go on."""
        self._launched.clear()
        self.num_moves += 1
        for request in self.scheduler.fail_in_flight():
            self.abort(request.request_id, INTERNAL_STEP)
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            self.abort_all(INTERNAL_STEP)
            raise EngineDeadError(f"{self._failed_steps} steps failed in a row")
