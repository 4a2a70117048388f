"""The engine's own thread: it loads the model, warms up, and steps while there is work.

All torch work happens on this thread, loading included, since OpenMP makes a team of threads for each
thread that computes. Others talk to it through an inbox and hear from it through one callback.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from trident_llm.core.errors import ErrorCode, RequestError
from trident_llm.engine.faults import CANCELLED, EngineDeadError
from trident_llm.engine.output import RequestOutput

logger = logging.getLogger("trident")

LEAVING = RequestError(ErrorCode.UNAVAILABLE, "server", "is shutting down; send it elsewhere")
DEAD = RequestError(
    ErrorCode.UNAVAILABLE, "engine", "has failed and computes nothing; restart the server"
)
IDLE_CHECK_SECONDS = 1.0


class SteppedEngine(Protocol):
    """What the loop needs of an engine, of whatever kind; all is called on the engine's thread."""

    num_moves: int  # grows whenever it gets on

    @property
    def has_work(self) -> bool: ...

    def step(self) -> list[RequestOutput]:
        """Raises :class:`EngineDeadError` once it gives up; then all requests have ended."""

    def take_ended(self) -> list[RequestOutput]:
        """Outputs of requests that ended outside of a step's results."""

    def abort(self, request_id: str, error: RequestError) -> None:
        """Ends a request; unknown or ended ids are ignored."""

    def abort_all(self, error: RequestError) -> None: ...

    def check_idle(self) -> list[str]:
        """What is wrong with its accounts, now that it has nothing to do."""


E = TypeVar("E", bound=SteppedEngine)


@dataclass(frozen=True)
class _Add(Generic[E]):
    request_id: str
    put: Callable[[E], None]


@dataclass(frozen=True)
class _Abort:
    request_id: str
    error: RequestError


@dataclass(frozen=True)
class _Stop:
    pass


@dataclass(frozen=True)
class _Call(Generic[E]):
    """A read of the engine's state on its own thread."""

    function: Callable[[E], Any]
    answer: queue.SimpleQueue[Any]


class EngineLoop(Generic[E]):
    """Runs one engine in a thread.

    Args:
        load: makes the engine; runs on the engine's thread. What it raises, :meth:`wait_ready` raises.
        on_outputs: called on the engine's thread with each step's outputs; must not block.
        on_dead: called there once the engine has given up, after its last outputs; must not block.
    """

    def __init__(
        self,
        load: Callable[[], E],
        on_outputs: Callable[[list[RequestOutput]], None],
        on_dead: Callable[[], None],
    ) -> None:
        self._load = load
        self._on_outputs = on_outputs
        self._on_dead = on_dead
        self._inbox: queue.SimpleQueue[_Add[E] | _Abort | _Stop | _Call[E]] = queue.SimpleQueue()
        self._num_queued = 0
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="trident-engine", daemon=True)
        self.dead = False
        self._last_progress = time.monotonic()  # when it last got on, or was given something to do
        self._idle = True
        self.integrity_failures = 0

    def start(self) -> None:
        self._thread.start()

    def wait_ready(self) -> None:
        """Returns when the engine takes requests; raises what loading raised."""
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def num_queued(self) -> int:
        """Requests that were added and that the engine has not seen yet."""
        return self._num_queued

    def add(self, request_id: str, put: Callable[[E], None]) -> None:
        """Hands a request over; ``put`` gives it to the engine, on the engine's thread."""
        with self._lock:
            self._num_queued += 1
        self._inbox.put(_Add(request_id, put))

    def abort(self, request_id: str, error: RequestError = CANCELLED) -> None:
        self._inbox.put(_Abort(request_id, error))

    @property
    def seconds_without_progress(self) -> float:
        """For how long there has been work, and no step was launched or settled."""
        if self._idle or not self._thread.is_alive():
            return 0.0
        return time.monotonic() - self._last_progress

    def stop(self, timeout: float | None = None) -> None:
        """Ends what is left with UNAVAILABLE and joins the thread, ``timeout`` seconds at most."""
        self._inbox.put(_Stop())
        self._thread.join(timeout)

    def call(self, function: Callable[[E], Any], timeout: float = 10.0) -> Any:
        """The value of ``function(engine)``, computed between two steps.

        Raises:
            RequestError: UNAVAILABLE, if the engine does not answer in ``timeout`` seconds.
        """
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._inbox.put(_Call(function, answer))
        try:
            return answer.get(timeout=timeout)
        except queue.Empty:
            raise RequestError(ErrorCode.UNAVAILABLE, "engine", "did not answer in time") from None

    def _run(self) -> None:
        try:
            engine = self._load()
        except BaseException as error:  # handed to the thread that waits
            self._failure = error
            self._ready.set()
            return
        self._ready.set()
        while not self._stopping:
            self._take_commands(engine)
            if self._stopping or not engine.has_work:
                continue
            moves = engine.num_moves
            try:
                outputs = engine.step()
            except EngineDeadError:
                logger.error("the engine gives up; new requests are refused")
                self.dead = True
                self._on_outputs(engine.take_ended())
                self._on_dead()
                continue
            if outputs or engine.num_moves > moves:
                self._last_progress = time.monotonic()
            if outputs:
                self._on_outputs(outputs)
        engine.abort_all(LEAVING)
        self._on_outputs(engine.take_ended())

    def _take_commands(self, engine: E) -> None:
        """Handles what is in the inbox; waits for something if there is nothing to compute."""
        try:
            if engine.has_work:
                self._handle(engine, self._inbox.get_nowait())
            else:
                self._handle(engine, self._wait_for_command())
            while True:
                self._handle(engine, self._inbox.get_nowait())
        except queue.Empty:
            if not engine.has_work:
                self._check_idle(engine)

    def _wait_for_command(self) -> _Add[E] | _Abort | _Stop | _Call[E]:
        self._idle = True
        try:
            return self._inbox.get(timeout=IDLE_CHECK_SECONDS)
        finally:
            self._last_progress = time.monotonic()
            self._idle = False

    def _handle(self, engine: E, command: _Add[E] | _Abort | _Stop | _Call[E]) -> None:
        if isinstance(command, _Add):
            command.put(engine)
            if self.dead or self._stopping:
                engine.abort(command.request_id, DEAD if self.dead else LEAVING)
            with self._lock:
                self._num_queued -= 1
        elif isinstance(command, _Abort):
            engine.abort(command.request_id, command.error)
        elif isinstance(command, _Call):
            command.answer.put(command.function(engine))
        else:
            self._stopping = True

    def _check_idle(self, engine: E) -> None:
        """With nothing to do, the accounts must be exact; a fault is reported and never kills."""
        problems = engine.check_idle()
        if problems:
            self.integrity_failures += 1
            logger.error("block accounts are wrong: %s", "; ".join(problems[:5]))
