"""The Triton side of the engine: what a ``model.py`` in a model repository names.

``execute()`` copies inputs and returns at once; all else happens on threads of our own: intake,
engine, output. Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from trident_llm.core.config import EngineConfig, parse_engine_config
from trident_llm.core.errors import ConfigError, ErrorCode, RequestError
from trident_llm.core.request import Request
from trident_llm.core.sampling_params import SamplingParams, defaults_from_generation_config
from trident_llm.engine.engine import Engine
from trident_llm.engine.loop import LEAVING, EngineLoop
from trident_llm.serving.intake import Intake, ModelFacts
from trident_llm.serving.progress import Progress
from trident_llm.serving.protocol import INPUTS, OUTPUTS, RawRequest
from trident_llm.serving.responder import RequestHandle, Responder
from trident_llm.serving.watch import ServerWatch, parent_endpoint
from trident_llm.text.chat import ChatTemplate
from trident_llm.text.messages import ChatTemplateError
from trident_llm.text.tokenizer import Tokenizer, TokenizerError

logger = logging.getLogger("trident")

# Threads hand the interpreter over sooner than by default (5 ms), so that sends are not held up.
SWITCH_INTERVAL_SECONDS = 0.0005
ADMISSION_SLICE_SECONDS = 0.1


class TritonPythonModel:
    """Called by the Python backend; one object per model instance, in a process of its own."""

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
        _choose_device(args)
        self._progress = Progress()
        try:
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
        self._config, warnings = _read_settings(args)
        for warning in warnings:
            self._progress.warn(warning)
        folder = Path(self._config.model)
        self._progress.begin("tokenizer")
        tokenizer = Tokenizer.from_folder(self._config.tokenizer or folder)
        chat_template = ChatTemplate.from_folder(self._config.tokenizer or folder)
        self._loop = EngineLoop(
            lambda: self._load_engine(tokenizer), lambda outputs: self._responder.push(outputs)
        )
        self._leaving = threading.Event()
        self._drain = threading.Thread(target=self._drain_requests, name="trident-drain")
        self._watch = ServerWatch(args["model_name"], args["model_version"], parent_endpoint())
        self._responder = Responder(
            self._loop.abort,
            self._watch,
            self._drain.start,
        )
        self._loop.start()
        self._loop.wait_ready()
        self._facts = ModelFacts(
            tokenizer=tokenizer,
            chat_template=chat_template,
            max_model_len=self._engine.config.max_model_len,
            max_num_seqs=self._engine.config.max_num_seqs,
            max_logprobs=self._config.max_logprobs,
            vocab_size=self._vocab_size,
            defaults=self._defaults,
        )
        self._intake = Intake(
            self._facts, self._loop, self._responder, stats=self._stats, seed=self._config.seed
        )
        self._ids = itertools.count()
        self._intake.start()
        self._responder.start()
        self._watch.start()
        self._progress.end()

    def _load_engine(self, tokenizer: Tokenizer) -> Engine:
        """Runs on the engine's thread: imports torch, loads, warms up."""
        self._progress.begin("torch")
        from trident_llm.model.executor import Executor

        executor = Executor.load(
            self._config,
            vocab_size=tokenizer.vocab_size,
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
            handle = RequestHandle(str(next(self._ids)), request.get_response_sender())
            self._responder.register(handle)
            try:
                raw = _copy_inputs(request)
                error = self._admit(handle)
            except Exception:
                logger.exception("a request could not be read")
                error = RequestError(ErrorCode.INTERNAL, "request", "could not be read")
            if error is None:
                self._intake.put(handle, raw)
            else:
                self._responder.answer(handle, error)

    def _admit(self, handle: RequestHandle) -> RequestError | None:
        """Why a request may not come in, if it may not; waits for room when so configured."""
        limit = self._engine.config.max_waiting
        while not self._leaving.is_set():
            if self._num_waiting() < limit:
                return None
            if self._config.admission == "reject":
                return RequestError(
                    ErrorCode.UNAVAILABLE,
                    "queue",
                    f"is full: {limit} requests wait already; try again later",
                )
            if handle.cancelled:
                return RequestError(ErrorCode.CANCELLED, "request", "cancelled by the client")
            self._leaving.wait(ADMISSION_SLICE_SECONDS)
        return LEAVING

    def _num_waiting(self) -> int:
        return (
            self._intake.num_waiting + self._loop.num_queued + len(self._engine.scheduler.waiting)
        )

    def _drain_requests(self) -> None:
        """The server leaves: stops admission, lets requests finish for a while, ends the rest."""
        self._leaving.set()
        if not self._responder.wait_idle(self._config.drain_seconds):
            self._loop.call(lambda engine: engine.abort_all(LEAVING))
            self._responder.wait_idle(5.0)

    def finalize(self) -> None:
        """Called after the last final flag: joins the threads."""
        self._leaving.set()
        self._watch.stop()
        if self._drain.ident is not None:
            self._drain.join()
        self._intake.stop()
        self._loop.stop()
        self._responder.stop()

    def is_ready(self) -> bool:
        """Whether the engine computes; asked by servers that know this hook."""
        return not (self._loop.dead or self._responder.broken or self._leaving.is_set())

    def _stats(self) -> dict[str, Any]:
        def snapshot(engine: Engine) -> dict[str, Any]:
            scheduler, pool = engine.scheduler, engine.scheduler.pool
            return {
                "num_requests": engine.num_requests,
                "num_running_seqs": len(scheduler.running),
                "num_waiting_seqs": len(scheduler.waiting),
                "num_blocks": len(pool.blocks) - 1,
                "num_held_blocks": pool.num_held,
                "num_free_blocks": pool.num_free,
                "num_cached_blocks": pool.num_cached,
                "block_size": pool.block_size,
                "max_model_len": scheduler.config.max_model_len,
                "max_num_seqs": scheduler.config.max_num_seqs,
                **vars(scheduler.stats),
                "integrity_failures": self._loop.integrity_failures,
            }

        stats: dict[str, Any] = self._loop.call(snapshot)
        return stats


def _configure_logging() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("trident %(levelname)s: %(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _choose_device(args: dict[str, str]) -> None:
    """An instance of KIND_GPU computes on its own device; torch is not imported yet."""
    if args.get("model_instance_kind") == "GPU":
        device = args.get("model_instance_device_id", "0")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible:
            device = visible.split(",")[int(device)]
        os.environ["CUDA_VISIBLE_DEVICES"] = device


def _read_settings(args: dict[str, str]) -> tuple[EngineConfig, list[str]]:
    """The engine's settings from ``model.json`` in the version folder."""
    folder = Path(args["model_repository"]) / args["model_version"]
    file = folder / "model.json"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{file} is missing; it must hold the engine's settings, at least "
            '{"model": "/path/to/model/folder"}'
        ) from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(settings, dict) or not settings.get("model"):
        raise ConfigError(f'{file} must be a JSON object with "model": a model folder')
    config, warnings = parse_engine_config(settings)
    if not Path(config.model).is_absolute():
        settings = {**settings, "model": str(folder / config.model)}
        config, warnings = parse_engine_config(settings)
    return config, warnings


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
    return RawRequest(tensors, "" if parameters in ("", "{}", "null") else parameters)


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
