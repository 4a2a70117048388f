"""Causal attention of a flat batch over the paged cache: prefill, chunks and decode in one launch.

A program takes block_m rows: some tokens of one sequence, each with the query heads that share a kv
head, so that grouped queries read their keys once. It walks the keys in tiles whose size is
independent of block_size, with an online softmax in base 2. Its sequence is found on the device, the
grid comes from shapes alone:

    program   0    1    2    3    4 ...          first program of sequence s:
    sequence  0    0    0    1    2 ...            cu_seqlens_q[s] // tokens of a program + s

If that makes few programs, the keys of each are split among several, and `_combine` joins their parts.
Every load is masked by the sequence's length: what lies beyond may be NaN, and 0 * NaN is NaN.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl
from torch import Tensor

from trident_kernels.triton import configs
from trident_kernels.triton.runtime import device_function, device_of, jit, launch, power_of_two

LOG2_E = math.log2(math.e)


@device_function
def _find_sequence(
    starts_ptr: tl.tensor, num_seqs: tl.tensor, program: tl.tensor, TOKENS: tl.constexpr
) -> tl.tensor:
    """The last sequence whose first program is at most ``program``."""
    low = num_seqs * 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(starts_ptr + middle) // TOKENS + middle
        if first <= program:
            low = middle
        else:
            high = middle
    return low


@jit(varying=["tables_ptr", "starts_ptr", "lens_ptr", "num_seqs", "stride_table"])
def _paged_attention(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    num_seqs: tl.tensor,
    scale: tl.tensor,
    stride_q: tl.tensor,
    stride_q_head: tl.tensor,
    stride_table: tl.tensor,
    stride_block: tl.tensor,
    stride_head: tl.tensor,
    stride_cell: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    ONE_PROGRAM: tl.constexpr,  # per sequence and kv head
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    if ONE_PROGRAM:
        seq = program
        first = 0
    else:
        seq = _find_sequence(starts_ptr, num_seqs, program, TOKENS)
        first = (program - (tl.load(starts_ptr + seq) // TOKENS + seq)) * TOKENS
    start = tl.load(starts_ptr + seq)
    query_len = tl.load(starts_ptr + seq + 1) - start
    if first >= query_len:
        return
    seq_len = tl.load(lens_ptr + seq)
    context = seq_len - query_len

    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    local = first + row // GROUP
    is_row = (row < TOKENS * GROUP) & (local < query_len)
    position = context + local
    token = (start + local).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    row_mask = is_row[:, None] & (d < D)[None, :]
    q_cells = token * stride_q + head * stride_q_head
    q = tl.load(q_ptr + q_cells[:, None] + d[None, :], mask=row_mask, other=0.0)

    # Tiles start at multiples of TILE, whatever the chunk and the window.
    end = context + tl.minimum(first + TOKENS, query_len)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context + first - WINDOW + 1, 0)
    tile_begin = begin // TILE
    tile_end = (end + TILE - 1) // TILE
    if SPLIT:
        share = tl.cdiv(tile_end - tile_begin, tl.num_programs(2))
        tile_begin += part * share
        tile_end = tl.minimum(tile_begin + share, tile_end)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    table_ptr = tables_ptr + seq.to(tl.int64) * stride_table
    head_cells = kv_head * stride_head + d
    for tile in range(tile_begin, tile_end):
        key = tile * TILE + tl.arange(0, TILE)
        is_key = (key >= begin) & (key < end)
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        cells = block * stride_block + key % BLOCK_SIZE * stride_cell
        k_mask = is_key[None, :] & (d < D)[:, None]
        k = tl.load(k_ptr + cells[None, :] + head_cells[:, None], mask=k_mask, other=0.0)
        v_mask = is_key[:, None] & (d < D)[None, :]
        v = tl.load(v_ptr + cells[:, None] + head_cells[None, :], mask=v_mask, other=0.0)

        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        visible = (key[None, :] <= position[:, None]) & is_key[None, :]
        if WINDOW > 0:
            visible = visible & (position[:, None] - key[None, :] < WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        # A row that has seen no key yet: no difference of infinities.
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(best - base)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        best = new_best

    out_row = token * (NUM_KV_HEADS * GROUP) + head
    if SPLIT:
        # float32 parts [T, H, parts, D]; stats [T, H, parts, 2] with the maximum and the sum.
        out_row = out_row * tl.num_programs(2) + part
        tl.store(stats_ptr + out_row * 2, best, mask=is_row)
        tl.store(stats_ptr + out_row * 2 + 1, total, mask=is_row)
    else:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    cells = out_row[:, None] * D + d[None, :]
    tl.store(out_ptr + cells, acc.to(out_ptr.dtype.element_ty), mask=row_mask)


@jit(varying=["num_parts"])
def _combine(
    parts_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_parts: tl.tensor,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    MOST_PARTS: tl.constexpr,
) -> None:
    """One row of the output from its parts."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, MOST_PARTS)
    d = tl.arange(0, D_PAD)
    is_part = part < num_parts
    cells = row * num_parts + part
    best = tl.load(stats_ptr + cells * 2, mask=is_part, other=float("-inf"))
    total = tl.load(stats_ptr + cells * 2 + 1, mask=is_part, other=0.0)
    top = tl.max(best, axis=0)
    weight = tl.exp2(best - tl.where(top == float("-inf"), 0.0, top))
    # A part without keys has a sum of zero.
    mask = (is_part & (total != 0.0))[:, None] & (d < D)[None, :]
    values = tl.load(parts_ptr + cells[:, None] * D + d[None, :], mask=mask, other=0.0)
    sum_of_weights = tl.sum(total * weight, axis=0)
    result = tl.sum(values * weight[:, None], axis=0)
    result = result / tl.where(sum_of_weights == 0.0, 1.0, sum_of_weights)
    tl.store(out_ptr + row * D + d, result.to(out_ptr.dtype.element_ty), mask=d < D)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    max_seqlen_q: int,
    max_seq_len: int,
    softmax_scale: float,
    sliding_window: int | None = None,
    *,
    deterministic: bool | None = None,
    config: configs.AttentionConfig | None = None,
    splits: int | None = None,
) -> Tensor:
    """As `trident_kernels.paged_attention`.

    Args:
        deterministic: sums in an order that the batch does not change: no splits, one tile size.
            Default: what torch.use_deterministic_algorithms says.
        config: tile sizes, for tuning; chosen by shape by default.
        splits: parts of each sequence's keys, for tuning; chosen by shape by default.
    """
    tokens, heads, head_dim = q.shape
    kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    num_seqs, group = len(seq_lens), heads // kv_heads
    assert heads == group * kv_heads
    assert q.stride(2) == k_cache.stride(3) == block_tables.stride(1) == 1
    assert k_cache.stride() == v_cache.stride()
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    device = device_of(q)
    if config is None:
        rows = max_seqlen_q * group
        config = configs.attention_config(device, q.itemsize, head_dim, rows, deterministic)
    block_m = max(config.block_m, power_of_two(group))
    tokens_of_program = block_m // group
    one_program = max_seqlen_q <= tokens_of_program
    programs = num_seqs if one_program else tokens // tokens_of_program + num_seqs
    out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    if splits is None:
        splits = 1
        if not deterministic:
            splits = configs.num_splits(device, programs * kv_heads, max_seq_len, out.numel())
    parts, stats = out, None
    if splits > 1:
        parts = torch.empty((tokens, heads, splits, head_dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((tokens, heads, splits, 2), dtype=torch.float32, device=q.device)
    width = power_of_two(max(16, head_dim))
    launch(
        _paged_attention,
        (programs, kv_heads, splits),
        q,
        k_cache,
        v_cache,
        parts,
        stats,
        block_tables,
        cu_seqlens_q,
        seq_lens,
        num_seqs,
        softmax_scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        NUM_KV_HEADS=kv_heads,
        GROUP=group,
        D=head_dim,
        D_PAD=width,
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        TILE=config.tile,
        WINDOW=sliding_window or 0,
        ONE_PROGRAM=one_program,
        SPLIT=splits > 1,
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if splits > 1:
        launch(
            _combine,
            (tokens * heads,),
            parts,
            stats,
            out,
            splits,
            D=head_dim,
            D_PAD=width,
            MOST_PARTS=configs.MAX_SPLITS,
            num_warps=4,
        )
    return out
