"""The Triton side of the engine: what a ``model.py`` in a model repository names.

``execute()`` copies inputs and returns at once; all else happens on threads of our own: intake,
engine, output. Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from trident_llm.core.errors import ConfigError, ErrorCode, RequestError
from trident_llm.core.request import Request
from trident_llm.core.sampling_params import SamplingParams, defaults_from_generation_config
from trident_llm.engine.engine import Engine
from trident_llm.engine.loop import LEAVING, EngineLoop
from trident_llm.engine.output import RequestOutput
from trident_llm.engine.snapshot import counts, detail
from trident_llm.serving.admission import Admission
from trident_llm.serving.intake import Intake, ModelFacts
from trident_llm.serving.metrics import EngineState, Metrics, create_metrics
from trident_llm.serving.progress import Progress
from trident_llm.serving.protocol import INPUTS, OUTPUTS, RawRequest, request_timeout
from trident_llm.serving.responder import RequestHandle, Responder
from trident_llm.serving.settings import (
    choose_device,
    load_texts,
    read_settings,
    reports_metrics,
)
from trident_llm.serving.watch import ServerWatch, parent_endpoint
from trident_llm.serving.watchdog import Watchdog
from trident_llm.text.grammar.backend import Vocabulary
from trident_llm.text.grammar.compiler import GrammarCompiler
from trident_llm.text.messages import ChatTemplateError
from trident_llm.text.tokenizer import Tokenizer, TokenizerError

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


class TritonPythonModel:
    """Called by the Python backend; one object per model instance, in a process of its own.

    ``instance_group { count: 2 }`` therefore means two engines, each with its own weights, KV pool,
    prefix cache and queue; Triton hands each request to one of them. On several GPUs that is a replica
    per GPU: ``instance_group { count: 1 kind: KIND_GPU gpus: [0, 1] }``, where each instance sees the
    one device that Triton names. Instances that share a device must be told to share its memory
    (``gpu_memory_utilization``, ``kv_cache_memory_bytes``) and cores (``num_threads``). Metrics carry
    the instance's name in the label ``engine``; control operations are answered by one instance for
    itself.
    """

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Fills in the contract, for a config.pbtxt that leaves tensors out."""
        for name, spec in INPUTS.items():
            auto_complete_model_config.add_input(
                {"name": name, "data_type": spec.data_type, "dims": spec.dims, "optional": True}
            )
        for name, spec in OUTPUTS.items():
            auto_complete_model_config.add_output(
                {"name": name, "data_type": spec.data_type, "dims": spec.dims}
            )
        auto_complete_model_config.set_max_batch_size(0)
        auto_complete_model_config.set_model_transaction_policy({"decoupled": True})
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the model and returns once it has answered a warm-up request.

        Raises:
            TritonModelException: with one sentence that says what to change.
        """
        _configure_logging()
        sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
        self._progress = Progress()
        try:
            choose_device(args)
            self._load(args)
        except (ConfigError, TokenizerError, ChatTemplateError) as error:
            self._progress.error(str(error))
            raise pb_utils.TritonModelException(str(error)) from None
        except MemoryError:
            text = "the machine has too little memory for the model and its KV pool"
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
                "sends one response per step"
            )
        version_folder = Path(args["model_repository"]) / args["model_version"]
        self._config, warnings = read_settings(version_folder, self._progress)
        for warning in warnings:
            self._progress.warn(warning)
        self._progress.begin("tokenizer")
        tokenizer, chat_template = load_texts(self._config)
        self._loop = EngineLoop(
            lambda: self._load_engine(tokenizer), self._take_outputs, self._engine_died
        )
        self._loop.start()
        self._loop.wait_ready()
        self._leaving = threading.Event()
        self._drain = threading.Thread(target=self._drain_requests, name="trident-drain")
        self._metrics = self._create_metrics(args) if reports_metrics(model_config) else None
        self._watch = ServerWatch(args["model_name"], args["model_version"], parent_endpoint())
        self._responder = Responder(
            self._loop.abort,
            self._watch,
            self._drain.start,
            self._metrics,
            lambda: self._tell_of_fault("the end of a request could not be told to the server"),
        )
        self._watchdog = Watchdog(self._loop, self._config.watchdog_seconds, self._engine_stuck)
        limits = self._engine.config
        self._admission = Admission(
            self._config.admission, limits.max_waiting, self._num_waiting, self._leaving
        )
        facts = ModelFacts(
            tokenizer=tokenizer,
            chat_template=chat_template,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_logprobs=self._config.max_logprobs,
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            vocab_size=self._vocab_size,
            defaults=self._defaults,
        )
        self._grammars = GrammarCompiler(
            Vocabulary.from_tokenizer(
                tokenizer, vocab_size=self._vocab_size, stop_ids=sorted(limits.eos_token_ids)
            )
        )
        self._intake = Intake(
            facts,
            self._loop,
            self._responder,
            stats=self._stats,
            grammars=self._grammars,
            seed=self._config.seed,
        )
        self._ids = itertools.count()
        self._intake.start()
        self._responder.start()
        self._watch.start()
        self._watchdog.start()
        self._progress.end()

    def _create_metrics(self, args: dict[str, str]) -> Metrics | None:
        limits = self._engine.config
        return create_metrics(
            {
                "model": args["model_name"],
                "version": args["model_version"],
                "model_name": args["model_name"],
                "engine": args["model_instance_name"],
            },
            self._state,
            max_model_len=limits.max_model_len,
            num_blocks=limits.num_blocks - 1,
            block_size=limits.block_size,
        )

    def _load_engine(self, tokenizer: Tokenizer) -> Engine:
        """Runs on the engine's thread: imports torch, loads, warms up."""
        self._progress.begin("torch")
        from trident_llm.model.executor import Executor

        executor = Executor.load(
            self._config,
            vocab_size=tokenizer.vocab_size,
            eos_token_id=tokenizer.eos_token_id,
            phase=self._progress.begin,
            progress=self._progress.count,
        )
        self._vocab_size = min(tokenizer.vocab_size, executor.model.vocab_size)
        self._defaults = SamplingParams()
        if self._config.generation_config == "auto":
            self._defaults = defaults_from_generation_config(executor.model.generation_defaults)
        engine = Engine(
            executor,
            executor.scheduler_config(self._config),
            tokenizer,
            launch_depth=executor.limits.launch_depth,
        )
        self._engine = engine
        self._progress.settings(executor.limits.describe() + _describe_defaults(self._defaults))
        self._progress.begin("warm-up")
        _warm_up(engine)
        return engine

    def execute(self, requests: list[Any]) -> None:
        """Takes requests in; their responses come from the output thread."""
        for request in requests:
            handle = RequestHandle(
                str(next(self._ids)), request.get_response_sender(), request.request_id()
            )
            self._responder.register(handle)
            try:
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
        error = self._admission.refusal(handle)
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

    def _num_waiting(self) -> int:
        return (
            self._intake.num_waiting + self._loop.num_queued + len(self._engine.scheduler.waiting)
        )

    def _drain_requests(self) -> None:
        """The server leaves: stops admission, lets requests finish for a while, ends the rest."""
        self._leaving.set()
        if not self._responder.wait_idle(self._config.drain_seconds):
            self._grammars.close()
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
        self._grammars.close()
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

    def _state(self) -> EngineState:
        """Read from another thread than the engine's: each number is right, if not all at once."""
        scheduler = self._engine.scheduler
        stats = scheduler.stats
        return EngineState(
            num_running=len(scheduler.running),
            num_waiting=self._num_waiting() + self._admission.num_blocked,
            num_held_blocks=scheduler.pool.num_held,
            num_preemptions=stats.num_preemptions,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            healthy=self._healthy,
        )

    def _stats(self, detailed: bool) -> dict[str, Any]:
        def read(engine: Engine) -> dict[str, Any]:
            return {**counts(engine), **(detail(engine) if detailed else {})}

        stats: dict[str, Any] = self._loop.call(read)
        return {
            **stats,
            "integrity_failures": self._loop.integrity_failures,
            # Requests without their final flag; this one is among them.
            "num_open_requests": self._responder.num_active,
        }


