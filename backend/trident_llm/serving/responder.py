"""The output thread: sends every response and asks which requests were cancelled.

It alone talks to Triton about a request once that was accepted, so that no poll can follow a final
flag. Every registered request gets exactly one final flag, on the response that ends it. When sending
lags, deltas of one request that nobody has sent yet are merged in place, so nothing queues up.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from trident_llm.core.errors import ErrorCode, RequestError
from trident_llm.engine.output import RequestOutput
from trident_llm.serving.protocol import ResponseBuilder, error_text
from trident_llm.serving.watch import ServerWatch

logger = logging.getLogger("trident")

Tensors = dict[str, npt.NDArray[Any]]

TICK_SECONDS = 0.05
# At most 500 polls a second, each a round trip to the server; most for requests without a token yet,
# which nothing else would notice.
POLLS_PER_TICK = 25
LATE_POLLS_PER_TICK = 5


@dataclass(eq=False)
class RequestHandle:
    """A request that Triton waits on. The sender is dropped with the final flag."""

    request_id: str
    sender: Any
    arrival: float = field(default_factory=time.monotonic)
    builder: ResponseBuilder | None = None  # set once the request is parsed
    stream: bool = False
    stream_interval: int = 1
    cancelled: bool = False
    has_token: bool = False
    last_poll: float = 0.0


class Responder:
    """Owns all live :class:`RequestHandle` objects.

    Args:
        abort: asks the engine to end a request that its client has cancelled; must not block.
        watch: asked while requests are in flight whether the server leaves.
        leave: called once when it does; must not block.
    """

    def __init__(
        self, abort: Callable[[str], None], watch: ServerWatch, leave: Callable[[], None]
    ) -> None:
        self._abort = abort
        self._watch = watch
        self._leave = leave
        self._leaving = False
        self._changed = threading.Condition()
        self._active: dict[str, RequestHandle] = {}
        self._mail: dict[str, RequestOutput] = {}  # not sent yet, by request
        self._due: dict[str, None] = {}  # requests whose mail may be sent, in order
        self._answers: list[tuple[RequestHandle, Tensors | RequestError]] = []
        self._stopping = False
        self.broken = False  # a final flag could not be sent: its request pins the model
        self._thread = threading.Thread(target=self._run, name="trident-output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def register(self, handle: RequestHandle) -> None:
        """From here on the handle will get its final flag."""
        with self._changed:
            self._active[handle.request_id] = handle

    def push(self, outputs: list[RequestOutput]) -> None:
        """Outputs of one step; called by the engine's thread, never blocks on a send."""
        with self._changed:
            for output in outputs:
                handle = self._active.get(output.request_id)
                if handle is None:
                    continue
                waiting = self._mail.get(output.request_id)
                if waiting is None:
                    waiting = self._mail[output.request_id] = output
                else:
                    waiting.merge(output)
                if self._is_due(handle, waiting):
                    self._due[output.request_id] = None
            if self._due:
                self._changed.notify()

    def _is_due(self, handle: RequestHandle, mail: RequestOutput) -> bool:
        if mail.finished:
            return True
        most = max((len(delta.token_ids) for delta in mail.deltas.values()), default=0)
        return handle.stream and most >= handle.stream_interval

    def answer(self, handle: RequestHandle, answer: Tensors | RequestError) -> None:
        """Ends a request that never reached the engine: with tensors or an error."""
        with self._changed:
            self._answers.append((handle, answer))
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
            for handle, output in due:
                self._send_output(handle, output)
            if time.monotonic() >= next_tick:
                self._poll_cancelled()
                self._poll_server()
                next_tick = time.monotonic() + TICK_SECONDS

    def _send_answer(self, handle: RequestHandle, answer: Tensors | RequestError) -> None:
        if isinstance(answer, RequestError):
            self._send(handle, _error_response(answer), final=True)
        else:
            self._send(handle, _response(answer), final=True)

    def _send_output(self, handle: RequestHandle, output: RequestOutput) -> None:
        handle.has_token = True
        if output.error is not None:
            self._send(handle, _error_response(output.error), final=True)
            return
        assert handle.builder is not None, "only parsed requests reach the engine"
        try:
            response = _response(handle.builder.tensors(output))
        except Exception:
            logger.exception("a response could not be built")
            self._abort(handle.request_id)
            failed = RequestError(ErrorCode.INTERNAL, "response", "could not be built")
            self._send(handle, _error_response(failed), final=True)
            return
        self._send(handle, response, final=output.finished)

    def _send(self, handle: RequestHandle, response: Any, *, final: bool) -> None:
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        try:
            handle.sender.send(response, flags=flags)
        except Exception:
            logger.exception("a response could not be sent")
            self._abort(handle.request_id)
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
            logger.exception("a final flag could not be sent; the request pins the model")
            self.broken = True

    def _poll_cancelled(self) -> None:
        now = time.monotonic()
        with self._changed:
            handles = [handle for handle in self._active.values() if not handle.cancelled]
        late = [handle for handle in handles if handle.has_token]
        early = [handle for handle in handles if not handle.has_token]
        num_late = min(len(late), max(LATE_POLLS_PER_TICK, POLLS_PER_TICK - len(early)))
        chosen = heapq.nsmallest(POLLS_PER_TICK - num_late, early, key=lambda h: h.last_poll)
        chosen += heapq.nsmallest(num_late, late, key=lambda h: h.last_poll)
        for handle in chosen:
            handle.last_poll = now
            try:
                handle.cancelled = handle.sender.is_cancelled()
            except Exception:
                logger.exception("asking for a cancel failed")
                continue
            if handle.cancelled:
                self._abort(handle.request_id)

    def _poll_server(self) -> None:
        if self._active and not self._leaving and self._watch.server_leaves():
            logger.info("the server is leaving")
            self._leaving = True
            self._leave()


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
