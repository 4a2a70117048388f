"""Paged attention on the CPU: prefill, chunk and decode in one call.

    out[p] = sum_j softmax_j(scale * q[p] . k[j]) v[j],   p - window < j <= p

Work: 4 * head_dim FLOPs per (query head, visible key). Traffic: a decode step reads every visible K
and V element once per kv head; a prefill task of R rows reads it once for all R.

Method: flash attention (Dao et al., 2022) over tiles of KEY_TILE keys at fixed multiples of
KEY_TILE. A task is (sequence, kv head, tokens, keys); its rows are (token, head of the group), so
one packed K and V tile serves the whole group. K is transposed and V interleaved into thread-local
scratch, and both products run in registers (tile.py). Sequences with few rows are cut into tasks of
SEGMENT keys, merged in order; those that have a whole segment in the same blocks, as a prefix that they
share, do it as one task, which reads and packs it once. Threads draw tasks from an atomic counter, long
ones first.

Invariants: tiles, segments and merge order follow from the sequence alone, so its bits do not
depend on neighbours or on the number of threads. Only slots in [first visible key, seq_len) are
read; everything else counts as zero.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from trident_kernels.cpu.attend import (
    KEY_TILE,
    LOWEST,
    ROWS,
    Shape,
    lay_out,
    run_task,
    scratch_bytes,
)
from trident_kernels.cpu.jit import device, kernel
from trident_kernels.cpu.simd import (
    LANES,
    Ptr,
    as_bf16,
    as_f32,
    as_i32,
    as_i64,
    exp2,
    fetch_add,
    first_lane,
    fma,
    load16,
    mul,
    native_bf16_dot,
    splat,
    store16,
)

SEGMENT = 256  # keys per task of a sequence with few rows; a multiple of KEY_TILE
SPLIT_ROWS = 32  # up to this many rows (or a single token) a sequence is cut into segments
# int64 per task: seq, kv head, token, tokens, first key, end of keys, segments, partial, next, led
FIELDS = 10
NO_WINDOW = 1 << 40
LOG2_E = 1.4426950408889634
# Where there is no bfloat16 dot product, bfloat16 K, V and weights are packed as float32.
as_packed_bf16 = as_bf16 if native_bf16_dot() else as_f32


@device
def _span(tables: Any, seq: int, shape: Shape) -> tuple[int, int, int, int, bool]:
    """(query tokens, context, first key (a multiple of KEY_TILE), keys, cut into segments?)."""
    _, cu_seqlens_q, seq_lens = tables
    tokens: Any = np.int64(cu_seqlens_q[seq + 1]) - np.int64(cu_seqlens_q[seq])
    keys: Any = np.int64(seq_lens[seq])
    context = keys - tokens
    split = tokens == 1 or tokens * shape.group <= SPLIT_ROWS
    unit = SEGMENT if split else KEY_TILE
    first = max(0, context + 1 - shape.window) // unit * unit
    return tokens, context, first, keys, split


@device
def plan_tasks(tables: Any, n_seqs: int, shape: Shape) -> tuple[Any, int]:
    """All tasks (int64 [n, FIELDS]), long ones first, and the floats their partial results need.

    Tasks that are done together are a chain by `next`, -1 at its end; the first one leads the others.
    """
    step = max(1, ROWS // shape.group)
    total = 0
    for seq in range(n_seqs):
        tokens, _, first, keys, split = _span(tables, seq, shape)
        per_head = (keys - first + SEGMENT - 1) // SEGMENT if split else (tokens + step - 1) // step
        total += per_head * shape.kv_heads if tokens > 0 else 0
    tasks = np.empty((total, FIELDS), np.int64)
    first_task = np.zeros(n_seqs, np.int64)
    n = 0
    partial = 0
    for want_split in range(2):
        for seq in range(n_seqs):
            tokens, context, first, keys, split = _span(tables, seq, shape)
            if tokens == 0 or split != (want_split == 1):
                continue
            segments = (keys - first + SEGMENT - 1) // SEGMENT if split else 1
            first_task[seq] = n
            # Later tokens see more keys, so their tiles go first.
            for token in range((tokens - 1) // step * step, -1, -step):
                count = min(step, tokens - token)
                low = max(0, context + token + 1 - shape.window) // KEY_TILE * KEY_TILE
                for head in range(shape.kv_heads):
                    for s in range(segments):
                        key_lo = first + s * SEGMENT if split else low
                        key_hi = min(key_lo + SEGMENT, keys) if split else context + token + count
                        task = (seq, head, token, count, key_lo, key_hi, segments, partial, -1, 0)
                        for f in range(FIELDS):
                            tasks[n, f] = task[f]
                        n += 1
                        if segments > 1:
                            partial += count * shape.group * (shape.head_dim + 2)
    if shape.window >= NO_WINDOW:
        _chain_tasks(tasks, first_task, tables, n_seqs, shape)
    return tasks[:n], partial


@device
def _chain_tasks(tasks: Any, first_task: Any, tables: Any, n_seqs: int, shape: Shape) -> None:
    """Chains the tasks of decoding sequences that have a whole segment in the same blocks."""
    most = max(1, ROWS // shape.group)
    leads = np.zeros(n_seqs, np.bool_)
    newest = np.zeros(n_seqs, np.int64)  # of those that a sequence leads, and how many there are
    members = np.zeros(n_seqs, np.int64)
    s, found = 0, True
    while found:
        found = False  # a sequence that has this segment whole
        for seq in range(n_seqs):
            leads[seq] = False
            tokens, _, _, keys, _ = _span(tables, seq, shape)
            if tokens != 1 or keys < (s + 1) * SEGMENT:
                continue
            found = True
            leader = -1
            for other in range(seq):
                full = members[other] == most
                if leads[other] and not full and _have_same_blocks(tables, other, seq, s, shape):
                    leader = other
                    break
            if leader < 0:
                leads[seq], newest[seq], members[seq] = True, seq, 1
                continue
            before = newest[leader]
            newest[leader] = seq
            members[leader] += 1
            for head in range(shape.kv_heads):
                last = first_task[before] + head * tasks[first_task[before], 6] + s
                mine = first_task[seq] + head * tasks[first_task[seq], 6] + s
                tasks[last, 8] = mine
                tasks[mine, 9] = 1
        s += 1


@device
def _have_same_blocks(tables: Any, a: int, b: int, segment: int, shape: Shape) -> bool:
    block_tables, _, _ = tables
    first = segment * SEGMENT // shape.block_size
    last = ((segment + 1) * SEGMENT - 1) // shape.block_size
    at_a, at_b = a * shape.table_stride, b * shape.table_stride
    for block in range(first, last + 1):
        if block_tables[at_a + block] != block_tables[at_b + block]:
            return False
    return True


@device
def merge(
    share: tuple[int, int], tasks: Any, out: Ptr, cu_seqlens_q: Ptr, partials: Ptr, shape: Shape
) -> None:
    """Combine the partial results of each segmented (sequence, kv head), in segment order.

    Of several threads each takes some: share = (which, of how many).
    """
    which, threads = share
    head_dim = shape.head_dim
    i = 0
    number = 0
    while i < len(tasks):
        segments, rows = tasks[i, 6], tasks[i, 3] * shape.group
        if segments == 1:
            i += 1
            continue
        number += 1
        if number % threads != which:
            i += segments
            continue
        base, size = tasks[i, 7], rows * (head_dim + 2)
        start = np.int64(cu_seqlens_q[tasks[i, 0]]) + tasks[i, 2]
        for row in range(rows):
            at_max, at_sum = base + rows * head_dim + row, base + rows * (head_dim + 1) + row
            top = np.float32(LOWEST)
            for s in range(segments):
                top = max(top, partials[at_max + s * size])
            total = splat(np.float32(0.0))
            for s in range(segments):
                weight = exp2(splat(partials[at_max + s * size] - top))
                partials[at_max + s * size] = first_lane(weight)
                total = fma(weight, splat(partials[at_sum + s * size]), total)
            inverse = splat(np.float32(1.0) / first_lane(total))
            token, g = row // shape.group, row % shape.group
            query_head = tasks[i, 1] * shape.group + g
            at = ((start + token) * shape.kv_heads * shape.group + query_head) * head_dim
            for d in range(0, head_dim, LANES):
                acc = splat(np.float32(0.0))
                for s in range(segments):
                    part = load16(partials, base + s * size + row * head_dim + d)
                    acc = fma(part, splat(partials[at_max + s * size]), acc)
                store16(out, at + d, mul(acc, inverse))
        i += segments


@device
def lay_out_scratch(memory: Any, shape: Shape) -> Any:
    """One thread's regions in memory, uint8 [scratch_bytes(shape)], ready for run_tasks.

    The memory must come into a kernel's parallel loop as an array from outside: of one made inside it
    Numba sees no use but this one, and may free it at once.
    """
    scratch = lay_out(memory.ctypes.data, shape)
    zeros = as_f32(scratch.zeros)
    for d in range(0, shape.head_dim, LANES):
        store16(zeros, d, splat(np.float32(0.0)))
    return scratch


@device
def run_tasks(counter: int, tasks: Any, data: Any, tables: Any, scratch: Any, shape: Shape) -> None:
    """Run tasks until none is left; several threads draw from the int64 at the address `counter`."""
    while True:
        i = fetch_add(as_i64(counter))
        if i >= len(tasks):
            break
        if tasks[i, 9] == 0:
            run_task(i, tasks, data, tables, scratch, shape)


@device
def _work(
    mode: int, pointers: Any, counter: int, tasks: Any, partials: int, memory: Any, shape: Shape
) -> None:
    """All tasks, together with other threads. mode: 0 float32, 1 bfloat16."""
    q, k, v, out, block_tables, cu_seqlens_q, seq_lens = pointers
    tables = (as_i32(block_tables), as_i32(cu_seqlens_q), as_i32(seq_lens))
    part = as_f32(partials)
    scratch = lay_out_scratch(memory, shape)
    if mode == 0:
        f32 = (as_f32(q), as_f32(k), as_f32(v), as_f32(out), as_f32(q), 4, k, v, part)
        run_tasks(counter, tasks, f32, tables, scratch, shape)
    else:
        bf16 = (as_bf16(q), as_bf16(k), as_bf16(v), as_bf16(out), as_packed_bf16(q), 2, k, v, part)
        run_tasks(counter, tasks, bf16, tables, scratch, shape)


@device
def _finish(
    mode: int, out: int, cu_seqlens_q: int, tasks: Any, partials: int, shape: Shape
) -> None:
    if mode == 0:
        merge((0, 1), tasks, as_f32(out), as_i32(cu_seqlens_q), as_f32(partials), shape)
    else:
        merge((0, 1), tasks, as_bf16(out), as_i32(cu_seqlens_q), as_f32(partials), shape)


@kernel(parallel_from=1 << 19, with_serial=False)
def _paged_attention(
    mode: int,
    threads: int,
    q: int,
    k: int,
    v: int,
    out: int,
    block_tables: int,
    cu_seqlens_q: int,
    seq_lens: int,
    n_seqs: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    q_stride: int,
    block_size: int,
    block_stride: int,
    head_stride: int,
    slot_stride: int,
    table_stride: int,
    window: int,
    scale: float,
) -> None:
    """Addresses, sizes, strides in elements; scale is softmax_scale * log2(e)."""
    shape = Shape(
        kv_heads,
        group,
        head_dim,
        q_stride,
        block_size,
        block_stride,
        head_stride,
        slot_stride,
        table_stride,
        window,
        scale,
    )
    tables = (as_i32(block_tables), as_i32(cu_seqlens_q), as_i32(seq_lens))
    tasks, floats = plan_tasks(tables, n_seqs, shape)
    partials = np.empty(floats + 1, np.float32)
    counter = np.zeros(1, np.int64)
    pointers = (q, k, v, out, block_tables, cu_seqlens_q, seq_lens)
    counter_at, partials_at = counter.ctypes.data, partials.ctypes.data
    memory = np.empty((threads, scratch_bytes(shape)), np.uint8)
    for t in numba.prange(threads):
        _work(mode, pointers, counter_at, tasks, partials_at, memory[t], shape)
    if floats > 0:
        _finish(mode, out, cu_seqlens_q, tasks, partials_at, shape)
    counter[0] = 0  # last uses: keep both alive until here
    partials[0] = 0.0


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    softmax_scale: float,
    sliding_window: int | None,
) -> Tensor:
    q = q.contiguous()
    out = torch.empty_like(q)
    tokens, heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    block_stride, head_stride, slot_stride, _ = k_cache.stride()
    _paged_attention(
        tokens * heads * head_dim * max_seq_len,
        1 if q.dtype is torch.bfloat16 else 0,
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        out.data_ptr(),
        block_tables.data_ptr(),
        cu_seqlens_q.data_ptr(),
        seq_lens.data_ptr(),
        seq_lens.shape[0],
        kv_heads,
        heads // kv_heads,
        head_dim,
        heads * head_dim,
        block_size,
        block_stride,
        head_stride,
        slot_stride,
        block_tables.stride(0),
        NO_WINDOW if sliding_window is None else sliding_window,
        softmax_scale * LOG2_E,
    )
    return out
