"""One task of paged attention: some query rows of one kv head against a range of keys.

Owns the tiles: locating rows through the block table, packing K and V, the two products, the online
softmax (Milakov & Gimelshein, 2018) and one thread's scratch. Which tasks there are, and how their
partial results are merged, is attention.py's business.

Invariant: tiles start at fixed multiples of KEY_TILE, and only slots of visible keys are read; the
other rows of a tile are zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from trident_kernels.cpu.jit import device
from trident_kernels.cpu.simd import (
    LANES,
    Ptr,
    add,
    as_f32,
    as_i64,
    exp2,
    fma,
    keep_range,
    load16,
    max_lanes,
    maximum,
    mul,
    pointer_like,
    shifted,
    splat,
    store16,
    sum_lanes,
)
from trident_kernels.cpu.tile import (
    MAX_ROWS,
    multiply_rows,
    pack_pair,
    pack_transposed,
    shifted_words,
    words_in,
)

KEY_TILE = 256
ROWS = 192  # query rows per task: at head_dim 64 all scratch stays in the L2 cache
LOWEST = -3.0e38  # running maximum before any key; finite, so that -inf - LOWEST is not NaN
LINE = 64  # bytes


class Shape(NamedTuple):
    """Sizes and strides (in elements) that every device function below shares."""

    kv_heads: int
    group: int  # query heads per kv head
    head_dim: int  # a multiple of 16
    q_stride: int  # from token to token
    block_size: int
    block_stride: int
    head_stride: int
    slot_stride: int
    table_stride: int
    window: int  # visible keys per query; larger than any sequence when there is no window
    scale: float  # softmax_scale * log2(e)


class Scratch(NamedTuple):
    """Addresses of one thread's working memory."""

    k_rows: int  # int64[KEY_TILE] addresses of K rows
    v_rows: int
    zeros: int  # one row of zeros
    k: int  # packed [words(head_dim), KEY_TILE]
    v: int  # packed [words(KEY_TILE), head_dim]
    q: int  # packed type [rows, head_dim]
    scores: int  # float32 [MAX_ROWS, KEY_TILE]
    weights: int  # packed type [MAX_ROWS, KEY_TILE]
    acc: int  # float32 [rows, head_dim]
    running_max: int  # float32 [rows], in units of log2
    running_sum: int  # float32 [rows]
    alpha: int  # float32 [LANES], the first MAX_ROWS in use


@device
def _row_capacity(group: int) -> int:
    return max(ROWS, group)


@device
def scratch_bytes(shape: Shape) -> int:
    rows: int = _row_capacity(shape.group)
    per_dim = 1 + 2 * KEY_TILE + 2 * rows
    floats = shape.head_dim * per_dim + 2 * MAX_ROWS * KEY_TILE + 2 * rows + LANES
    return 4 * floats + 16 * KEY_TILE + 16 * LINE


@device
def lay_out(base: int, shape: Shape) -> Scratch:
    """Scratch regions from base on, each starting a cache line (4 bytes per element at most)."""
    rows = _row_capacity(shape.group)
    k_rows = (base + LINE - 1) // LINE * LINE
    v_rows = k_rows + 8 * KEY_TILE
    zeros = v_rows + 8 * KEY_TILE
    k = zeros + 4 * shape.head_dim
    v = k + 4 * shape.head_dim * KEY_TILE
    q = v + 4 * shape.head_dim * KEY_TILE
    scores = q + 4 * shape.head_dim * rows
    weights = scores + 4 * MAX_ROWS * KEY_TILE
    acc = weights + 4 * MAX_ROWS * KEY_TILE
    running_max = acc + 4 * shape.head_dim * rows
    running_sum = running_max + (4 * rows + LINE - 1) // LINE * LINE
    alpha = running_sum + (4 * rows + LINE - 1) // LINE * LINE
    return Scratch(
        k_rows, v_rows, zeros, k, v, q, scores, weights, acc, running_max, running_sum, alpha
    )


# ---- one key tile --------------------------------------------------------------------------------


