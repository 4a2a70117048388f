"""The forward pass of the Llama family: one configurable decoder, nine operations a layer.

Owns the order of the operations; how each is computed on a device is ``trident_kernels``' business.
It knows nothing of sequences beyond the batch's tensors and loops over none. Invariant: logits equal
those of the dense Hugging Face forward pass, whatever way the tokens are batched or chunked.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F

import trident_kernels as ops
from trident_llm.model import rope
from trident_llm.model.batch import Batch
from trident_llm.model.config import ModelConfig, ModelConfigError
from trident_llm.model.loader import DecoderWeights, LayerWeights, load_weights


class KVCacheLike(Protocol):
    """Where the decoder finds each layer's keys and values."""

    data: torch.Tensor  # all of them, [layers, 2, num_blocks, kv_heads, block_size, head_dim]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value cache of one layer, each [num_blocks, kv_heads, block_size, head_dim]."""


class Decoder:
    """A loaded model. ``forward`` runs one step for a flat batch of tokens."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, max_len: int) -> None:
        """``max_len`` is the longest sequence that will be run, prompt and output, in tokens."""
        assert 1 <= max_len <= config.max_supported_len
        self.config = config
        self._weights = weights
        self._softmax_scale = config.head_dim**-0.5
        device = weights.embedding.device
        self._cos_sin = rope.cos_sin_table(config.rope, max_len).to(device)
        self.needs_rope_lens = (
            config.rope_depends_on_length and max_len > config.rope.original_max_position_embeddings
        )
        self._stack = ops.stack_layers(
            weights.layers,
            weights.final_norm,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            sliding_windows=config.sliding_windows,
            softmax_scale=self._softmax_scale,
            eps=config.rms_norm_eps,
        )

    @classmethod
    def load(
        cls,
        path: Path,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        int8: bool = False,
        has_head: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> Decoder:
        """Loads the model folder or ``.gguf`` file at ``path``, its linear layers as int8 if told.

        Without ``has_head`` there are hidden states and no logits; see :func:`load_weights`.

        Raises ModelConfigError (max_len) or ModelLoadError (the checkpoint), naming the cause.
        """
        if not 1 <= max_len <= config.max_supported_len:
            raise ModelConfigError(
                f"max_model_len: {max_len} is outside 1 to {config.max_supported_len}, the positions "
                "this model supports; lower it, or give the model a rope_scaling that covers it"
            )
        weights = load_weights(
            path,
            config,
            dtype=dtype,
            device=device,
            int8=int8,
            has_head=has_head,
            progress=progress,
        )
        return cls(config, weights, max_len)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights, activations and KV cache."""
        return self._weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self._weights.embedding.device

    def forward(self, batch: Batch, kv: KVCacheLike) -> torch.Tensor:
        """Writes the batch's keys and values into ``kv`` and returns logits, [L, vocab_size] float32.

        As :meth:`hidden` and :meth:`logits`, one after the other.
        """
        return self.logits(self.hidden(batch, kv))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of final hidden states: [L, hidden_size] to [L, vocab_size] float32."""
        assert self._weights.head is not None, "the model was loaded without its head"
        return ops.linear(hidden, self._weights.head).float()

    def hidden(self, batch: Batch, kv: KVCacheLike) -> torch.Tensor:
        """Writes the batch's keys and values into ``kv``; final hidden states [L, hidden_size].

        Row i belongs to token ``batch.logits_indices[i]``. ``batch.rope_lens`` is required when
        ``needs_rope_lens``: for the token at position p, max(prompt length, p + 1) of its sequence.
        """
        weights, eps = self._weights, self.config.rms_norm_eps
        cos_sin, positions = self._rotations(batch)
        # Fresh memory, so that the residual sums may be formed in it.
        residual = F.embedding(batch.input_ids, weights.embedding)
        if self._stack is not None:
            return self._stack.run(
                residual,
                cos_sin,
                positions,
                kv.data,
                batch.slot_mapping,
                batch.block_tables,
                batch.cu_seqlens_q,
                batch.seq_lens,
                batch.logits_indices,
            )
        hidden = ops.rms_norm(residual, weights.layers[0].input_norm, eps)
        for index, layer in enumerate(weights.layers):
            attended = self._attend(index, layer, hidden, cos_sin, positions, batch, kv)
            if index + 1 == len(weights.layers):
                # No later layer attends to the other tokens: only their keys and values matter.
                attended = attended[batch.logits_indices]
                residual = residual[batch.logits_indices]
                next_norm = weights.final_norm
            else:
                next_norm = weights.layers[index + 1].input_norm
            hidden = ops.linear(attended, layer.output)
            hidden = ops.add_rms_norm(hidden, residual, layer.post_attention_norm, eps)
            hidden = ops.linear(ops.silu_and_mul(ops.linear(hidden, layer.gate_up)), layer.down)
            hidden = ops.add_rms_norm(hidden, residual, next_norm, eps)
        return hidden

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        hidden: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        batch: Batch,
        kv: KVCacheLike,
    ) -> torch.Tensor:
        """Self-attention up to the output projection, [T, hidden] to [T, num_heads * head_dim]."""
        config = self.config
        k_cache, v_cache = kv.layer(index)
        query = ops.rope_and_write_kv(
            ops.linear(hidden, layer.qkv),
            positions,
            cos_sin,
            k_cache,
            v_cache,
            batch.slot_mapping,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            layer.q_norm,
            layer.k_norm,
            config.rms_norm_eps,
        )
        attended = ops.paged_attention(
            query,
            k_cache,
            v_cache,
            batch.block_tables,
            batch.cu_seqlens_q,
            batch.seq_lens,
            batch.max_seqlen_q,
            batch.max_seq_len,
            self._softmax_scale,
            sliding_window=config.sliding_windows[index],
        )
        return attended.flatten(1)

    def _rotations(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """A table of cosines and sines, and the row of each token in it."""
        if not self.needs_rope_lens:
            return self._cos_sin, batch.positions
        assert batch.rope_lens is not None
        table = rope.dynamic_cos_sin(self.config.rope, batch.positions, batch.rope_lens)
        return table, torch.arange(len(table), device=table.device)
