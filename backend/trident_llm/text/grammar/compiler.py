"""Compiles the grammars of requests: tried in a worker process first, then kept for later ones.

Owns the worker process and the cache. It must not know requests beyond the name of a field, nor
the engine. What a worker made is not sent back: written out, a compiled grammar may take hundreds
of megabytes where it takes four in memory. So the worker finds out whether a grammar compiles
within its limits, and this process compiles it again, now known to be cheap; the compiler runs
without Python's lock, so other threads go on.

Invariant: no grammar is compiled in this process that has not been compiled within the limits in
the worker; equal grammars are compiled once, however many threads ask at once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trident_llm.core.errors import ErrorCode, RequestError, invalid
from trident_llm.core.machine import find_interpreter
from trident_llm.text.grammar.backend import Backend, Vocabulary, is_installed
from trident_llm.text.grammar.matcher import CompiledGrammar
from trident_llm.text.grammar.spec import GrammarSpec
from trident_llm.text.grammar.worker import encode_frame, frame_size

_log = logging.getLogger("trident")

FIELD = "sampling_parameters.structured_outputs"
_MAX_REFUSED = 64  # refused grammars that are remembered


@dataclass(frozen=True)
class GrammarLimits:
    """Bounds of compiling.

    seconds: of processor time for one grammar, in whole seconds. real_seconds: of real time for it,
    more because decoding may have the processors meanwhile.
    memory_bytes: that trying one may take. cache_bytes: of compiled grammars that are kept.
    start_seconds: until a worker is ready. wait_seconds: until a grammar's turn comes.
    token_seconds: of processor time for one token, late in an output of some length.
    """

    seconds: int = 2
    real_seconds: float = 10.0
    memory_bytes: int = 512 * 1024 * 1024
    cache_bytes: int = 256 * 1024 * 1024
    start_seconds: float = 120.0
    wait_seconds: float = 30.0
    token_seconds: float = 0.005


class WorkerError(Exception):
    """A worker that does not start, or ended in the middle of its work."""


class _Worker:
    """One worker process; used by one thread at a time, except for `kill`."""

    def __init__(self, interpreter: Path, vocabulary: Vocabulary, limits: GrammarLimits) -> None:
        """Starts the process and waits until it is ready.

        Raises:
            WorkerError: it does not become ready.
        """
        root = str(Path(__file__).parents[3])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._limits = limits
        try:
            self._process = subprocess.Popen(
                [str(interpreter), "-m", "trident_llm.text.grammar.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={
                    **os.environ,
                    **threads,
                    "PYTHONPATH": os.pathsep.join(paths),
                    "CUDA_VISIBLE_DEVICES": "",  # compiling needs no GPU, and must not hold one
                },
                start_new_session=True,
            )
        except OSError as error:
            raise WorkerError(f"{interpreter} does not run: {error.strerror}") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._input.fileno(), False)
        deadline = time.monotonic() + limits.start_seconds
        hello = {
            "tokens": [token.decode("latin-1") for token in vocabulary.tokens],
            "vocab_size": vocabulary.vocab_size,
            "stop_ids": list(vocabulary.stop_ids),
        }
        try:
            answer = self._ask(hello, deadline)
        except WorkerError:
            self.kill()
            raise
        if not answer.get("ready"):
            self.kill()
            raise WorkerError(str(answer.get("reason")))

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def try_grammar(self, spec: GrammarSpec) -> dict[str, Any]:
        """Return what the worker found; see worker.

        Raises:
            WorkerError: it ended, or did not answer long after it should have.
        """
        request = {
            "kind": spec.kind.value,
            "text": spec.text,
            "max_whitespace": spec.max_whitespace,
            "seconds": self._limits.seconds,
            "real_seconds": self._limits.real_seconds,
            "memory_bytes": self._limits.memory_bytes,
        }
        return self._ask(request, time.monotonic() + self._limits.real_seconds + 5)

    def kill(self) -> None:
        """End the process, with the child in which it tries a grammar, and wait for it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._input.close()
        self._output.close()

    def _ask(self, message: dict[str, Any], deadline: float) -> dict[str, Any]:
        try:
            self._write(encode_frame(message), deadline)
            header = self._read(4, deadline)
            answer: dict[str, Any] = json.loads(self._read(frame_size(header), deadline))
        except (OSError, ValueError) as error:
            raise WorkerError(str(error)) from error
        return answer

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            _wait(self._input.fileno(), select.POLLOUT, deadline)
            view = view[os.write(self._input.fileno(), view[: 1 << 16]) :]

    def _read(self, size: int, deadline: float) -> bytes:
        data = b""
        while len(data) < size:
            _wait(self._output.fileno(), select.POLLIN, deadline)
            part = os.read(self._output.fileno(), size - len(data))
            if not part:
                raise OSError("the process ended")
            data += part
        return data


