"""Linear layers with int8 weights and inputs (W8A8) on CPUs with VNNI.

    W[j, k] ~ s[j, g] * w[j, k]     w, a from -127 to 127; k in group g of 64 inputs
    x[r, k] ~ t[r, g] * a[r, k]     made at each call

One scale per row would not do: single inputs of a decoder are far larger than the others (Dettmers et
al., "LLM.int8()", 2022). The weight is packed as in linear.py, four inputs to a word, and each group's
scales lie behind its words:

    panel p, group g:  word[i, j] = w[64 p + j, 64 g + 4 i .. + 3] + 128     i < 16, j < 64
                       word[16, j] = s[64 p + j, g]
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from trident_kernels import memory
from trident_kernels.cpu.jit import device, kernel
from trident_kernels.cpu.linear import COLUMNS, PANEL, ROW_CHUNK, pack_bias
from trident_kernels.cpu.simd import (
    LANES,
    Ptr,
    add,
    as_bf16,
    as_f32,
    as_i32,
    fma,
    load16,
    max_lanes,
    maximum,
    shifted,
    splat,
    stack_f32,
    store16,
    sub,
    sum_lanes,
)
from trident_kernels.cpu.tile_int8 import (
    BLOCK,
    GROUP,
    MAX_ROWS,
    multiply_int8,
    native_int8_dot,
    store_bytes,
)

SCRATCH = MAX_ROWS * COLUMNS  # float32 that a thread needs
_FEW = 3  # rows up to which a tile is four vectors wide, so that sums do not wait for each other


def is_available() -> bool:
    """Whether this CPU multiplies bytes."""
    return native_int8_dot()


def can_multiply(weight: Tensor) -> bool:
    """Whether this weight [out, in] can be packed and multiplied here."""
    whole = weight.shape[1] % GROUP == 0 and weight.shape[1] > 0
    floating = weight.dtype in (torch.float32, torch.bfloat16)
    return weight.is_cpu and floating and whole and native_int8_dot()


def pack(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weight [out, in] -> packed words, int32; and the packed bias.

    Outputs are filled up to a multiple of 16 with 0.
    """
    packed_bias = pack_bias(bias, weight.shape[0])
    groups, columns = weight.shape[1] // GROUP, len(packed_bias)
    packed = memory.zeros((columns * groups * BLOCK,), torch.int32)
    for first in range(0, columns, COLUMNS):
        width = min(COLUMNS, columns - first)
        rows = weight[first : first + width].detach().float().view(-1, groups, GROUP)
        scales = rows.abs().amax(dim=2) / 127
        steps = (rows / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(2)).round_()
        words = (steps + 128).to(torch.uint8).view(torch.int32)  # [rows, groups, 16]
        start, size = first * groups * BLOCK, width * groups * BLOCK
        panel = packed[start : start + size].view(groups, BLOCK, width)
        panel[:, :-1, : len(rows)] = words.permute(1, 2, 0)
        panel[:, -1, : len(rows)] = scales.t().contiguous().view(torch.int32)
    return packed, packed_bias


@device
def _quantize_group(x: Ptr, out: Ptr, at: int) -> tuple[float, float]:
    """Bytes of 64 inputs into out[at:]; the scale, and the sum of the bytes."""
    largest, total = splat(np.float32(0.0)), splat(np.float32(0.0))
    for j in range(0, GROUP, LANES):
        value = load16(x, j)
        largest = maximum(largest, maximum(value, sub(splat(np.float32(0.0)), value)))
        total = add(total, value)
    scale = max_lanes(largest) / np.float32(127.0)
    inverse = splat(np.float32(1.0) / scale if scale > 0 else np.float32(0.0))
    sums = splat(np.float32(0.0))
    for j in range(0, GROUP, LANES):
        # Adding 1.5 * 2**23 rounds to an integer, whose low byte is the result.
        shifted_up = fma(load16(x, j), inverse, splat(np.float32(12582912.0)))
        store_bytes(out, at + j, shifted_up)
        sums = add(sums, sub(shifted_up, splat(np.float32(12582912.0))))
    # Zero, or NaN if an input is not finite: the row's result must show it.
    return scale + sum_lanes(total) * np.float32(0.0), sum_lanes(sums)


@device
def quantize_rows(data: tuple[Ptr, Ptr, Ptr, Ptr], rows: range, groups: int, stride: int) -> None:
    """data = (x, its bytes, scales, starts of the sums); see _quantize."""
    x, out, scales, starts = data
    for row in rows:
        for g in range(groups):
            at = row * groups + g
            scale, total = _quantize_group(shifted(x, row * stride + g * GROUP), out, at * GROUP)
            scales[at] = scale
            starts[at] = np.int32(-128.0 * total)


