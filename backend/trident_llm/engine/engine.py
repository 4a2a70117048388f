"""The continuous-batching engine: one step schedules, runs and settles all running sequences.

Single-threaded: every method is called from the thread that owns the engine (see
:mod:`trident_llm.engine.loop`). A request that was added ends exactly once, in one
:class:`RequestOutput` whose ``finished`` is true.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any, Protocol

from trident_llm.core.config import SchedulerConfig
from trident_llm.core.errors import ErrorCode, RequestError
from trident_llm.core.messages import SchedulerOutput, StepResult
from trident_llm.core.request import FinishReason, Request
from trident_llm.core.scheduler import NOTHING_ALLOWED, Scheduler
from trident_llm.engine.output import ActiveRequest, RequestOutput, SequenceDelta
from trident_llm.text.tokenizer import Tokenizer

logger = logging.getLogger("trident")

# Steps that may fail in a row before the engine gives up: one bad step can be a bad input of its own,
# several mean that the device or the model is broken.
MAX_FAILED_STEPS = 3

INTERNAL_STEP = RequestError(
    ErrorCode.INTERNAL, "engine", "a step failed while computing this request; send it again"
)
NOT_FINITE = RequestError(
    ErrorCode.INTERNAL, "engine", "the model's output for this request was not finite"
)
NOTHING_TO_SAMPLE = RequestError(
    ErrorCode.INVALID_ARG,
    "sampling_parameters",
    "left no token to choose: allowed_token_ids, bad_words and min_tokens together forbid all; allow "
    "more",
)
CANCELLED = RequestError(ErrorCode.CANCELLED, "request", "cancelled by the client")


class EngineDeadError(RuntimeError):
    """Too many steps failed in a row: the engine computes nothing any more."""


class StepExecutor(Protocol):
    """What the engine needs of :class:`trident_llm.model.executor.Executor`."""

    def launch(self, output: SchedulerOutput) -> Any:
        """Starts a step."""

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
        self._active: dict[str, ActiveRequest] = {}
        self._ended: list[RequestOutput] = []  # outputs made outside a step's results
        self._failed_steps = 0

    def add(self, request: Request, arrival: float | None = None) -> None:
        """Takes a checked request in; ``arrival`` is its ``time.monotonic()``, now if absent."""
        assert request.request_id not in self._active, "request ids are unique"
        active = ActiveRequest(request, self._tokenizer)
        if arrival is not None:
            active.times.arrival = arrival
        self._active[request.request_id] = active
        self.scheduler.add(request)

    def abort(self, request_id: str, error: RequestError = CANCELLED) -> None:
        """Ends a request with ``error``; unknown or ended ids are ignored."""
        active = self._active.pop(request_id, None)
        if active is not None:
            self.scheduler.abort(active.request)
            self._ended.append(active.output({}, error))

    def abort_all(self, error: RequestError) -> None:
        """Ends every request with ``error``."""
        for request_id in list(self._active):
            self.abort(request_id, error)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._active)

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
        except Exception:  # whatever the device throws must not take other requests with it
            logger.exception("a step failed")
            self._recover()
        return self.take_ended() + outputs

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
                times = self._active[seq.request.request_id].times
                times.first_scheduled = times.first_scheduled or now
        self._launched.append(self._executor.launch(output))
        return True

    def _settle(self, result: StepResult) -> list[RequestOutput]:
        """Outputs for one step's results."""
        deltas: dict[ActiveRequest, dict[int, SequenceDelta]] = {}
        for update in self.scheduler.update(result):
            seq = update.sequence
            active = self._active[seq.request.request_id]
            if seq.finish_reason is FinishReason.ERROR:
                forbidden = seq.stop_reason == NOTHING_ALLOWED
                self.abort(seq.request.request_id, NOTHING_TO_SAMPLE if forbidden else NOT_FINITE)
                deltas.pop(active, None)
                continue
            delta, stop = active.process(update)
            if stop is not None:
                self.scheduler.finish(seq, FinishReason.STOP, stop)
            deltas.setdefault(active, {})[seq.index] = delta
        outputs = []
        for active, changed in deltas.items():
            if active.request.request_id not in self._active:
                continue
            output = active.progress(changed)
            if output is not None:
                outputs.append(output)
            if active.request.finished:
                del self._active[active.request.request_id]
        return outputs

    def _recover(self) -> None:
        """After a failed step: its requests end with INTERNAL, the others go on."""
        self._launched.clear()
        for request in self.scheduler.fail_in_flight():
            self.abort(request.request_id, INTERNAL_STEP)
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            self.abort_all(INTERNAL_STEP)
            raise EngineDeadError(f"{self._failed_steps} steps failed in a row")
