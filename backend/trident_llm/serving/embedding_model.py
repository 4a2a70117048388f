"""A model that embeds texts: what a ``model.py`` in a model repository names.

See :mod:`trident_llm.serving.served` for what it shares with models of other kinds. Importing this
module loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trident_llm.core.embedding import EmbeddingConfig, EmbeddingRequest, PoolingParams
from trident_llm.core.errors import ConfigError
from trident_llm.engine.embedding import EmbeddingEngine
from trident_llm.serving.embedding_intake import EmbeddingFacts, EmbeddingIntake
from trident_llm.serving.embedding_protocol import INPUTS, OUTPUTS
from trident_llm.serving.metrics import EngineState, RequestMetrics
from trident_llm.serving.served import ServedModel
from trident_llm.serving.settings import load_texts, read_embedding_settings


class TritonPythonModel(ServedModel[EmbeddingEngine]):
    """Called by the Python backend."""

    inputs = INPUTS
    outputs = OUTPUTS

    _config: EmbeddingConfig

    def _read_settings(self, version_folder: Path) -> list[str]:
        self._config, warnings = read_embedding_settings(version_folder, self._progress)
        self._progress.begin("tokenizer")
        self._tokenizer, _ = load_texts(self._config)
        return warnings

    def _load_engine(self) -> EmbeddingEngine:
        self._progress.begin("torch")
        from trident_llm.model.embedder import Embedder

        embedder = Embedder.load(
            self._config,
            vocab_size=self._tokenizer.vocab_size,
            phase=self._progress.begin,
            progress=self._progress.count,
        )
        self._limits = limits = embedder.limits
        self._facts = EmbeddingFacts(
            tokenizer=self._tokenizer,
            max_model_len=limits.max_model_len,
            vocab_size=embedder.vocab_size,
            num_dimensions=embedder.num_dimensions,
        )
        self._engine = EmbeddingEngine(
            embedder,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
        self._progress.settings(f"{limits.describe()} dimensions={embedder.num_dimensions}")
        self._progress.begin("warm-up")
        _warm_up(self._engine, min(48, limits.max_model_len))
        return self._engine

    def _make_door(self) -> EmbeddingIntake:
        return EmbeddingIntake(self._facts, self._loop, self._responder, stats=self._stats)

    def _make_metrics(self, labels: Mapping[str, str]) -> RequestMetrics:
        return RequestMetrics(labels, self._state, max_model_len=self._limits.max_model_len)

    @property
    def _max_waiting(self) -> int:
        return self._limits.max_waiting

    @property
    def _num_waiting_in_engine(self) -> int:
        return self._engine.num_waiting

    def _state(self) -> EngineState:
        return EngineState(
            num_running=self._engine.num_running,
            num_waiting=self._count_waiting() + self._admission.num_blocked,
            healthy=self._healthy,
        )

    def _snapshot(self, engine: EmbeddingEngine, detailed: bool) -> dict[str, Any]:
        return {
            "num_requests": engine.num_requests,
            "num_running_seqs": engine.num_running,
            "num_waiting_seqs": engine.num_waiting,
            "num_dimensions": self._facts.num_dimensions,
            "max_model_len": self._limits.max_model_len,
            "max_num_seqs": self._limits.max_num_seqs,
            "max_num_batched_tokens": self._limits.max_num_batched_tokens,
        }


def _warm_up(engine: EmbeddingEngine, num_tokens: int) -> None:
    """A real request, so that the first user's pays for no first call."""
    engine.add(EmbeddingRequest("warm-up", [0] * num_tokens, PoolingParams()))
    (output,) = engine.step()
    if output.error is not None:
        raise ConfigError(f"the warm-up request failed: {output.error}")
