"""SiLU-gated product on the CPU.

    out = round(gate * sigmoid(gate)) * up            gate, up = halves of each row

Bound by memory: two reads and one write per output element.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from trident_kernels.cpu.jit import device, kernel
from trident_kernels.cpu.simd import (
    LANES,
    Ptr,
    Vec,
    add,
    as_bf16,
    as_f32,
    div,
    exp2,
    first_lane,
    load1,
    load16,
    minimum,
    mul,
    rounded,
    shifted,
    splat,
    store1,
    store16,
)

MINUS_LOG2_E = -1.4426950408889634


@device
def _silu(x: Vec) -> Vec:
    # The bound changes nothing: x * 2**-127 is below 1e-30 for every x that reaches it. Second
    # operand, since minimum passes on a NaN only there.
    power = minimum(splat(np.float32(127.0)), mul(x, splat(np.float32(MINUS_LOG2_E))))
    decay = exp2(power)
    return div(x, add(splat(np.float32(1.0)), decay))


@device
def gate_rows(gate_up: Ptr, out: Ptr, rows: range, d: int, stride: int) -> None:
    """Some rows of gate_up [rows, 2 * d] (row stride `stride`) into the same rows of out."""
    whole = d // LANES * LANES
    for row in rows:
        gate, target = shifted(gate_up, row * stride), shifted(out, row * d)
        up = shifted(gate, d)
        for j in range(0, whole, LANES):
            store16(target, j, mul(rounded(out, _silu(load16(gate, j))), load16(up, j)))
        for j in range(whole, d):
            activated = first_lane(_silu(splat(load1(gate, j))))
            store1(target, j, rounded(out, activated) * load1(up, j))


@kernel(parallel_from=1 << 15)
def _silu_and_mul(
    mode: int, threads: int, gate_up: int, out: int, n_rows: int, d: int, stride: int
) -> None:
    """Addresses of gate_up [n_rows, 2 * d] (row stride `stride`) and out [n_rows, d]."""
    for t in numba.prange(threads):
        rows = range(n_rows * t // threads, n_rows * (t + 1) // threads)
        if mode == 1:
            gate_rows(as_bf16(gate_up), as_bf16(out), rows, d, stride)
        else:
            gate_rows(as_f32(gate_up), as_f32(out), rows, d, stride)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    rows, width = gate_up.shape
    d = width // 2
    out = torch.empty((rows, d), dtype=gate_up.dtype)
    mode = 1 if gate_up.dtype is torch.bfloat16 else 0
    stride = gate_up.stride(0)
    _silu_and_mul(rows * d, mode, gate_up.data_ptr(), out.data_ptr(), rows, d, stride)
    return out
