"""The engine of a model that embeds: whole texts, several a step, in the order of their arrival.

Single-threaded: every method is called from the thread that owns the engine (see
:mod:`trident_llm.engine.loop`). A request that was added ends exactly once, in one
:class:`RequestOutput` whose ``finished`` is true. A text is computed within one step, so nothing has
to be kept between steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trident_llm.core.embedding import EmbeddingRequest
from trident_llm.core.errors import RequestError
from trident_llm.engine.faults import (
    CANCELLED,
    INTERNAL_STEP,
    MAX_FAILED_STEPS,
    NOT_FINITE,
    EngineDeadError,
)
from trident_llm.engine.output import RequestOutput, RequestTimes

logger = logging.getLogger("trident")

Vector = npt.NDArray[np.float32]


class TextEmbedder(Protocol):
    """What the engine needs of :class:`trident_llm.model.embedder.Embedder`."""

    @property
    def normalizes(self) -> bool: ...

    def embed(self, texts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """The vectors of some texts, [S, D], not normalised."""


@dataclass
class _Waiting:
    request: EmbeddingRequest
    times: RequestTimes

    def output(
        self, *, error: RequestError | None = None, embedding: Vector | None = None
    ) -> RequestOutput:
        self.times.finished = time.monotonic()
        return RequestOutput(
            request_id=self.request.request_id,
            deltas={},
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=0,
            finished=True,
            error=error,
            times=self.times,
            embedding=embedding,
        )


class EmbeddingEngine:
    """A queue of texts and the model that computes them.

    Args:
        max_num_seqs: most texts in a step.
        max_num_batched_tokens: most tokens in a step; a longer text is computed alone.
    """

    def __init__(
        self, embedder: TextEmbedder, *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self._embedder = embedder
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: dict[str, _Waiting] = {}  # in the order of their arrival
        self._ended: list[RequestOutput] = []
        self._failed_steps = 0
        self.num_running = 0  # texts in the step that is being computed
        self.num_moves = 0

    def add(self, request: EmbeddingRequest, arrival: float | None = None) -> None:
        """Takes a checked request in; ``arrival`` is its ``time.monotonic()``, now if absent."""
        assert request.request_id not in self._waiting, "request ids are unique"
        times = RequestTimes(arrival=time.monotonic() if arrival is None else arrival)
        self._waiting[request.request_id] = _Waiting(request, times)

    def abort(self, request_id: str, error: RequestError = CANCELLED) -> None:
        """Ends a request with ``error``; unknown or ended ids are ignored."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._ended.append(waiting.output(error=error))

    def abort_all(self, error: RequestError) -> None:
        """Ends every request with ``error``."""
        for request_id in list(self._waiting):
            self.abort(request_id, error)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._waiting) + self.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that no step has taken up yet."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._ended)

    def check_idle(self) -> list[str]:
        """Nothing is held between steps that could be left over."""
        return []

    def take_ended(self) -> list[RequestOutput]:
        """Outputs of requests that ended outside a step's results."""
        ended, self._ended = self._ended, []
        return ended

    def step(self) -> list[RequestOutput]:
        """Computes the requests that have waited longest, as many as fit into one step.

        Raises:
            EngineDeadError: too many steps failed in a row; all requests have ended with INTERNAL,
                and their outputs are what :meth:`take_ended` returns.
        """
        batch = self._next_batch()
        if not batch:
            return self.take_ended()
        self.num_running = len(batch)
        self.num_moves += 1
        try:
            vectors = self._embedder.embed([each.request.prompt_token_ids for each in batch])
            outputs = [self._settle(each, vector) for each, vector in zip(batch, vectors)]
            self._failed_steps = 0
        except Exception:  # whatever the device throws must not take other requests with it
            logger.exception("a step failed")
            self._ended += [each.output(error=INTERNAL_STEP) for each in batch]
            outputs = []
            self._failed_steps += 1
        self.num_running = 0
        self.num_moves += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            self.abort_all(INTERNAL_STEP)
            raise EngineDeadError(f"{self._failed_steps} steps failed in a row")
        return self.take_ended() + outputs

    def _next_batch(self) -> list[_Waiting]:
        """Takes the first requests off the queue: at least one, if there is one."""
        now, room = time.monotonic(), self._max_num_batched_tokens
        batch: list[_Waiting] = []
        for each in self._waiting.values():
            room -= len(each.request.prompt_token_ids)
            if batch and (room < 0 or len(batch) == self._max_num_seqs):
                break
            each.times.first_scheduled = now
            batch.append(each)
        for each in batch:
            del self._waiting[each.request.request_id]
        return batch

    def _settle(self, each: _Waiting, vector: Vector) -> RequestOutput:
        params = each.request.params
        if not np.isfinite(vector).all():
            return each.output(error=NOT_FINITE)
        normalize = self._embedder.normalizes if params.normalize is None else params.normalize
        vector = vector[: params.dimensions].copy()
        if normalize:
            vector /= max(float(np.linalg.norm(vector)), 1e-12)
        return each.output(embedding=vector)