@kernel(parallel_from=1 << 16)
def _quantize(
    mode: int,
    threads: int,
    x: int,
    out: int,
    scales: int,
    starts: int,
    rows: int,
    groups: int,
    stride: int,
) -> None:
    """Addresses of x [rows, 64 * groups] (row stride `stride`), its bytes, and per group the scale
    and the start of its sum, [rows, groups] float32 and int32.
    """
    for t in numba.prange(threads):
        mine = range(rows * t // threads, rows * (t + 1) // threads)
        if mode == 1:
            data = (as_bf16(x), as_i32(out), as_f32(scales), as_i32(starts))
            quantize_rows(data, mine, groups, stride)
        else:
            data_f32 = (as_f32(x), as_i32(out), as_f32(scales), as_i32(starts))
            quantize_rows(data_f32, mine, groups, stride)


@device
def _columns(
    vectors: int, data: tuple[Ptr, ...], sizes: tuple[int, ...], most: int, scratch: Ptr
) -> None:
    """One to four neighbouring vectors of outputs, for all rows, `most` at a time."""
    x, scales, starts, weight, bias, out = data
    rows, groups, weight_stride, out_stride = sizes
    words = groups * (GROUP // 4)
    tiles = (rows + most - 1) // most
    for tile in range(tiles):
        first, last = rows * tile // tiles, rows * (tile + 1) // tiles
        multiply_int8(
            vectors, last - first, shifted(x, first * words), words,
            shifted(scales, first * groups), shifted(starts, first * groups), groups,
            weight, weight_stride, scratch, COLUMNS,
        )  # fmt: skip
        for row in range(first, last):
            for v in range(vectors):
                product = load16(scratch, (row - first) * COLUMNS + v * LANES)
                result = add(product, load16(bias, v * LANES))
                store16(out, row * out_stride + v * LANES, result)


@device
def _vectors(
    span: tuple[int, int, int], data: tuple[Ptr, ...], rows: int, groups: int, scratch: Ptr
) -> None:
    """Vectors span[0] to span[1] of the span[2] that there are, panel by panel."""
    first, last, total = span
    x, scales, starts, weight, bias, out = data
    depth = groups * BLOCK
    v = first
    while v < last:
        panel = v // PANEL * PANEL
        width = min(PANEL, total - panel)
        count = min(last, panel + width) - v
        if rows > _FEW:
            count = min(count, 2)
        at = shifted(weight, panel * LANES * depth + (v - panel) * LANES)
        here = (x, scales, starts, at, shifted(bias, v * LANES), shifted(out, v * LANES))
        sizes = (rows, groups, width * LANES, total * LANES)
        if count == 4:
            _columns(4, here, sizes, _FEW, scratch)
        elif count == 3:
            _columns(3, here, sizes, _FEW, scratch)
        elif count == 2:
            _columns(2, here, sizes, MAX_ROWS, scratch)
        else:
            _columns(1, here, sizes, MAX_ROWS, scratch)
        v += count


@device
def multiply_share(
    share: tuple[int, int], inputs: tuple[int, int, int], weight: int, bias: int, out: Ptr, rows: int, groups: int, vectors: int, scratch: Ptr
) -> None:  # fmt: skip
    """The outputs of one of several threads: share = (which, of how many).

    inputs: addresses of what _quantize made of x, the bytes, scales and starts; then those of the
    packed weight and of bias float32 [16 * vectors]; out [rows, 16 * vectors].
    """
    which, threads = share
    quantized, scales, starts = inputs
    columns = vectors * LANES
    span = (vectors * which // threads, vectors * (which + 1) // threads, vectors)
    for row in range(0, rows, ROW_CHUNK):
        count = min(ROW_CHUNK, rows - row)
        at = row * groups
        values = shifted(as_i32(quantized), at * (GROUP // 4))
        factors, begins = shifted(as_f32(scales), at), shifted(as_i32(starts), at)
        target = shifted(out, row * columns)
        data = (values, factors, begins, as_i32(weight), as_f32(bias), target)
        _vectors(span, data, count, groups, scratch)


@kernel(parallel_from=1 << 18)
def _linear_int8(
    mode: int,
    threads: int,
    x: int,
    scales: int,
    starts: int,
    weight: int,
    bias: int,
    out: int,
    rows: int,
    groups: int,
    vectors: int,
) -> None:
    """As multiply_share, by all threads."""
    for t in numba.prange(threads):
        scratch = stack_f32(SCRATCH)
        share, inputs = (t, threads), (x, scales, starts)
        if mode == 1:
            multiply_share(
                share, inputs, weight, bias, as_bf16(out), rows, groups, vectors, scratch
            )
        else:
            multiply_share(share, inputs, weight, bias, as_f32(out), rows, groups, vectors, scratch)


def linear(x: Tensor, packed: Tensor, bias: Tensor, out_features: int) -> Tensor:
    """x [T, in] -> x @ weight.T + bias [T, out], of what `pack` made; T is at least 1."""
    rows, in_features = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    groups = in_features // GROUP
    columns = bias.shape[0]
    mode = 1 if x.dtype is torch.bfloat16 else 0
    # One allocation: bytes, then scales and starts.
    work = torch.empty(rows * groups * (GROUP // 4 + 2), dtype=torch.int32)
    quantized = work.data_ptr()
    scales = quantized + rows * in_features
    starts = scales + 4 * rows * groups
    _quantize(
        rows * in_features, mode, x.data_ptr(), quantized, scales, starts, rows, groups, x.stride(0)
    )
    out = torch.empty((rows, columns), dtype=x.dtype)
    _linear_int8(
        rows * in_features * columns,
        mode,
        quantized,
        scales,
        starts,
        packed.data_ptr(),
        bias.data_ptr(),
        out.data_ptr(),
        rows,
        groups,
        columns // LANES,
    )
    return out if columns == out_features else out[:, :out_features].contiguous()