@device
def _locate(
    rows: Ptr, cache: int, zeros: int, item: int, table: Ptr, shape: Shape, head: int, keys: Any
) -> None:
    """Addresses of `count` K or V rows from key `start`; keys outside [low, high) get the zero row.

    keys = (start, count, low, high). Walks block by block: a division per key would cost more than
    the products of a decode step.
    """
    start, count, low, high = keys
    index = start // shape.block_size
    slot = start - index * shape.block_size
    i = 0
    while i < count:
        taken = min(shape.block_size - slot, count - i)
        if start + i + taken <= low or start + i >= high:
            for j in range(i, i + taken):
                rows[j] = zeros
        else:
            block = np.int64(table[index])
            offset = block * shape.block_stride + head * shape.head_stride
            for j in range(i, i + taken):
                address = cache + (offset + (slot + j - i) * shape.slot_stride) * item
                rows[j] = address if low <= start + j < high else zeros
        i += taken
        index += 1
        slot = 0


@device
def _pack_k(k: Ptr, rows: Ptr, packed: Ptr, count: int, head_dim: int) -> None:
    """K rows -> packed [words(head_dim), KEY_TILE]; count is a multiple of 16."""
    words = words_in(packed, head_dim)
    per_word = head_dim // words
    for first in range(0, count, LANES):
        group = shifted(rows, first)
        word = 0
        while words - word >= LANES:
            target = shifted_words(packed, word * KEY_TILE + first)
            pack_transposed(16, k, group, word * per_word, target, KEY_TILE)
            word += LANES
        if words - word == 8:
            target = shifted_words(packed, word * KEY_TILE + first)
            pack_transposed(8, k, group, word * per_word, target, KEY_TILE)


