"""The output thread: sends every response and asks which requests were cancelled.

It alone talks to Triton about a request once that was accepted, so that no poll can follow a final
flag. Every registered request gets exactly one final flag, on the response that ends it. When sending
lags, deltas of one request that nobody has sent yet are merged in place, so nothing queues up; a
stream's response is not merged beyond ``MAX_RESPONSE_BYTES``, but sent in two. What one step brought
is never split, and what is not streamed is one response whatever its size.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from trident_llm.core.errors import ErrorCode, RequestError
from trident_llm.core.sampling_params import SamplingParams
from trident_llm.engine.faults import CANCELLED
from trident_llm.engine.output import RequestOutput
from trident_llm.serving.metrics import RequestMetrics, RequestProgress
from trident_llm.serving.protocol import (
    MAX_RESPONSE_BYTES,
    error_text,
    output_bytes,
)
from trident_llm.serving.request_log import Caller, log_end
from trident_llm.serving.watch import ServerWatch

logger = logging.getLogger("trident")

Tensors = dict[str, npt.NDArray[Any]]

TICK_SECONDS = 0.05
# At most 500 polls a second, each a round trip to the server; most for requests without a token yet,
# which nothing else would notice.
POLLS_PER_TICK = 25
LATE_POLLS_PER_TICK = 5

TIMED_OUT = RequestError(
    ErrorCode.UNAVAILABLE,
    "timeout",
    "has passed before the request was done; allow it more time or ask for fewer tokens",
)
_NOT_BUILT = RequestError(ErrorCode.INTERNAL, "response", "could not be built")


class Builder(Protocol):
    """Makes the responses of one request."""

    def tensors(self, output: RequestOutput) -> Tensors: ...


@dataclass(eq=False)
class RequestHandle:
    """A request that Triton waits on. The sender is dropped with the final flag."""

    request_id: str
    sender: Any
    arrival: float = field(default_factory=time.monotonic)
    deadline: float | None = None  # time.monotonic() seconds
    builder: Builder | None = None  # set, with the next two, once the request is parsed
    params: SamplingParams = field(default_factory=SamplingParams)
    stream: bool = False
    abort_error: RequestError | None = None  # why the request is to end, once that is known
    has_token: bool = False
    progress: RequestProgress = field(default_factory=RequestProgress)
    caller: Caller = field(default_factory=Caller)
    last_poll: float = 0.0

    @property
    def label(self) -> str:
        """The request's name in the log: our number, and its caller's id."""
        shown = f" ({self.caller.request_id})" if self.caller.request_id else ""
        return f"request {self.request_id}{shown}"


@dataclass
class _Mail:
    """Outputs of one request that nobody has sent; all but the last are full."""

    outputs: list[RequestOutput]
    size: int  # of the last one, in bytes, about


class Responder:
    """Owns all live :class:`RequestHandle` objects.

    Args:
        abort: asks the engine to end a request with an error; must not block.
        watch: asked while requests are in flight whether the server leaves.
        leave: called once when it does; must not block.
        metrics: None on a server that keeps none.
        on_broken: called once when a final flag could not be sent; must not block.
        log_requests: whether the end of each request is a line in the log.
    """

    def __init__(
        self,
        abort: Callable[[str, RequestError], None],
        watch: ServerWatch,
        leave: Callable[[], None],
        metrics: RequestMetrics | None = None,
        on_broken: Callable[[], None] = lambda: None,
        log_requests: bool = True,
    ) -> None:
        self._log_requests = log_requests
        self._on_broken = on_broken
        self._abort = abort
        self._watch = watch
        self._leave = leave
        self._metrics = metrics
        self._leaving = False
        self._changed = threading.Condition()
        self._active: dict[str, RequestHandle] = {}
        self._mail: dict[str, _Mail] = {}
        self._due: dict[str, None] = {}  # requests whose mail may be sent, in order
        self._answers: list[tuple[RequestHandle, Tensors | RequestError]] = []
        self._stopping = False
        self.num_accepted = 0  # requests so far
        self.broken = False  # a final flag could not be sent: its request pins the model
        self._thread = threading.Thread(target=self._run, name="trident-output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def register(self, handle: RequestHandle) -> None:
        """From here on the handle will get its final flag."""
        with self._changed:
            self._active[handle.request_id] = handle
            self.num_accepted += 1

    def push(self, outputs: list[RequestOutput]) -> None:
        """Outputs of one step; called by the engine's thread, never blocks on a send."""
        with self._changed:
            for output in outputs:
                handle = self._active.get(output.request_id)
                if handle is None:
                    continue
                mail = self._put(handle, output)
                if self._is_due(handle, mail):
                    self._due[output.request_id] = None
            if self._due:
                self._changed.notify()

    def _put(self, handle: RequestHandle, output: RequestOutput) -> _Mail:
        size = output_bytes(output)
        mail = self._mail.get(handle.request_id)
        if mail is None:
            mail = self._mail[handle.request_id] = _Mail([output], size)
        elif handle.stream and mail.size + size > MAX_RESPONSE_BYTES:
            mail.outputs.append(output)
            mail.size = size
        else:
            mail.outputs[-1].merge(output)
            mail.size += size
        return mail

    def _is_due(self, handle: RequestHandle, mail: _Mail) -> bool:
        newest = mail.outputs[-1]
        if newest.finished or len(mail.outputs) > 1:
            return True
        most = max((len(delta.token_ids) for delta in newest.deltas.values()), default=0)
        return handle.stream and most >= handle.params.stream_interval

    def answer(self, handle: RequestHandle, answer: Tensors | RequestError) -> None:
        """Ends a request that never reached the engine: with tensors or an error."""
        with self._changed:
            self._answers.append((handle, answer))
            self._changed.notify()

    def end_all(self, error: RequestError) -> None:
        """Ends every request with ``error`` without the engine, which may hang."""
        with self._changed:
            for handle in self._active.values():
                handle.abort_error = error
                self._answers.append((handle, error))
                self._abort(handle.request_id, error)
            self._changed.notify()

    @property
    def num_active(self) -> int:
        """Requests that have not got their final flag."""
        return len(self._active)

    def wait_idle(self, timeout: float) -> bool:
        """Whether every request got its final flag within ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._active, timeout)

    def stop(self) -> None:
        """Joins the thread; call once nothing is active."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    # ---- the output thread --------------------------------------------------------------------

    def _run(self) -> None:
        next_tick = time.monotonic() + TICK_SECONDS
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._due or self._answers or self._stopping,
                    max(0.0, next_tick - time.monotonic()),
                )
                due = [(self._active[i], self._mail.pop(i)) for i in self._due]
                self._due.clear()
                answers, self._answers = self._answers, []
                if self._stopping and not due and not answers:
                    return
            for handle, answer in answers:
                self._send_answer(handle, answer)
            for handle, mail in due:
                for output in mail.outputs:
                    self._send_output(handle, output)
            if time.monotonic() >= next_tick:
                self._tick()
                next_tick = time.monotonic() + TICK_SECONDS

    def _send_answer(self, handle: RequestHandle, answer: Tensors | RequestError) -> None:
        if handle.sender is None:
            return  # it was ended while this answer was made
        if isinstance(answer, RequestError):
            self._send_error(handle, answer)
        else:
            self._ends(handle, "control")
            if self._metrics is not None:
                self._metrics.controlled()
            self._send(handle, _response(answer), final=True)

    def _send_error(
        self, handle: RequestHandle, error: RequestError, output: RequestOutput | None = None
    ) -> None:
        self._fails(handle, error.code, output)
        if error.code is ErrorCode.INTERNAL:
            logger.error("%s ended with %s", handle.label, error)
        self._send(handle, _error_response(error), final=True)

    def _send_output(self, handle: RequestHandle, output: RequestOutput) -> None:
        if handle.sender is None:
            return  # a send before this one failed, and with it the request
        if output.error is not None:
            self._send_error(handle, output.error, output)
            return
        assert handle.builder is not None, "only parsed requests reach the engine"
        handle.has_token = True
        try:
            response = _response(handle.builder.tensors(output))
        except Exception:
            logger.exception("%s: a response could not be built", handle.label)
            self._abort(handle.request_id, _NOT_BUILT)
            self._send_error(handle, _NOT_BUILT)
            return
        now = time.monotonic()
        handle.progress.take(output)
        if output.finished:
            self._ends(handle, handle.progress.outcome, output)
        if self._metrics is not None:
            self._metrics.sent(handle.progress, output, now)
            if output.finished:
                self._metrics.finished(handle.progress, output, handle.params, now)
        self._send(handle, response, final=output.finished)

    def _fails(
        self, handle: RequestHandle, code: ErrorCode, output: RequestOutput | None = None
    ) -> None:
        self._ends(handle, code.value, output)
        if self._metrics is not None:
            self._metrics.failed(code)

    def _ends(
        self, handle: RequestHandle, outcome: str, output: RequestOutput | None = None
    ) -> None:
        if self._log_requests:
            log_end(
                handle.caller, handle.request_id, handle.arrival, outcome, time.monotonic(),
                num_tokens=handle.progress.num_tokens, output=output,
            )  # fmt: skip

    def _send(self, handle: RequestHandle, response: Any, *, final: bool) -> None:
        if final:
            self._tell_if_last()
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        try:
            handle.sender.send(response, flags=flags)
        except Exception:
            logger.exception("%s: a response could not be sent", handle.label)
            self._abort(handle.request_id, _NOT_BUILT)
            if not final:
                self._fails(handle, ErrorCode.INTERNAL)
                self._tell_if_last()
            self._send_bare_final(handle)
            final = True
        if final:
            handle.sender = None
            with self._changed:
                self._active.pop(handle.request_id, None)
                self._mail.pop(handle.request_id, None)
                self._due.pop(handle.request_id, None)
                if not self._active:
                    self._changed.notify_all()

    def _send_bare_final(self, handle: RequestHandle) -> None:
        try:
            handle.sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception:
            logger.exception("%s: a final flag could not be sent; it pins the model", handle.label)
            if not self.broken:
                self.broken = True
                self._on_broken()

    # ---- what only may be asked or told while a request is without its final flag ---------------

    def _tick(self) -> None:
        if not self._active:
            return
        self._check_deadlines()
        self._poll_cancelled()
        if not self._leaving and self._watch.server_leaves():
            logger.info("the server is leaving")
            self._leaving = True
            self._leave()
        self._tell(lambda metrics: metrics.push(time.monotonic()))

    def _tell_if_last(self) -> None:
        """Before the last final flag: what the server is not told now it cannot be told after."""
        if len(self._active) == 1:
            self._tell(lambda metrics: metrics.push_idle())

    def _tell(self, push: Callable[[RequestMetrics], None]) -> None:
        if self._metrics is None:
            return
        try:
            push(self._metrics)
        except Exception:
            logger.exception("metrics could not be updated and are given up")
            self._metrics = None

    def _open_handles(self) -> list[RequestHandle]:
        """Handles of requests that nothing has ended yet."""
        with self._changed:
            return [handle for handle in self._active.values() if handle.abort_error is None]

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for handle in self._open_handles():
            if handle.deadline is not None and now >= handle.deadline:
                handle.abort_error = TIMED_OUT
                self._abort(handle.request_id, TIMED_OUT)

    def _poll_cancelled(self) -> None:
        now = time.monotonic()
        handles = self._open_handles()
        late = [handle for handle in handles if handle.has_token]
        early = [handle for handle in handles if not handle.has_token]
        num_late = min(len(late), max(LATE_POLLS_PER_TICK, POLLS_PER_TICK - len(early)))
        chosen = heapq.nsmallest(POLLS_PER_TICK - num_late, early, key=lambda h: h.last_poll)
        chosen += heapq.nsmallest(num_late, late, key=lambda h: h.last_poll)
        for handle in chosen:
            handle.last_poll = now
            try:
                cancelled = handle.sender.is_cancelled()
            except Exception:
                logger.exception("%s: asking for a cancel failed", handle.label)
                continue
            if cancelled:
                handle.abort_error = CANCELLED
                self._abort(handle.request_id, CANCELLED)


def _response(tensors: Tensors) -> Any:
    return pb_utils.InferenceResponse(
        output_tensors=[pb_utils.Tensor(name, np.asarray(array)) for name, array in tensors.items()]
    )


def _error_response(error: RequestError) -> Any:
    # Looked up here, since the stub fills in this module only after the model is imported.
    code = getattr(pb_utils.TritonError, error.code.value)
    return pb_utils.InferenceResponse(
        output_tensors=[], error=pb_utils.TritonError(error_text(error), code)
    )
