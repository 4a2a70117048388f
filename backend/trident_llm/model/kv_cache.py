"""The paged KV cache: one tensor of fixed-size blocks for all layers, allocated once.

It knows nothing of sequences: who owns which block is the BlockPool's business. Block 0 is the
trash block: padded writes go there and nobody reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trident_kernels import zeros_for_long


def block_bytes(
    num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> int:
    """Bytes of one block over all layers, keys and values together."""
    return 2 * num_layers * num_kv_heads * head_dim * block_size * dtype.itemsize


class KVCache:
    """Keys and values of all layers, ``[layers, 2, num_blocks, kv_heads, block_size, head_dim]``.

    Each layer's share is contiguous, and in it each (block, head) tile, which attention reads whole.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Zeroed, so that no stale NaN lies in it. On CPU the pages come when they are first written.
        shape = (num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim)
        self.data = zeros_for_long(shape, dtype, device)
        self._layers = [(layer[0], layer[1]) for layer in self.data]

    @property
    def num_blocks(self) -> int:
        return self.data.shape[2]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each ``[num_blocks, kv_heads, block_size, head_dim]``."""
        return self._layers[index]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks ``(source, destination)`` in all layers; destinations are distinct."""
        if not copies:
            return
        pairs = torch.tensor(copies).to(self.data.device, non_blocking=True)
        self.data[:, :, pairs[:, 1]] = self.data[:, :, pairs[:, 0]]
