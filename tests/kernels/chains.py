"""What attention's plan chains together, read through a function of its own."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tests.kernels.batches import PagedBatch
from trident_kernels.cpu.attend import Shape
from trident_kernels.cpu.attention import NO_WINDOW, plan_tasks
from trident_kernels.cpu.jit import device
from trident_kernels.cpu.simd import as_i32, as_i64

_MOST = 1000


@device
def _tell(
    block_tables: int,
    cu_seqlens_q: int,
    seq_lens: int,
    n_seqs: int,
    kv_heads: int,
    group: int,
    block_size: int,
    table_stride: int,
    out: int,
) -> None:
    """Writes the number of tasks, then of each: first key, next, led."""
    shape = Shape(kv_heads, group, 64, 0, block_size, 0, 0, 0, table_stride, NO_WINDOW, 1.0)
    tables = (as_i32(block_tables), as_i32(cu_seqlens_q), as_i32(seq_lens))
    tasks, _ = plan_tasks(tables, n_seqs, shape)
    told = as_i64(out)
    told[0] = len(tasks)
    for i in range(len(tasks)):
        told[1 + 3 * i], told[2 + 3 * i], told[3 + 3 * i] = tasks[i, 4], tasks[i, 8], tasks[i, 9]


def chains_of(batch: PagedBatch) -> dict[tuple[int, int], int]:
    """How many chains there are by (members, first key)."""
    out = np.zeros(1 + 3 * _MOST, np.int64)
    heads, kv_heads = batch.q.shape[1], batch.k_cache.shape[1]
    _tell(
        batch.block_tables.data_ptr(), batch.cu_seqlens_q.data_ptr(),
        batch.seq_lens.data_ptr(), len(batch.seq_lens), kv_heads, heads // kv_heads,
        batch.k_cache.shape[2], batch.block_tables.stride(0), out.ctypes.data,
    )  # fmt: skip
    tasks = out[1 : 1 + 3 * out[0]].reshape(-1, 3)
    found: Counter[tuple[int, int]] = Counter()
    for first_key, following, led in tasks:
        if not led:
            members = 1
            while following >= 0:
                members, following = members + 1, tasks[following, 1]
            found[members, int(first_key)] += 1
    return dict(found)