def _configure_logging() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("trident %(levelname)s: %(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _describe_defaults(defaults: SamplingParams) -> str:
    """The sampling defaults that the model brings, for the log; empty if it brings none."""
    neutral = SamplingParams()
    return "".join(
        f" default_{entry.name}={getattr(defaults, entry.name)}"
        for entry in fields(defaults)
        if getattr(defaults, entry.name) != getattr(neutral, entry.name)
    )


def _copy_inputs(request: Any) -> RawRequest:
    """Copies what the request holds: a request that is kept would pin shared memory."""
    tensors = {tensor.name(): tensor.as_numpy().copy() for tensor in request.inputs()}
    parameters = request.parameters()
    parameters = "" if parameters in ("", "{}", "null") else parameters
    return RawRequest(tensors, parameters, request.timeout())


def _warm_up(engine: Engine) -> None:
    """Real requests, so that the first user's pays for no first call: chunks, decode, sampling."""
    limit = engine.config.max_model_len
    for num_tokens, params in (
        (
            min(48, limit - 4),
            SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, seed=0),
        ),
        (1, SamplingParams(top_k=8, top_p=0.9, min_p=0.01, max_tokens=3, ignore_eos=True, seed=0)),
    ):
        if num_tokens < 1:
            continue
        engine.add(Request("warm-up", [0] * num_tokens, params))
        deadline = time.monotonic() + 600
        while engine.num_requests:
            outputs = engine.step()
            failed = next((output.error for output in outputs if output.error), None)
            if failed is not None:
                raise ConfigError(f"the warm-up request failed: {failed}")
            if time.monotonic() > deadline:
                raise ConfigError("the warm-up request did not end in 10 minutes")
    engine.scheduler.pool.reset_prefix_cache()
    engine.scheduler.reset_stats()
    engine.recent_steps.clear()
