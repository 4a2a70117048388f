"""Linear layers in bfloat16 on CPUs with a bfloat16 dot product.

The weight is kept only as packed here: panels of 64 outputs, in each the pairs of inputs one after
the other, so that any product reads it front to back:

    panel p:  word[k, j] = (W[64 p + j, 2 k], W[64 p + j, 2 k + 1])     k < in / 2, j < 64

One row is bound by reading the weight, many rows by arithmetic: 2 * T * in * out operations. Rows are
taken six at a time at most, which fills the registers (see tile.py). A row's bits do not depend on
the rows beside it.
"""

from __future__ import annotations

import numba
import torch
from torch import Tensor

from trident_kernels import memory
from trident_kernels.cpu.jit import device, kernel
from trident_kernels.cpu.simd import (
    LANES,
    Ptr,
    add,
    as_bf16,
    as_f32,
    load16,
    native_bf16_dot,
    shifted,
    stack_f32,
    store16,
)
from trident_kernels.cpu.tile import MAX_ROWS, multiply_rows, shifted_words

PANEL = 4  # vectors: 64 outputs
COLUMNS = PANEL * LANES
SCRATCH = MAX_ROWS * COLUMNS  # float32 that a thread needs
ROW_CHUNK = 96  # rows whose inputs stay in the second-level cache while the weight passes by


def can_multiply(weight: Tensor) -> bool:
    """Whether this weight [out, in] can be packed and multiplied here."""
    whole = weight.shape[1] % 2 == 0 and weight.shape[1] > 0
    return weight.is_cpu and weight.dtype is torch.bfloat16 and whole and native_bf16_dot()


def pack_bias(bias: Tensor | None, out_features: int) -> Tensor:
    """Bias [out] or None -> float32, filled up to a multiple of 16 with 0."""
    packed = memory.zeros((-(-out_features // LANES) * LANES,), torch.float32)
    if bias is not None:
        packed[:out_features] = bias
    return packed


def pack(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weight [out, in] bfloat16 -> packed words, int32; and the packed bias.

    Outputs are filled up to a multiple of 16 with 0.
    """
    packed_bias = pack_bias(bias, weight.shape[0])
    depth, columns = weight.shape[1] // 2, len(packed_bias)
    words = weight.detach().contiguous().view(torch.int32)
    packed = memory.zeros((columns * depth,), torch.int32)
    for first in range(0, columns, COLUMNS):
        width = min(COLUMNS, columns - first)
        panel = packed[first * depth :][: width * depth].view(depth, width)
        rows = words[first : first + width]
        panel[:, : len(rows)] = rows.t()
    return packed, packed_bias


@device
def _columns(
    vectors: int, data: tuple[Ptr, Ptr, Ptr, Ptr], sizes: tuple[int, ...], scratch: Ptr
) -> None:
    """One to four neighbouring vectors of outputs, for all rows; data = (x, weight, bias, out) there."""
    x, weight, bias, out = data
    rows, x_stride, depth, weight_stride, out_stride = sizes
    tiles = (rows + MAX_ROWS - 1) // MAX_ROWS
    for tile in range(tiles):
        first, last = rows * tile // tiles, rows * (tile + 1) // tiles
        inputs = shifted_words(x, first * x_stride)
        multiply_rows(
            vectors, last - first, inputs, x_stride, weight, weight_stride, depth, scratch,
            COLUMNS, None,
        )  # fmt: skip
        for row in range(first, last):
            for v in range(vectors):
                product = load16(scratch, (row - first) * COLUMNS + v * LANES)
                result = add(product, load16(bias, v * LANES))
                store16(out, row * out_stride + v * LANES, result)


@device
def _vectors(
    span: tuple[int, int, int], data: tuple[Ptr, Ptr, Ptr, Ptr], rows: int, strides: tuple[int, int], depth: int, scratch: Ptr
) -> None:  # fmt: skip
    """Vectors span[0] to span[1] of the span[2] that there are, panel by panel."""
    first, last, total = span
    x, weight, bias, out = data
    x_stride, out_stride = strides
    v = first
    while v < last:
        panel = v // PANEL * PANEL
        width = min(PANEL, total - panel)
        count = min(last, panel + width) - v
        start = shifted_words(weight, panel * LANES * depth + (v - panel) * LANES)
        here = (x, start, shifted(bias, v * LANES), shifted(out, v * LANES))
        sizes = (rows, x_stride, depth, width * LANES, out_stride)
        if count == 4:
            _columns(4, here, sizes, scratch)
        elif count == 3:
            _columns(3, here, sizes, scratch)
        elif count == 2:
            _columns(2, here, sizes, scratch)
        else:
            _columns(1, here, sizes, scratch)
        v += count


@device
def multiply_share(
    share: tuple[int, int], addresses: tuple[int, int, int, int], rows: int, x_stride: int, depth: int, vectors: int, scratch: Ptr
) -> None:  # fmt: skip
    """The outputs of one of several threads: share = (which, of how many).

    addresses of x [rows, 2 * depth] (row stride in words), the packed weight, bias float32
    [16 * vectors], and out [rows, 16 * vectors].
    """
    which, threads = share
    x, weight, bias, out = addresses
    first, last = vectors * which // threads, vectors * (which + 1) // threads
    out_stride = vectors * LANES
    for row in range(0, rows, ROW_CHUNK):
        count = min(ROW_CHUNK, rows - row)
        inputs = shifted_words(as_bf16(x), row * x_stride)
        results = shifted(as_bf16(out), row * out_stride)
        data = (inputs, as_bf16(weight), as_f32(bias), results)
        _vectors((first, last, vectors), data, count, (x_stride, out_stride), depth, scratch)


@kernel(parallel_from=1 << 17)
def _linear(
    mode: int,
    threads: int,
    x: int,
    weight: int,
    bias: int,
    out: int,
    rows: int,
    x_stride: int,
    depth: int,
    vectors: int,
) -> None:
    """As multiply_share, by all threads."""
    for t in numba.prange(threads):
        scratch = stack_f32(SCRATCH)
        addresses = (x, weight, bias, out)
        multiply_share((t, threads), addresses, rows, x_stride, depth, vectors, scratch)


def linear(x: Tensor, packed: Tensor, bias: Tensor, out_features: int) -> Tensor:
    """x [T, in] -> x @ weight.T + bias [T, out], of what `pack` made; T is at least 1."""
    rows, in_features = x.shape
    if x.stride(1) != 1 or x.stride(0) % 2:
        x = x.contiguous()
    depth = in_features // 2
    vectors = -(-out_features // LANES)
    out = torch.empty((rows, vectors * LANES), dtype=torch.bfloat16)
    _linear(
        rows * depth * vectors * LANES,
        1,
        x.data_ptr(),
        packed.data_ptr(),
        bias.data_ptr(),
        out.data_ptr(),
        rows,
        x.stride(0) // 2,
        depth,
        vectors,
    )
    return out if out.shape[1] == out_features else out[:, :out_features].contiguous()
