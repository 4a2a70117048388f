"""All layers of a decoder in one call, for bfloat16 on CPUs with a bfloat16 dot product.

A step of one row multiplies 4 weights in each layer, in some ten microseconds each; starting threads for
every operation, and Python between them, would take a fifth of it. Here the threads start once for all
layers and meet between the operations:

    qkv = linear(normed)                            columns
    q = rope(qkv), keys and values written          tokens
    attended = attention(q)                         tasks, then their merge
    residual += linear(attended); norm              columns, then rows
    gated = silu(gate) * up, of linear(normed)      columns, then rows
    residual += linear(gated); norm                 columns, then rows

(what a line's threads divide among them is on its right). Each operation is that of its own file, so
the bits are those of the operations one by one.

Invariant: threads that meet must run at once; `runs_together` finds out whether they do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numba
import numpy as np
import torch
from torch import Tensor

from trident_kernels.cpu.activation import gate_rows
from trident_kernels.cpu.attend import Shape, scratch_bytes
from trident_kernels.cpu.attention import (
    LOG2_E,
    NO_WINDOW,
    lay_out_scratch,
    merge,
    plan_tasks,
    run_tasks,
)
from trident_kernels.cpu.barrier import FOR_EVER, WORDS, meet
from trident_kernels.cpu.barrier import is_available as has_barrier
from trident_kernels.cpu.jit import device, kernel, threads
from trident_kernels.cpu.linear import SCRATCH, multiply_share
from trident_kernels.cpu.linear_int8 import multiply_share as multiply_int8_share
from trident_kernels.cpu.linear_int8 import quantize_rows
from trident_kernels.cpu.norm import add_norm_rows, norm_rows
from trident_kernels.cpu.rope import RopeLayout, rotate_tokens
from trident_kernels.cpu.simd import (
    LANES,
    as_bf16,
    as_f32,
    as_i32,
    as_i64,
    fetch_add,
    load16,
    native_bf16_dot,
    shifted,
    stack_f32,
    store16,
)
from trident_kernels.cpu.tile_int8 import GROUP
from trident_kernels.linear import Layout, LinearWeight

_PATIENCE = 300  # sleeps of 10 ms that a probe waits for other threads before it goes on alone
_LINE = 64  # bytes


class _Weight(NamedTuple):
    """A linear layer's weight: addresses as its kernel takes them."""

    weight: int
    bias: int
    is_int8: int


class _Layer(NamedTuple):
    """One layer's addresses, as they lie in a row of the table; norms are bfloat16 vectors."""

    input_norm: int
    q_norm: int  # 0: none
    k_norm: int
    post_norm: int
    next_norm: int  # that of the next layer's input, or the final one
    windowed: int  # 1 if it attends through the window
    qkv: _Weight
    output: _Weight
    gate_up: _Weight
    down: _Weight


_LAYER_FIELDS = 6 + 4 * 3


class _Step(NamedTuple):
    """What a call needs besides the layers: sizes, addresses of its tensors and of working memory."""

    num_layers: int
    num_tokens: int
    num_seqs: int
    num_logits: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rotary_dim: int
    window: int
    # The cache: keys of the first layer, and strides in elements.
    keys: int
    layer_stride: int
    values_offset: int
    block_size: int
    block_stride: int
    head_stride: int
    slot_stride: int
    table_stride: int
    # Inputs
    residual: int
    cos_sin: int
    positions: int
    slot_mapping: int
    block_tables: int
    cu_seqlens_q: int
    seq_lens: int
    logits_indices: int
    # Working memory; out is the result
    normed: int
    wide: int  # qkv, then gate and up
    query: int
    attended: int
    gated: int
    product: int
    last_residual: int
    quantized: int
    scales: int
    starts: int
    out: int


_STEP_FIELDS = len(_Step._fields)


@device
def _read_weight(table: Any, at: int) -> _Weight:
    return _Weight(table[at], table[at + 1], table[at + 2])


@device
def _read_layer(table: Any, index: int) -> _Layer:
    at = index * _LAYER_FIELDS
    return _Layer(
        table[at], table[at + 1], table[at + 2], table[at + 3], table[at + 4], table[at + 5],
        _read_weight(table, at + 6), _read_weight(table, at + 9), _read_weight(table, at + 12),
        _read_weight(table, at + 15),
    )  # fmt: skip