def _wait(fd: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise OSError("the process does not answer")


class GrammarCompiler:
    """See the module. Every method may be called from any thread, not from the step loop."""

    def __init__(
        self,
        vocabulary: Vocabulary | None,
        *,
        interpreter: Path | None = None,
        limits: GrammarLimits | None = None,
    ) -> None:
        """Cheap: nothing is started before the first `compile`, which then takes seconds.

        vocabulary: None where the tokenizer's tokens have no bytes of their own; such a model's
        requests are refused. interpreter: runs the worker; None: the one
        that runs this process.
        """
        self._vocabulary = vocabulary
        self._interpreter = interpreter
        self._limits = limits or GrammarLimits()
        self._lock = threading.Lock()  # of everything below but the worker's own use
        self._turn = threading.Lock()  # held by the one thread that compiles
        self._worker: _Worker | None = None
        self._backend: Backend | None = None
        self._closed = False
        self._kept: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self._kept_bytes = 0
        self._refused: OrderedDict[GrammarSpec, str] = OrderedDict()
        self._pending: dict[GrammarSpec, Future[CompiledGrammar]] = {}

    @property
    def why_unavailable(self) -> str | None:
        """Why no grammar can be compiled here; None where it can. Does not import the library."""
        if self._vocabulary is None:
            return "is not available with this model: its tokenizer gives tokens no bytes; leave it out"
        if not is_installed():
            return (
                "is not available: the server runs without the package xgrammar; leave it out, or "
                "have xgrammar installed"
            )
        return None

    @property
    def cached_bytes(self) -> int:
        """Memory of the grammars that are kept."""
        return self._kept_bytes

    @property
    def worker_pid(self) -> int | None:
        """The process id of the worker; None while there is none."""
        with self._lock:
            return None if self._worker is None else self._worker.pid

    def is_settled(self, spec: GrammarSpec) -> bool:
        """Whether `compile` would return or raise at once: compiled before, refused, or no hope."""
        if self.why_unavailable is not None:
            return True
        with self._lock:
            return self._closed or spec in self._kept or spec in self._refused

    def compile(self, spec: GrammarSpec, *, field: str = FIELD) -> CompiledGrammar:
        """Return the compiled grammar, from the cache where it is there.

        field: the parameter that errors name.

        Raises:
            RequestError: INVALID_ARG if it cannot be compiled within the limits, UNAVAILABLE while
            closing or overloaded, INTERNAL if the worker fails.
        """
        if (reason := self.why_unavailable) is not None:
            raise invalid(field, reason)
        with self._lock:
            if self._closed:
                raise RequestError(ErrorCode.UNAVAILABLE, "queue", "the server is shutting down")
            if (kept := self._kept.get(spec)) is not None:
                self._kept.move_to_end(spec)
                return kept
            if (reason := self._refused.get(spec)) is not None:
                raise invalid(field, reason)
            pending = self._pending.get(spec)
            mine = pending is None
            if pending is None:
                pending = self._pending[spec] = Future()
        if mine:
            self._settle(spec, pending)
        try:
            return pending.result()
        except RequestError as error:
            where = field if error.code is ErrorCode.INVALID_ARG else error.field
            raise RequestError(error.code, where, error.reason) from None

    def close(self) -> None:
        """Kill the worker and forget everything; grammars in use stay usable."""
        with self._lock:
            self._closed = True
            worker, self._worker = self._worker, None
            self._kept.clear()
            self._kept_bytes = 0
        if worker is not None:
            worker.kill()

    def _settle(self, spec: GrammarSpec, pending: Future[CompiledGrammar]) -> None:
        """Compile for every thread that waits on ``pending``."""
        try:
            if not self._turn.acquire(timeout=self._limits.wait_seconds):
                raise RequestError(
                    ErrorCode.UNAVAILABLE,
                    "queue",
                    "too many grammars wait to be compiled; retry later",
                )
            try:
                grammar = self._compile(spec)
            finally:
                self._turn.release()
        except BaseException as error:
            with self._lock:
                del self._pending[spec]
            pending.set_exception(error)
            return
        with self._lock:
            del self._pending[spec]
            if not self._closed:
                self._keep(grammar)
        pending.set_result(grammar)

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        try:
            worker, backend = self._ready()
            found = worker.try_grammar(spec)
        except WorkerError as error:
            with self._lock:
                failed, self._worker = self._worker, None
                closed = self._closed
            if failed is not None:
                failed.kill()
            if not closed:
                _log.error("the process that compiles grammars failed: %s", error)
            if closed:
                raise RequestError(
                    ErrorCode.UNAVAILABLE, "queue", "the server is shutting down"
                ) from error
            raise RequestError(
                ErrorCode.INTERNAL, FIELD, "the process that compiles grammars failed; retry later"
            ) from error
        reason = self._refusal(found)
        if reason is not None:
            with self._lock:
                self._refused[spec] = reason
                if len(self._refused) > _MAX_REFUSED:
                    self._refused.popitem(last=False)
            raise invalid(FIELD, reason)
        start = time.monotonic()
        compiled = backend.compile(spec)
        num_bytes = found["num_bytes"] + len(spec.text)
        return CompiledGrammar(spec, num_bytes, time.monotonic() - start, backend, compiled)

    def _refusal(self, found: dict[str, Any]) -> str | None:
        if found["ok"]:
            if found["token_seconds"] > self._limits.token_seconds:
                return "takes too long for each token; make it smaller or less ambiguous"
            return None
        reasons = {
            "slow": f"takes more than {self._limits.seconds} s to compile; make it smaller",
            "memory": "takes too much memory to compile; make it smaller",
            "crashed": "cannot be compiled; make it simpler",
        }
        return reasons.get(found["kind"], f"cannot be compiled: {found['reason']}")

    def _ready(self) -> tuple[_Worker, Backend]:
        """Return a live worker and the library; ``_turn`` is held."""
        assert self._vocabulary is not None
        with self._lock:
            worker = self._worker
        if worker is None or not worker.is_alive():
            if worker is not None:
                worker.kill()
            interpreter = self._interpreter or find_interpreter()
            if interpreter is None:
                raise WorkerError("no Python interpreter is found; put one on PATH")
            worker = _Worker(interpreter, self._vocabulary, self._limits)
            with self._lock:
                closed = self._closed
                self._worker = None if closed else worker
            if closed:
                worker.kill()
                raise WorkerError("closed while it started")
        if self._backend is None:
            self._backend = Backend(self._vocabulary)
        return worker, self._backend

    def _keep(self, grammar: CompiledGrammar) -> None:
        """Put a grammar into the cache, and out what was used longest ago; ``_lock`` is held."""
        if grammar.num_bytes > self._limits.cache_bytes:
            return
        self._kept[grammar.spec] = grammar
        self._kept_bytes += grammar.num_bytes
        while self._kept_bytes > self._limits.cache_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.num_bytes
