"""Loads a model that embeds and computes the vectors of some texts at a time.

Owns pooling and the choice between encoders, which see a text in both directions, and decoders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from trident_llm.core.embedding import EmbeddingConfig
from trident_llm.core.errors import ConfigError
from trident_llm.model.config import expected_tensors, read_json
from trident_llm.model.decoder import Decoder
from trident_llm.model.decoder_body import DecoderBody, headless_config
from trident_llm.model.encoder import Encoder
from trident_llm.model.encoder_config import EncoderConfig, expected_encoder_tensors, is_encoder
from trident_llm.model.executor import (
    check_weights_fit,
    resolve_device,
    resolve_dtype,
    set_threads,
)
from trident_llm.model.pooling_config import PoolingConfig


class Body(Protocol):
    """A model up to its last hidden states."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def hidden(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """[T, hidden_size] of texts sorted by length, whose rows lie one text after another."""


@dataclass(frozen=True)
class EmbeddingLimits:
    """The effective settings, all resolved."""

    device: torch.device
    dtype: torch.dtype
    pooling: PoolingConfig
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"device={self.device} dtype={str(self.dtype).removeprefix('torch.')} "
            f"pooling={self.pooling.method} normalize={self.pooling.normalize} "
            f"max_model_len={self.max_model_len} max_num_seqs={self.max_num_seqs} "
            f"max_num_batched_tokens={self.max_num_batched_tokens} max_waiting={self.max_waiting}"
        )


class Embedder:
    """A model and its pooling."""

    def __init__(self, body: Body, limits: EmbeddingLimits, vocab_size: int) -> None:
        self._body = body
        self.limits = limits
        self.vocab_size = vocab_size

    @property
    def num_dimensions(self) -> int:
        """Length of the vectors."""
        return self._body.hidden_size

    @property
    def normalizes(self) -> bool:
        """Whether vectors are to be normalised where a request does not say."""
        return self.limits.pooling.normalize

    @torch.inference_mode()
    def embed(self, texts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """The vectors of ``texts`` (token ids, none empty), [S, num_dimensions], not normalised."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        hidden = self._body.hidden([texts[index] for index in order])
        lengths = torch.tensor([len(texts[index]) for index in order])
        vectors = torch.empty((len(texts), self.num_dimensions))
        vectors[order] = self._pool(hidden, lengths).cpu()
        return vectors.numpy()

    def _pool(self, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """[T, D] to float32 [S, D]."""
        ends = lengths.cumsum(0)
        method = self.limits.pooling.method
        if method == "mean":
            text_of_row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            sums = hidden.new_zeros((len(lengths), hidden.shape[1]), dtype=torch.float32)
            sums.index_add_(0, text_of_row.to(hidden.device), hidden.float())
            return sums / lengths.to(hidden.device)[:, None]
        rows = ends - 1 if method == "last" else ends - lengths
        return hidden[rows.to(hidden.device)].float()

    @classmethod
    def load(
        cls,
        config: EmbeddingConfig,
        *,
        vocab_size: int,
        phase: Callable[[str], None] = lambda name: None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Embedder:
        """Loads the model of ``config``.

        Args:
            vocab_size: the tokenizer's size, added tokens included.
            phase: told the name of each phase as it begins.
            progress: told (tensors done, tensors in all) while weights load.

        Raises:
            ConfigError: a setting, the model folder or the memory does not allow it.
        """
        set_threads(config)
        folder = Path(config.model)
        pooling = PoolingConfig.from_folder(folder, config.pooling)
        device = resolve_device(config)
        phase("weights")
        load = _load_encoder if is_encoder(folder) else _load_decoder
        body, limits, rows = load(config, pooling, device, progress)
        return cls(body, limits, min(vocab_size, rows))


def _resolve_limits(
    config: EmbeddingConfig,
    pooling: PoolingConfig,
    device: torch.device,
    checkpoint_dtype: str | None,
    supported: int,
) -> EmbeddingLimits:
    if config.max_model_len is not None and config.max_model_len > supported:
        raise ConfigError(
            f"max_model_len must be at most {supported}, the longest text this model supports"
        )
    on_cpu = device.type == "cpu"
    max_num_seqs = config.max_num_seqs or (64 if on_cpu else 256)
    return EmbeddingLimits(
        device=device,
        # Rounded to bfloat16, the vectors of a float32 model move by more than 1e-4 in cosine.
        dtype=torch.float32
        if config.dtype == "auto" and checkpoint_dtype in (None, "float32")
        else resolve_dtype(config, device),
        pooling=pooling,
        max_model_len=config.max_model_len or min(pooling.max_seq_length or supported, supported),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or (512 if on_cpu else 8192),
        max_waiting=config.max_waiting or 16 * max_num_seqs,
    )


_Loaded = tuple[Body, EmbeddingLimits, int]  # the last one: rows of the table of words
_Progress = Callable[[int, int], None] | None


def _load_encoder(
    config: EmbeddingConfig, pooling: PoolingConfig, device: torch.device, progress: _Progress
) -> _Loaded:
    folder = Path(config.model)
    model = EncoderConfig.from_dict(read_json(folder / "config.json"))
    limits = _resolve_limits(config, pooling, device, model.dtype, model.max_supported_len)
    _check_fit(expected_encoder_tensors(model), limits, device)
    body = Encoder.load(folder, model, dtype=limits.dtype, device=device, progress=progress)
    return body, limits, model.vocab_size


def _load_decoder(
    config: EmbeddingConfig, pooling: PoolingConfig, device: torch.device, progress: _Progress
) -> _Loaded:
    folder = Path(config.model)
    model = headless_config(folder)
    limits = _resolve_limits(config, pooling, device, model.dtype, model.max_supported_len)
    _check_fit(expected_tensors(model), limits, device)
    decoder = Decoder.load(
        folder, model, dtype=limits.dtype, device=device, max_len=limits.max_model_len,
        has_head=False, progress=progress,
    )  # fmt: skip
    most = max(limits.max_num_batched_tokens, limits.max_model_len)
    body = DecoderBody(decoder, most, limits.max_num_seqs)
    return body, limits, model.vocab_size


def _check_fit(
    tensors: Mapping[str, tuple[int, ...]], limits: EmbeddingLimits, device: torch.device
) -> None:
    num_weights = sum(math.prod(shape) for shape in tensors.values())
    check_weights_fit(num_weights * limits.dtype.itemsize, device)