@device
def _read_step(t: Any) -> _Step:
    return _Step(
        t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9], t[10], t[11], t[12], t[13],
        t[14], t[15], t[16], t[17], t[18], t[19], t[20], t[21], t[22], t[23], t[24], t[25], t[26],
        t[27], t[28], t[29], t[30], t[31], t[32], t[33], t[34], t[35], t[36], t[37],
    )  # fmt: skip


@device
def _shape(step: _Step, window: int, scale: float) -> Shape:
    return Shape(
        step.kv_heads, step.heads // step.kv_heads, step.head_dim, step.heads * step.head_dim,
        step.block_size, step.block_stride, step.head_stride, step.slot_stride, step.table_stride,
        window, scale,
    )  # fmt: skip


@device
def _share(total: int, share: tuple[int, int]) -> range:
    """One thread's part of `total` rows."""
    which, count = share
    return range(total * which // count, total * (which + 1) // count)


@device
def _prepare(weight: _Weight, x: int, rows: range, in_features: int, step: _Step) -> None:
    """Quantizes some rows of a product's input, if the weight is int8."""
    if weight.is_int8 == 1:
        data = (as_bf16(x), as_i32(step.quantized), as_f32(step.scales), as_i32(step.starts))
        quantize_rows(data, rows, in_features // GROUP, in_features)


@device
def _multiply(
    share: tuple[int, int], weight: _Weight, x: int, out: int, rows: int, in_features: int, out_features: int, step: _Step, scratch: Any
) -> None:  # fmt: skip
    """One thread's columns of a product of x [rows, in_features]."""
    vectors = out_features // LANES
    if weight.is_int8 == 1:
        inputs = (step.quantized, step.scales, step.starts)
        multiply_int8_share(
            share, inputs, weight.weight, weight.bias, as_bf16(out), rows, in_features // GROUP,
            vectors, scratch,
        )  # fmt: skip
    else:
        addresses = (x, weight.weight, weight.bias, out)
        depth = in_features // 2
        multiply_share(share, addresses, rows, depth, depth, vectors, scratch)


@device
def _gather(source: int, target: int, indices: int, rows: range, width: int) -> None:
    """Rows `indices` of source [*, width] into target."""
    index = as_i64(indices)
    for row in rows:
        from_row, to_row = shifted(as_bf16(source), index[row] * width), row * width
        for d in range(0, width, LANES):
            store16(as_bf16(target), to_row + d, load16(from_row, d))


@device
def _run(
    share: tuple[int, int], addresses: tuple[int, int], arrays: Any, scale: float, eps: float
) -> None:
    """What one thread does; addresses of the layers and of the step.

    arrays: the tasks of attention without and with a window, what they leave for the merge (empty if
    nothing), the counts, and this thread's memory.
    """
    table, step = as_i64(addresses[0]), _read_step(as_i64(addresses[1]))
    tasks, window_tasks, partial_results, counts, memory = arrays
    partials = partial_results.ctypes.data
    is_merged = len(partial_results) > 0
    # The barrier has a cache line of its own; behind it lies a count of tasks per layer.
    barrier = (counts.ctypes.data + _LINE - 1) // _LINE * _LINE
    met, counters = as_i64(barrier), barrier + _LINE
    _, count = share
    target = count
    tables = (as_i32(step.block_tables), as_i32(step.cu_seqlens_q), as_i32(step.seq_lens))
    full, windowed = _shape(step, NO_WINDOW, scale), _shape(step, step.window, scale)
    attention_scratch = lay_out_scratch(memory, full)
    scratch = stack_f32(SCRATCH)
    rows = step.num_tokens
    mine = _share(rows, share)
    residual = step.residual
    hidden, heads_width = step.hidden, step.heads * step.head_dim
    qkv_width = (step.heads + 2 * step.kv_heads) * step.head_dim
    rope_layout = RopeLayout(
        step.heads, step.kv_heads, step.head_dim, step.rotary_dim, qkv_width, step.block_size,
        step.block_stride, step.head_stride, step.slot_stride,
    )  # fmt: skip
    index = (as_i64(step.positions), as_i64(step.slot_mapping))
    first = _read_layer(table, 0)
    norm_rows(
        as_bf16(residual),
        as_bf16(first.input_norm),
        as_bf16(step.normed),
        mine,
        hidden,
        hidden,
        eps,
    )
    _prepare(first.qkv, step.normed, mine, hidden, step)
    meet(met, target, FOR_EVER)
    target += count
    for number in range(step.num_layers):
        layer = _read_layer(table, number)
        _multiply(share, layer.qkv, step.normed, step.wide, rows, hidden, qkv_width, step, scratch)
        meet(met, target, FOR_EVER)
        target += count
        keys = step.keys + 2 * number * step.layer_stride
        values = keys + 2 * step.values_offset
        with_norm = 1 if layer.q_norm != 0 else 0
        data = (
            as_bf16(step.wide), as_bf16(step.query), as_bf16(keys), as_bf16(values),
            as_bf16(layer.q_norm), as_bf16(layer.k_norm),
        )  # fmt: skip
        rotate_tokens(data, as_f32(step.cos_sin), index, mine, rope_layout, (with_norm, eps))
        meet(met, target, FOR_EVER)
        target += count
        cache = (
            as_bf16(step.query), as_bf16(keys), as_bf16(values), as_bf16(step.attended),
            as_bf16(step.query), 2, keys, values, as_f32(partials),
        )  # fmt: skip
        if layer.windowed == 0:
            run_tasks(counters + 8 * number, tasks, cache, tables, attention_scratch, full)
        else:
            run_tasks(
                counters + 8 * number, window_tasks, cache, tables, attention_scratch, windowed
            )
        meet(met, target, FOR_EVER)
        target += count
        if is_merged:
            if layer.windowed == 0:
                merge(share, tasks, as_bf16(step.attended), tables[1], as_f32(partials), full)
            else:
                merge(
                    share,
                    window_tasks,
                    as_bf16(step.attended),
                    tables[1],
                    as_f32(partials),
                    windowed,
                )
            meet(met, target, FOR_EVER)
            target += count
        attended = step.attended
        next_weight = _read_layer(table, min(number + 1, step.num_layers - 1)).qkv
        if number + 1 == step.num_layers:
            # No later layer attends to the other tokens: only their keys and values matter.
            rows = step.num_logits
            mine = _share(rows, share)
            attended, residual = step.query, step.last_residual
            _gather(step.attended, attended, step.logits_indices, mine, heads_width)
            _gather(step.residual, residual, step.logits_indices, mine, hidden)
            _prepare(layer.output, attended, mine, heads_width, step)
            meet(met, target, FOR_EVER)
            target += count
        elif layer.output.is_int8 == 1:
            _prepare(layer.output, attended, mine, heads_width, step)
            meet(met, target, FOR_EVER)
            target += count
        _multiply(
            share, layer.output, attended, step.product, rows, heads_width, hidden, step, scratch
        )
        meet(met, target, FOR_EVER)
        target += count
        sums = (
            as_bf16(step.product), as_bf16(residual), as_bf16(layer.post_norm),
            as_bf16(step.normed),
        )  # fmt: skip
        add_norm_rows(sums, mine, hidden, hidden, eps)
        _prepare(layer.gate_up, step.normed, mine, hidden, step)
        meet(met, target, FOR_EVER)
        target += count
        width = step.intermediate
        _multiply(
            share, layer.gate_up, step.normed, step.wide, rows, hidden, 2 * width, step, scratch
        )
        meet(met, target, FOR_EVER)
        target += count
        gate_rows(as_bf16(step.wide), as_bf16(step.gated), mine, width, 2 * width)
        _prepare(layer.down, step.gated, mine, width, step)
        meet(met, target, FOR_EVER)
        target += count
        _multiply(share, layer.down, step.gated, step.product, rows, width, hidden, step, scratch)
        meet(met, target, FOR_EVER)
        target += count
        normed = step.out if number + 1 == step.num_layers else step.normed
        sums = (
            as_bf16(step.product), as_bf16(residual), as_bf16(layer.next_norm), as_bf16(normed)
        )  # fmt: skip
        add_norm_rows(sums, mine, hidden, hidden, eps)
        if number + 1 < step.num_layers:
            _prepare(next_weight, step.normed, mine, hidden, step)
        meet(met, target, FOR_EVER)
        target += count


@kernel(parallel_from=0, with_serial=False)
def _decoder_layers(
    mode: int, threads: int, table: int, step_at: int, scale: float, eps: float
) -> None:
    """Addresses of the layers' table and of the step; scale is softmax_scale * log2(e)."""
    step = _read_step(as_i64(step_at))
    tables = (as_i32(step.block_tables), as_i32(step.cu_seqlens_q), as_i32(step.seq_lens))
    tasks, floats = plan_tasks(tables, step.num_seqs, _shape(step, NO_WINDOW, scale))
    window_tasks, window_floats = tasks, floats
    if step.window != NO_WINDOW:
        window_tasks, window_floats = plan_tasks(
            tables, step.num_seqs, _shape(step, step.window, scale)
        )
    partials = np.empty(max(floats, window_floats), np.float32)
    counts = np.zeros(2 * _LINE // 8 + step.num_layers, np.int64)
    memory = np.empty((threads, scratch_bytes(_shape(step, NO_WINDOW, scale))), np.uint8)
    # All arrays are named here: as long as the loop runs, Numba keeps what it sees used by it.
    for t in numba.prange(threads):
        arrays = (tasks, window_tasks, partials, counts, memory[t])
        _run((t, threads), (table, step_at), arrays, scale, eps)


@kernel(parallel_from=0, with_serial=False)
def _probe(mode: int, threads: int, counter: int, together: int) -> None:
    """Adds one to the int64 at `together` for each thread that has met all others."""
    for _ in numba.prange(threads):
        if meet(as_i64(counter), threads, _PATIENCE) == 1:
            fetch_add(as_i64(together))


@cache
def runs_together(count: int) -> bool:
    """Whether the iterations of a parallel loop over `count` threads really run at once.

    An OpenMP runtime may give fewer threads than were asked for, and run the rest afterwards.
    """
    if os.environ.get("OMP_DYNAMIC", "false").lower() in ("true", "1"):
        return False
    counts = np.zeros(WORDS + 1, np.int64)
    address = counts.ctypes.data
    _probe(1, 0, address, address + 8 * WORDS)
    return int(counts[WORDS]) == count


class Layer(Protocol):
    """The weights of one layer; H query heads and K kv heads of size D, intermediate size I."""

    @property
    def input_norm(self) -> Tensor:
        """[hidden], as all norms of the layer's input and output."""

    @property
    def qkv(self) -> LinearWeight:
        """[(H + 2K) * D, hidden]."""

    @property
    def q_norm(self) -> Tensor | None:
        """[D]."""

    @property
    def k_norm(self) -> Tensor | None:
        """[D]."""

    @property
    def output(self) -> LinearWeight:
        """[hidden, H * D]."""

    @property
    def post_attention_norm(self) -> Tensor:
        """[hidden]."""

    @property
    def gate_up(self) -> LinearWeight:
        """[2I, hidden]."""

    @property
    def down(self) -> LinearWeight:
        """[hidden, I]."""


class LayerStack:
    """The layers of a decoder, to be run in one call; made by `make`."""

    def __init__(
        self,
        layers: Sequence[Layer],
        final_norm: Tensor,
        *,
        heads: int,
        kv_heads: int,
        windows: Sequence[int | None],
        softmax_scale: float,
        eps: float,
    ) -> None:
        self._layers, self._final_norm = tuple(layers), final_norm  # what the table points to
        self._heads, self._kv_heads = heads, kv_heads
        self._hidden = len(final_norm)
        self._head_dim = layers[0].output.in_features // heads
        self._intermediate = layers[0].down.in_features
        self._window = next((window for window in windows if window is not None), NO_WINDOW)
        self._scale, self._eps = softmax_scale * LOG2_E, eps
        next_norms = [layer.input_norm for layer in layers[1:]] + [final_norm]
        self._table = np.asarray(
            [
                _layer_row(layer, next_norm, window is not None)
                for layer, next_norm, window in zip(layers, next_norms, windows)
            ],
            np.int64,
        )
        self._memory = torch.empty(0, dtype=torch.uint8)

    def run(
        self,
        residual: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        cache: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        logits_indices: Tensor,
    ) -> Tensor:
        """Runs all layers; the normalised hidden states of the tokens `logits_indices`, [L, hidden].

        Args:
            residual: the tokens' embeddings, [T, hidden] bfloat16, T at least 1; overwritten.
            cache: [layers, 2, N, K, B, D] bfloat16; keys and values are written at `slot_mapping`.
            logits_indices: [L] int64.
            cos_sin, positions, slot_mapping, block_tables, cu_seqlens_q, seq_lens: as in
                `rope_and_write_kv` and `paged_attention`.
        """
        assert residual.dtype is cache.dtype is torch.bfloat16 and residual.is_contiguous()
        if not runs_together(count := threads()):
            raise RuntimeError(f"the OpenMP runtime does not run {count} threads at once any more")
        assert cache.stride(5) == block_tables.stride(1) == 1 and cos_sin.is_contiguous()
        out = torch.empty((len(logits_indices), self._hidden), dtype=torch.bfloat16)
        step = np.asarray(
            (
                len(self._layers), len(residual), len(seq_lens), len(logits_indices), self._hidden,
                self._heads, self._kv_heads, self._head_dim, self._intermediate, cos_sin.shape[1],
                self._window, cache.data_ptr(), cache.stride(0), cache.stride(1), cache.shape[4],
                cache.stride(2), cache.stride(3), cache.stride(4), block_tables.stride(0),
                residual.data_ptr(), cos_sin.data_ptr(), positions.data_ptr(),
                slot_mapping.data_ptr(), block_tables.data_ptr(), cu_seqlens_q.data_ptr(),
                seq_lens.data_ptr(), logits_indices.data_ptr(),
                *self._working_memory(max(len(residual), len(logits_indices))), out.data_ptr(),
            ),
            np.int64,
        )  # fmt: skip
        assert len(step) == _STEP_FIELDS
        _decoder_layers(
            1, 1, self._table.ctypes.data, step.ctypes.data, float(self._scale), float(self._eps)
        )
        return out

    def _working_memory(self, rows: int) -> list[int]:
        """Addresses of the regions from `normed` to `starts`; kept, and grown when need be."""
        heads_width = self._heads * self._head_dim
        qkv_width = heads_width + 2 * self._kv_heads * self._head_dim
        widest = max(self._hidden, heads_width, self._intermediate)
        sizes = [
            2 * rows * self._hidden,  # normed
            2 * rows * max(qkv_width, 2 * self._intermediate),  # wide
            2 * rows * heads_width,  # query, then attended of the last layer
            2 * rows * heads_width,  # attended
            2 * rows * self._intermediate,  # gated
            2 * rows * self._hidden,  # product
            2 * rows * self._hidden,  # last residual
            rows * widest,  # quantized
            4 * rows * (widest // GROUP),  # scales
            4 * rows * (widest // GROUP),  # starts
        ]
        offsets = [0, *accumulate(-(-size // _LINE) * _LINE for size in sizes)]
        if len(self._memory) < offsets[-1] + _LINE:
            self._memory = torch.empty(offsets[-1] + _LINE, dtype=torch.uint8)
        begin = -(-self._memory.data_ptr() // _LINE) * _LINE
        return [begin + offset for offset in offsets[:-1]]


def _layer_row(layer: Layer, next_norm: Tensor, windowed: bool) -> list[int]:
    """One row of the table, in the order of `_Layer`."""
    row = [
        layer.input_norm.data_ptr(),
        0 if layer.q_norm is None else layer.q_norm.data_ptr(),
        0 if layer.k_norm is None else layer.k_norm.data_ptr(),
        layer.post_attention_norm.data_ptr(),
        next_norm.data_ptr(),
        int(windowed),
    ]
    for weight in _weights(layer):
        assert weight.bias is not None  # filled up where the weight is in panels or int8
        is_int8 = int(weight.layout is Layout.INT8)
        row += [weight.weight.data_ptr(), weight.bias.data_ptr(), is_int8]
    return row


def _weights(layer: Layer) -> tuple[LinearWeight, ...]:
    return layer.qkv, layer.output, layer.gate_up, layer.down


def make(
    layers: Sequence[Layer],
    final_norm: Tensor,
    *,
    heads: int,
    kv_heads: int,
    windows: Sequence[int | None],
    softmax_scale: float,
    eps: float,
) -> LayerStack | None:
    """A stack of these layers; None if they cannot run in one call here.

    They can in bfloat16, with weights in panels or int8, sizes that are multiples of 16, and at most
    one size of window.
    """
    weights = [weight for layer in layers for weight in _weights(layer)]
    sizes = {size for weight in weights for size in (weight.in_features, weight.out_features)}
    sizes.add(layers[0].output.in_features // heads)
    sizes.add(layers[0].down.in_features)
    if not (
        native_bf16_dot()
        and has_barrier()
        and final_norm.dtype is torch.bfloat16
        and all(weight.layout in (Layout.PANELS, Layout.INT8) for weight in weights)
        and all(size % LANES == 0 for size in sizes)
        and len({window for window in windows if window is not None}) <= 1
        and runs_together(threads())
    ):
        return None
    return LayerStack(
        layers, final_norm, heads=heads, kv_heads=kv_heads, windows=windows,
        softmax_scale=softmax_scale, eps=eps,
    )  # fmt: skip