@device
def _pack_v(v: Ptr, rows: Ptr, packed: Ptr, count: int, head_dim: int) -> None:
    """V rows -> packed [words(KEY_TILE), head_dim]; count is a multiple of 16."""
    if words_in(packed, 2) == 1:
        for i in range(0, count, 2):
            first = pointer_like(v, rows[i])
            second = pointer_like(v, rows[i + 1])
            for d in range(0, head_dim, LANES):
                pack_pair(first, second, d, packed, (i // 2) * head_dim + d)
    else:
        for i in range(count):
            row = pointer_like(v, rows[i])
            for d in range(0, head_dim, LANES):
                store16(packed, i * head_dim + d, load16(row, d))


@device
def _product(
    rows: int,
    columns: int,
    a: Ptr,
    a_stride: int,
    b: Ptr,
    b_stride: int,
    depth: int,
    c: Ptr,
    c_stride: int,
    alpha: Ptr,
) -> None:
    """multiply_rows over `columns` (a multiple of 16) in register tiles of 64, 32 and 16."""
    done = 0
    while columns - done >= 64:
        b_tile, c_tile = shifted_words(b, done), shifted(c, done)
        multiply_rows(4, rows, a, a_stride, b_tile, b_stride, depth, c_tile, c_stride, alpha)
        done += 64
    if columns - done >= 32:
        b_tile, c_tile = shifted_words(b, done), shifted(c, done)
        multiply_rows(2, rows, a, a_stride, b_tile, b_stride, depth, c_tile, c_stride, alpha)
        done += 32
    if columns - done >= 16:
        b_tile, c_tile = shifted_words(b, done), shifted(c, done)
        multiply_rows(1, rows, a, a_stride, b_tile, b_stride, depth, c_tile, c_stride, alpha)


@device
def _mask_and_max(scores: Ptr, columns: int, low: int, high: int) -> Any:
    """The largest score of a row in columns [low, high); scores outside become -inf."""
    top = splat(np.float32(-np.inf))
    if low > 0 or high < columns:
        for c in range(0, columns, LANES):
            x = keep_range(load16(scores, c), low - c, high - c)
            store16(scores, c, x)
            top = maximum(top, x)
    else:
        for c in range(0, columns, LANES):
            top = maximum(top, load16(scores, c))
    return max_lanes(top)


@device
def _exponentiate(scores: Ptr, weights: Ptr, columns: int, scale: float, top: float) -> Any:
    """weights = 2**(scale * scores - top) for a row; returns their sum. weights may be scores."""
    slope, shift = splat(scale), splat(-top)
    total = splat(np.float32(0.0))
    for c in range(0, columns, LANES):
        weight = exp2(fma(load16(scores, c), slope, shift))
        total = add(total, weight)
        store16(weights, c, weight)
    return sum_lanes(total)


@device
def _attend_rows(
    packed: Ptr, scratch: Scratch, shape: Shape, tile: int, count: int, block: Any, first_pos: int
) -> None:
    """One tile of keys against rows [row, row + rows) of the task; block = (row, rows).

    tile: position of its first key; count: keys in it (rounded up to 16); first_pos: position of
    the task's first token.
    """
    row, rows = block
    low_pos = first_pos + row // shape.group
    high_pos = first_pos + (row + rows - 1) // shape.group
    # Rows see keys up to their own position: the tile's later columns need no product.
    columns = min(count, (high_pos - tile) // LANES * LANES + LANES)
    if high_pos < tile or low_pos - shape.window >= tile + count - 1:
        return
    head_dim = shape.head_dim
    scores, weights = as_f32(scratch.scores), pointer_like(packed, scratch.weights)
    words = words_in(packed, head_dim)
    q = shifted(pointer_like(packed, scratch.q), row * head_dim)
    k = pointer_like(packed, scratch.k)
    _product(rows, columns, q, words, k, KEY_TILE, words, scores, KEY_TILE, None)
    maxima, sums = (
        shifted(as_f32(scratch.running_max), row),
        shifted(as_f32(scratch.running_sum), row),
    )
    alpha = as_f32(scratch.alpha)
    scale = np.float32(shape.scale)
    # One loop per stage: rows are independent, so the long reductions of several overlap.
    for r in range(rows):
        position = first_pos + (row + r) // shape.group
        low, high = max(0, position + 1 - shape.window - tile), position + 1 - tile
        top = _mask_and_max(shifted(scores, r * KEY_TILE), columns, low, high)
        old = maxima[r]
        maxima[r] = max(old, top * scale)
        alpha[r] = old - maxima[r]
    store16(alpha, 0, exp2(load16(alpha, 0)))
    for r in range(rows):
        at = r * KEY_TILE
        total = _exponentiate(shifted(scores, at), shifted(weights, at), columns, scale, maxima[r])
        sums[r] = sums[r] * alpha[r] + total
    acc = shifted(as_f32(scratch.acc), row * head_dim)
    v = pointer_like(packed, scratch.v)
    depth, stride = words_in(packed, columns), words_in(packed, KEY_TILE)
    _product(rows, head_dim, weights, stride, v, head_dim, depth, acc, head_dim, alpha)


# ---- one task ------------------------------------------------------------------------------------


@device
def _load_queries(
    q: Ptr, packed: Ptr, scratch: Scratch, shape: Shape, tokens: Any, head: int, row: int
) -> None:
    """Copy query rows together, from `row` on, and reset their state. tokens = (first, count)."""
    first, count = tokens
    head_dim = shape.head_dim
    target = shifted(pointer_like(packed, scratch.q), row * head_dim)
    acc = shifted(as_f32(scratch.acc), row * head_dim)
    width = shape.group * head_dim
    zero = splat(np.float32(0.0))
    for t in range(count):
        source = shifted(q, (first + t) * shape.q_stride + head * width)
        for d in range(0, width, LANES):
            store16(target, t * width + d, load16(source, d))
            store16(acc, t * width + d, zero)
    maxima, sums = as_f32(scratch.running_max), as_f32(scratch.running_sum)
    for r in range(row, row + count * shape.group):
        maxima[r] = np.float32(LOWEST)
        sums[r] = np.float32(0.0)


@device
def _store_outputs(
    out: Ptr, scratch: Scratch, shape: Shape, tokens: Any, head: int, from_row: int
) -> None:
    first, count = tokens
    head_dim = shape.head_dim
    acc = shifted(as_f32(scratch.acc), from_row * head_dim)
    sums = shifted(as_f32(scratch.running_sum), from_row)
    for t in range(count):
        for g in range(shape.group):
            row = t * shape.group + g
            inverse = splat(np.float32(1.0) / sums[row])
            query_head = head * shape.group + g
            at = ((first + t) * shape.kv_heads * shape.group + query_head) * head_dim
            for d in range(0, head_dim, LANES):
                store16(out, at + d, mul(load16(acc, row * head_dim + d), inverse))


@device
def _store_partial(partial: Ptr, scratch: Scratch, from_row: int, rows: int, head_dim: int) -> None:
    """acc [rows, head_dim], then the maxima [rows], then the sums [rows]."""
    acc = shifted(as_f32(scratch.acc), from_row * head_dim)
    maxima = shifted(as_f32(scratch.running_max), from_row)
    sums = shifted(as_f32(scratch.running_sum), from_row)
    for d in range(0, rows * head_dim, LANES):
        store16(partial, d, load16(acc, d))
    for r in range(rows):
        partial[rows * head_dim + r] = maxima[r]
        partial[rows * (head_dim + 1) + r] = sums[r]


@device
def _row_of(i: int, tasks: Any, tables: Any) -> tuple[int, int]:
    """A task's tokens in the flat batch: the first, and how many."""
    first = np.int64(tables[1][tasks[i, 0]]) + tasks[i, 2]
    return first, tasks[i, 3]


@device
def run_task(i: int, tasks: Any, data: Any, tables: Any, scratch: Scratch, shape: Shape) -> None:
    """Task i, and those chained to it, whose keys are the same and visible to all their rows.

    data = (q, k, v, out, packed, item, k_address, v_address, partials).
    """
    q, k, v, out, packed, item, k_address, v_address, partials = data
    block_tables, cu_seqlens_q, seq_lens = tables
    seq, head, key_lo, key_hi = tasks[i, 0], tasks[i, 1], tasks[i, 4], tasks[i, 5]
    rows = 0
    member = i
    while member >= 0:
        _load_queries(q, packed, scratch, shape, _row_of(member, tasks, tables), head, rows)
        rows += tasks[member, 3] * shape.group
        member = tasks[member, 8]
    tokens: Any = np.int64(cu_seqlens_q[seq + 1]) - np.int64(cu_seqlens_q[seq])
    position = np.int64(seq_lens[seq]) - tokens + tasks[i, 2]
    if tasks[i, 8] >= 0:
        position = key_hi  # rows of several sequences, all behind these keys
    table = shifted(block_tables, seq * shape.table_stride)
    low = max(key_lo, position + 1 - shape.window)
    k_rows, v_rows = as_i64(scratch.k_rows), as_i64(scratch.v_rows)
    # Blocks of equal size: 8 rows run as 4 + 4, not 6 + 2.
    blocks = (rows + MAX_ROWS - 1) // MAX_ROWS
    for tile in range(key_lo, key_hi, KEY_TILE):
        columns = (min(KEY_TILE, key_hi - tile) + LANES - 1) // LANES * LANES
        keys = (tile, columns, low, key_hi)
        _locate(k_rows, k_address, scratch.zeros, item, table, shape, head, keys)
        _locate(v_rows, v_address, scratch.zeros, item, table, shape, head, keys)
        _pack_k(k, k_rows, pointer_like(packed, scratch.k), columns, shape.head_dim)
        _pack_v(v, v_rows, pointer_like(packed, scratch.v), columns, shape.head_dim)
        for b in range(blocks):
            row = rows * b // blocks
            block = (row, rows * (b + 1) // blocks - row)
            _attend_rows(packed, scratch, shape, tile, columns, block, position)
    row = 0
    member = i
    while member >= 0:
        count = tasks[member, 3] * shape.group
        if tasks[member, 6] == 1:
            _store_outputs(out, scratch, shape, _row_of(member, tasks, tables), head, row)
        else:
            partial = shifted(partials, tasks[member, 7])
            _store_partial(partial, scratch, row, count, shape.head_dim)
        row += count
        member = tasks[member, 8]
