"""What every model of ours is to Triton, whatever it computes: its threads, its life, its faults.

``execute()`` copies inputs and returns at once; all else happens on threads of our own: intake,
engine, output. Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import triton_python_backend_utils as pb_utils

from trident_llm.core.config import EngineConfig
from trident_llm.core.embedding import EmbeddingConfig
from trident_llm.core.errors import ConfigError, ErrorCode, RequestError
from trident_llm.engine.loop import LEAVING, EngineLoop, SteppedEngine
from trident_llm.engine.output import RequestOutput
from trident_llm.serving.admission import Admission
from trident_llm.serving.door import Door
from trident_llm.serving.metrics import EngineState, RequestMetrics, create_metrics
from trident_llm.serving.progress import Progress
from trident_llm.serving.protocol import RawRequest, TensorSpec, request_timeout
from trident_llm.serving.request_log import Caller
from trident_llm.serving.responder import RequestHandle, Responder
from trident_llm.serving.settings import choose_device, reports_metrics
from trident_llm.serving.watch import ServerWatch, parent_endpoint
from trident_llm.serving.watchdog import Watchdog
from trident_llm.text.messages import ChatTemplateError
from trident_llm.text.tokenizer import TokenizerError

logger = logging.getLogger("trident")

# Threads hand the interpreter over sooner than by default (5 ms), so that sends are not held up.
SWITCH_INTERVAL_SECONDS = 0.0005
# How long the engine's thread, if it hangs, may hold up the end of the process.
STUCK_JOIN_SECONDS = 2.0
_STUCK = RequestError(
    ErrorCode.UNAVAILABLE, "engine", "makes no progress; restart the server if that stays so"
)
_GIVEN_UP = RequestError(
    ErrorCode.INTERNAL, "engine", "made no progress for too long; send the request again"
)
_BROKEN = RequestError(
    ErrorCode.UNAVAILABLE, "server", "could not end an earlier request; restart the server"
)
_UNREADABLE = RequestError(ErrorCode.INTERNAL, "request", "could not be read; this is our fault")


E = TypeVar("E", bound=SteppedEngine)


class ServedModel(ABC, Generic[E]):
    """Called by the Python backend; one object per model instance, in a process of its own.

    ``instance_group { count: 2 }`` therefore means two engines, each with its own weights and queue
    (and KV pool and prefix cache, if it generates); Triton hands each request to one of them. On
    several GPUs that is a replica per GPU: ``instance_group { count: 1 kind: KIND_GPU gpus: [0, 1] }``,
    where each instance sees the one device that Triton names. Instances that share a device must be
    told to share its memory (``gpu_memory_utilization``, ``kv_cache_memory_bytes``) and cores
    (``num_threads``). Metrics carry the instance's name in the label ``engine``; control operations
    are answered by one instance for itself.
    """

    inputs: ClassVar[Mapping[str, TensorSpec]]
    outputs: ClassVar[Mapping[str, TensorSpec]]

    _config: EngineConfig | EmbeddingConfig
    _engine: E

    @classmethod
    def auto_complete_config(cls, auto_complete_model_config: Any) -> Any:
        """Fills in the contract, for a config.pbtxt that leaves tensors out."""
        for name, spec in cls.inputs.items():
            auto_complete_model_config.add_input(
                {"name": name, "data_type": spec.data_type, "dims": spec.dims, "optional": True}
            )
        for name, spec in cls.outputs.items():
            auto_complete_model_config.add_output(
                {"name": name, "data_type": spec.data_type, "dims": spec.dims}
            )
        auto_complete_model_config.set_max_batch_size(0)
        auto_complete_model_config.set_model_transaction_policy({"decoupled": True})
        return auto_complete_model_config

    # ---- what a kind of model is ------------------------------------------------------------------

    @abstractmethod
    def _read_settings(self, version_folder: Path) -> list[str]:
        """Sets ``_config`` and whatever texts need; returns warnings."""

    @abstractmethod
    def _load_engine(self) -> E:
        """Runs on the engine's thread: imports torch, loads, warms up; sets ``_engine``."""

    @abstractmethod
    def _make_door(self) -> Door: ...

    @abstractmethod
    def _make_metrics(self, labels: Mapping[str, str]) -> RequestMetrics: ...

    @property
    @abstractmethod
    def _max_waiting(self) -> int: ...

    @property
    @abstractmethod
    def _num_waiting_in_engine(self) -> int: ...

    @property
    def _num_free_places(self) -> int:
        """How many waiting requests the next step will take in, if that can be told."""
        return 0

    @abstractmethod
    def _state(self) -> EngineState:
        """Read from another thread than the engine's: each number is right, if not all at once."""

    @abstractmethod
    def _snapshot(self, engine: E, detailed: bool) -> dict[str, Any]:
        """What the ``stats`` operation tells; runs on the engine's thread."""

    def _stop_helpers(self) -> None:
        """Ends what may hold up the door's threads; may be called twice."""

    # ---- life -------------------------------------------------------------------------------------

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the model and returns once it has answered a warm-up request.

        Raises:
            TritonModelException: with one sentence that says what to change.
        """
        _configure_logging()
        sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
        self._progress = Progress(args["model_name"])
        try:
            choose_device(args)
            self._load(args)
        except (ConfigError, TokenizerError, ChatTemplateError) as error:
            self._progress.error(str(error))
            raise pb_utils.TritonModelException(str(error)) from None
        except MemoryError:
            text = "the machine has too little memory for the model and what it computes with"
            self._progress.error(text)
            raise pb_utils.TritonModelException(text) from None
        except Exception as error:
            self._progress.error(f"loading failed: {type(error).__name__}: {error}")
            raise

    def _load(self, args: dict[str, str]) -> None:
        model_config = json.loads(args["model_config"])
        if not pb_utils.using_decoupled_model_transaction_policy(model_config):
            raise ConfigError(
                "config.pbtxt must hold model_transaction_policy { decoupled: true }: the model "
                "sends its responses when it has them"
            )
        for warning in self._read_settings(Path(args["model_repository"]) / args["model_version"]):
            self._progress.warn(warning)
        self._loop = EngineLoop(self._load_engine, self._take_outputs, self._engine_died)
        self._loop.start()
        self._loop.wait_ready()
        self._leaving = threading.Event()
        self._drain = threading.Thread(target=self._drain_requests, name="trident-drain")
        self._metrics = None
        if reports_metrics(model_config):
            labels = {
                "model": args["model_name"],
                "version": args["model_version"],
                "model_name": args["model_name"],
                "engine": args["model_instance_name"],
            }
            self._metrics = create_metrics(lambda: self._make_metrics(labels))
        self._watch = ServerWatch(args["model_name"], args["model_version"], parent_endpoint())
        self._responder = Responder(
            self._loop.abort,
            self._watch,
            self._drain.start,
            self._metrics,
            lambda: self._tell_of_fault("the end of a request could not be told to the server"),
            log_requests=self._config.log_requests,
        )
        self._watchdog = Watchdog(self._loop, self._config.watchdog_seconds, self._engine_stuck)
        self._admission = Admission(
            self._config.admission, self._max_waiting, self._count_without_place, self._leaving
        )
        self._intake = self._make_door()
        self._ids = itertools.count()
        self._intake.start()
        self._responder.start()
        self._watch.start()
        self._watchdog.start()
        self._progress.end()

    def execute(self, requests: list[Any]) -> None:
        """Takes requests in; their responses come from the output thread."""
        for request in requests:
            handle = RequestHandle(str(next(self._ids)), request.get_response_sender())
            self._responder.register(handle)
            try:
                handle.caller = Caller.of(request)
                self._take_in(handle, request)
            except RequestError as error:
                self._responder.answer(handle, error)
            except Exception:
                logger.exception("%s could not be read", handle.label)
                self._responder.answer(handle, _UNREADABLE)

    def _take_in(self, handle: RequestHandle, request: Any) -> None:
        if self._watchdog.stuck or self._responder.broken:
            raise _STUCK if self._watchdog.stuck else _BROKEN
        raw = _copy_inputs(request)
        timeout = request_timeout(raw)
        if timeout is not None:
            handle.deadline = handle.arrival + timeout
        error = self._admission.refusal(handle, control="control" in raw.tensors)
        if error is not None:
            raise error
        self._intake.put(handle, raw)

    def _take_outputs(self, outputs: list[RequestOutput]) -> None:
        """Runs on the engine's thread, after each step that brought something."""
        self._responder.push(outputs)
        self._admission.stepped()

    def _engine_died(self) -> None:
        """Runs on the engine's thread."""
        self._tell_of_fault("the engine has failed and computes nothing")

    def _engine_stuck(self) -> None:
        """Runs on the watchdog's thread."""
        self._responder.end_all(_GIVEN_UP)
        self._tell_of_fault(
            f"the engine has made no progress for {self._config.watchdog_seconds:g} s"
        )

    def _tell_of_fault(self, text: str) -> None:
        """Tells whoever started the server that it must be restarted."""

        def tell() -> None:
            # A restart ends the server at once; before it those who wait get their errors.
            self._responder.wait_idle(5.0)
            self._progress.fault(text)

        threading.Thread(target=tell, name="trident-fault", daemon=True).start()

    def _count_without_place(self) -> int:
        """Requests that wait, less those that the batch has places for; read without a lock."""
        return max(0, self._count_waiting() - max(0, self._num_free_places))

    def _count_waiting(self) -> int:
        return self._intake.num_waiting + self._loop.num_queued + self._num_waiting_in_engine

    def _drain_requests(self) -> None:
        """The server leaves: stops admission, lets requests finish for a while, ends the rest."""
        self._leaving.set()
        if not self._responder.wait_idle(self._config.drain_seconds):
            self._stop_helpers()
            try:
                self._loop.call(lambda engine: engine.abort_all(LEAVING), timeout=2.0)
            except RequestError:  # the engine hangs
                self._responder.end_all(LEAVING)
            self._responder.wait_idle(5.0)

    def finalize(self) -> None:
        """Called after the last final flag: joins the threads."""
        self._leaving.set()
        self._watch.stop()
        if self._drain.ident is not None:
            self._drain.join()
        self._stop_helpers()
        self._intake.stop()
        self._loop.stop(STUCK_JOIN_SECONDS if self._watchdog.stuck else None)
        self._watchdog.stop()
        self._responder.stop()
        if self._metrics is not None:
            self._metrics.drop()

    def is_ready(self) -> bool:
        """Whether the engine computes; asked by servers that know this hook."""
        return self._healthy and not self._leaving.is_set()

    @property
    def _healthy(self) -> bool:
        return not (self._loop.dead or self._responder.broken or self._watchdog.stuck)

    def _stats(self, detailed: bool) -> dict[str, Any]:
        stats: dict[str, Any] = self._loop.call(lambda engine: self._snapshot(engine, detailed))
        # Requests so far, and those without their final flag; this one is among both.
        return {
            **stats,
            "integrity_failures": self._loop.integrity_failures,
            "num_accepted_requests": self._responder.num_accepted,
            "num_open_requests": self._responder.num_active,
        }


def _configure_logging() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("trident %(levelname)s: %(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _copy_inputs(request: Any) -> RawRequest:
    """Copies what the request holds: a request that is kept would pin shared memory."""
    tensors = {tensor.name(): tensor.as_numpy().copy() for tensor in request.inputs()}
    parameters = request.parameters()
    parameters = "" if parameters in ("", "{}", "null") else parameters
    return RawRequest(tensors, parameters, request.timeout())
