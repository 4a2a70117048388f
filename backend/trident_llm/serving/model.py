"""A model that generates text: what a ``model.py`` in a model repository names.

See :mod:`trident_llm.serving.served` for what it shares with models of other kinds. Importing this
module loads neither torch nor transformers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from trident_llm.core.config import EngineConfig
from trident_llm.core.errors import ConfigError
from trident_llm.core.request import Request
from trident_llm.core.sampling_params import SamplingParams, defaults_from_generation_config
from trident_llm.engine.engine import Engine
from trident_llm.engine.snapshot import counts, detail
from trident_llm.serving.intake import Intake, ModelFacts
from trident_llm.serving.metrics import EngineState, Metrics
from trident_llm.serving.protocol import INPUTS, OUTPUTS
from trident_llm.serving.served import ServedModel
from trident_llm.serving.settings import load_texts, read_settings
from trident_llm.text.grammar.backend import Vocabulary
from trident_llm.text.grammar.compiler import GrammarCompiler


class TritonPythonModel(ServedModel[Engine]):
    """Called by the Python backend."""

    inputs = INPUTS
    outputs = OUTPUTS

    _config: EngineConfig

    def _read_settings(self, version_folder: Path) -> list[str]:
        self._config, warnings = read_settings(version_folder, self._progress)
        self._progress.begin("tokenizer")
        self._tokenizer, self._chat_template = load_texts(self._config)
        return warnings

    def _load_engine(self) -> Engine:
        tokenizer = self._tokenizer
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

    def _make_door(self) -> Intake:
        limits = self._engine.config
        facts = ModelFacts(
            tokenizer=self._tokenizer,
            chat_template=self._chat_template,
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
                self._tokenizer,
                vocab_size=self._vocab_size,
                stop_ids=sorted(limits.eos_token_ids),
            )
        )
        return Intake(
            facts,
            self._loop,
            self._responder,
            stats=self._stats,
            grammars=self._grammars,
            seed=self._config.seed,
        )

    def _make_metrics(self, labels: Mapping[str, str]) -> Metrics:
        limits = self._engine.config
        return Metrics(
            labels,
            self._state,
            max_model_len=limits.max_model_len,
            num_blocks=limits.num_blocks - 1,
            block_size=limits.block_size,
        )

    @property
    def _max_waiting(self) -> int:
        return self._engine.config.max_waiting

    @property
    def _num_free_places(self) -> int:
        return self._engine.config.max_num_seqs - len(self._engine.scheduler.running)

    @property
    def _num_waiting_in_engine(self) -> int:
        return len(self._engine.scheduler.waiting)

    def _stop_helpers(self) -> None:
        self._grammars.close()

    def _state(self) -> EngineState:
        scheduler = self._engine.scheduler
        stats = scheduler.stats
        return EngineState(
            num_running=len(scheduler.running),
            num_waiting=self._count_waiting() + self._admission.num_blocked,
            num_held_blocks=scheduler.pool.num_held,
            num_preemptions=stats.num_preemptions,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            healthy=self._healthy,
            recomputed_tokens=stats.recomputed_tokens,
        )

    def _snapshot(self, engine: Engine, detailed: bool) -> dict[str, Any]:
        return {**counts(engine), **(detail(engine) if detailed else {})}


def _describe_defaults(defaults: SamplingParams) -> str:
    """The sampling defaults that the model brings, for the log; empty if it brings none."""
    neutral = SamplingParams()
    return "".join(
        f" default_{entry.name}={getattr(defaults, entry.name)}"
        for entry in fields(defaults)
        if getattr(defaults, entry.name) != getattr(neutral, entry.name)
    )


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
