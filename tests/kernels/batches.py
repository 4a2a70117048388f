"""Random paged batches for kernel tests, with poison wherever nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

POISON_BLOCK = 2**31 - 1  # an address far outside the cache: reading it would crash


@dataclass(frozen=True)
class PagedBatch:
    q: Tensor  # [T, H, D]
    k_cache: Tensor  # [N, K, B, D]
    v_cache: Tensor
    block_tables: Tensor  # [S, M] int32
    cu_seqlens_q: Tensor  # [S + 1] int32
    seq_lens: Tensor  # [S] int32

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, int]:
        lens = self.cu_seqlens_q.diff()
        return (
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.cu_seqlens_q,
            self.seq_lens,
            int(lens.max()),
            int(self.seq_lens.max()),
        )

    def alone(self, seq: int) -> PagedBatch:
        """The same sequence as a batch of one, in the same cache."""
        first, end = int(self.cu_seqlens_q[seq]), int(self.cu_seqlens_q[seq + 1])
        return replace(
            self,
            q=self.q[first:end],
            block_tables=self.block_tables[seq : seq + 1],
            cu_seqlens_q=torch.tensor([0, end - first], dtype=torch.int32),
            seq_lens=self.seq_lens[seq : seq + 1],
        )

    def keys_and_values(self, seq: int) -> tuple[Tensor, Tensor]:
        """Contiguous float32 K and V of one sequence, [K, n, D] each, token by token."""
        n, block_size = int(self.seq_lens[seq]), self.k_cache.shape[2]
        cells = [(int(self.block_tables[seq, i // block_size]), i % block_size) for i in range(n)]
        rows = [
            torch.stack([c[b, :, o] for b, o in cells], 1) for c in (self.k_cache, self.v_cache)
        ]
        return rows[0].float(), rows[1].float()


def make_batch(
    query_lens: list[int],
    seq_lens: list[int],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int,
) -> PagedBatch:
    """heads = (H, K). Blocks are scattered; free blocks and unused slots hold NaN and inf."""
    g = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in seq_lens]
    n_blocks = sum(counts) + 3
    order = torch.randperm(n_blocks, generator=g).tolist()
    shape = (n_blocks, heads[1], block_size, head_dim)
    caches = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)]
    caches[1][:, :, ::2] = float("inf")
    tables = torch.full((len(seq_lens), max(counts) + 2), POISON_BLOCK, dtype=torch.int32)
    for seq, (count, n) in enumerate(zip(counts, seq_lens)):
        for i in range(count):
            block, used = order.pop(), min(block_size, n - i * block_size)
            tables[seq, i] = block
            for cache in caches:
                values = torch.randn(heads[1], used, head_dim, generator=g)
                cache[block, :, :used] = values.to(dtype)
    q = torch.randn(sum(query_lens), heads[0], head_dim, generator=g).to(dtype)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    k_cache, v_cache = caches
    return PagedBatch(
        q, k_cache, v_cache, tables, starts, torch.tensor(seq_lens, dtype=torch.int32)
    )


def error_scale(dtype: torch.dtype) -> float:
    """Tolerance relative to values of order one: float32 sums, or two roundings to bfloat16."""
    return 2e-5 if dtype is torch.float32 else 2e-2
