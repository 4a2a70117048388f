"""A decoder that embeds: whole texts in one step, without a head.

Keys and values are needed only while a layer computes, so all layers share one layer's cache.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trident_llm.model.batch import Batch
from trident_llm.model.config import DECODER_TYPES, ModelConfig, ModelConfigError, read_json
from trident_llm.model.decoder import Decoder
from trident_llm.model.encoder_config import ENCODER_TYPES
from trident_llm.model.kv_cache import KVCache

BLOCK_SIZE = 16


def headless_config(folder: Path) -> ModelConfig:
    """The decoder's configuration; a folder saved without its head names another class."""
    if not (folder / "config.json").is_file():
        return ModelConfig.from_folder(folder)
    config = read_json(folder / "config.json")
    if config.get("model_type") not in DECODER_TYPES:
        raise ModelConfigError(
            f"model_type: {config.get('model_type')!r} is not supported for embeddings; supported are "
            f"{', '.join((*ENCODER_TYPES, *DECODER_TYPES))}"
        )
    if config.get("is_causal") is False:
        raise ModelConfigError("is_causal: false is not supported for decoders; supported is true")
    names = config.get("architectures")
    if isinstance(names, list):
        names = [re.sub(r"^([A-Za-z0-9]+)Model$", r"\1ForCausalLM", str(name)) for name in names]
        config = {**config, "architectures": names}
    return ModelConfig.from_dict(config)


class _OneLayer:
    """A cache of one layer that stands for all: each writes before it reads."""

    def __init__(self, cache: KVCache, num_layers: int) -> None:
        self._cache = cache
        self.data = cache.data.expand(num_layers, *cache.data.shape[1:])

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.layer(0)


class DecoderBody:
    """A decoder as a :class:`Body`.

    Args:
        max_tokens: most tokens in one call.
        max_texts: most texts in one call.
    """

    def __init__(self, decoder: Decoder, max_tokens: int, max_texts: int) -> None:
        self._decoder = decoder
        config = decoder.config
        # Each text may leave its last block all but empty; block 0 is reserved.
        self._num_blocks = -(-max_tokens // BLOCK_SIZE) + max_texts + 1
        self._kv = _OneLayer(
            KVCache(
                num_layers=1,
                num_blocks=self._num_blocks,
                num_kv_heads=config.num_kv_heads,
                block_size=BLOCK_SIZE,
                head_dim=config.head_dim,
                dtype=decoder.dtype,
                device=decoder.device,
            ),
            config.num_layers,
        )

    @property
    def hidden_size(self) -> int:
        return self._decoder.config.hidden_size

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    def hidden(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        return self._decoder.hidden(self._batch(texts), self._kv)

    def _batch(self, texts: Sequence[Sequence[int]]) -> Batch:
        lengths = np.array([len(text) for text in texts])
        num_blocks = -(-lengths // BLOCK_SIZE)
        assert num_blocks.sum() < self._num_blocks, "more texts or tokens than there is room for"
        first_blocks = 1 + np.cumsum(num_blocks) - num_blocks
        ends = np.cumsum(lengths)
        positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        # Unused entries name the reserved block, which nobody reads.
        columns = np.arange(num_blocks.max())
        tables = np.where(columns < num_blocks[:, None], first_blocks[:, None] + columns, 0)

        def tensor(values: npt.NDArray[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.from_numpy(values).to(self.device, dtype)

        return Batch(
            input_ids=tensor(np.concatenate([np.asarray(text, np.int64) for text in texts])),
            positions=tensor(positions),
            slot_mapping=tensor(np.repeat(first_blocks * BLOCK_SIZE, lengths) + positions),
            cu_seqlens_q=tensor(np.concatenate(([0], ends)), torch.int32),
            seq_lens=tensor(lengths, torch.int32),
            block_tables=tensor(tables, torch.int32),
            max_seqlen_q=int(lengths.max()),
            max_seq_len=int(lengths.max()),
            logits_indices=tensor(np.arange(ends[-1])),
            rope_lens=tensor(np.repeat(lengths, lengths))
            if self._decoder.needs_rope_lens
            else None,
        )
