"""RMSNorm on the CPU, alone or with the residual sum before it.

    out = round(x * rsqrt(mean(x^2) + eps)) * weight      (Zhang & Sennrich, 2019; rounding as in HF
                                                           Llama: once before the weight, once after)

Bound by memory: x is read once (the second pass finds it in L1) and out written once; with the
residual two reads and two writes. Sums are float32, in an order that depends on D alone.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from trident_kernels.cpu.jit import device, kernel
from trident_kernels.cpu.simd import (
    LANES,
    Ptr,
    add,
    as_bf16,
    as_f32,
    fma,
    load1,
    load16,
    mul,
    rounded,
    shifted,
    splat,
    store1,
    store16,
    sum_lanes,
)


@device
def normalize_row(x: Ptr, weight: Ptr, out: Ptr, d: int, eps: float) -> None:
    """RMSNorm of d elements; out may be x."""
    whole = d // LANES * LANES
    even, odd = splat(np.float32(0.0)), splat(np.float32(0.0))
    i = 0
    while whole - i >= 2 * LANES:
        a, b = load16(x, i), load16(x, i + LANES)
        even, odd = fma(a, a, even), fma(b, b, odd)
        i += 2 * LANES
    if whole - i >= LANES:
        a = load16(x, i)
        even = fma(a, a, even)
    total = sum_lanes(add(even, odd))
    for j in range(whole, d):
        total += load1(x, j) * load1(x, j)
    scale = np.float32(1.0) / np.sqrt(total / np.float32(d) + np.float32(eps))
    factor = splat(scale)
    for j in range(0, whole, LANES):
        unit = rounded(out, mul(load16(x, j), factor))
        store16(out, j, mul(unit, load16(weight, j)))
    for j in range(whole, d):
        store1(out, j, rounded(out, load1(x, j) * scale) * load1(weight, j))


@device
def _add_row(x: Ptr, residual: Ptr, d: int) -> None:
    """residual += x, rounded to the dtype."""
    whole = d // LANES * LANES
    for j in range(0, whole, LANES):
        store16(residual, j, add(load16(residual, j), load16(x, j)))
    for j in range(whole, d):
        store1(residual, j, load1(residual, j) + load1(x, j))


@device
def norm_rows(
    x: Ptr, weight: Ptr, out: Ptr, rows: range, d: int, x_stride: int, eps: float
) -> None:
    """RMSNorm of some rows of x (row stride x_stride) into the same rows of out."""
    for row in rows:
        normalize_row(shifted(x, row * x_stride), weight, shifted(out, row * d), d, eps)


@device
def add_norm_rows(data: Any, rows: range, d: int, stride: int, eps: float) -> None:
    """residual += x, then RMSNorm: data = (x, residual, weight, out); stride is the residual's."""
    x, residual, weight, out = data
    for row in rows:
        total = shifted(residual, row * stride)
        _add_row(shifted(x, row * d), total, d)
        normalize_row(total, weight, shifted(out, row * d), d, eps)


@kernel(parallel_from=1 << 17)
def _rms_norm(
    mode: int,
    threads: int,
    x: int,
    weight: int,
    out: int,
    n_rows: int,
    d: int,
    x_stride: int,
    eps: float,
) -> None:
    """Addresses of x [n_rows, d] (row stride x_stride), weight [d], out [n_rows, d]."""
    for t in numba.prange(threads):
        rows = range(n_rows * t // threads, n_rows * (t + 1) // threads)
        if mode == 1:
            norm_rows(as_bf16(x), as_bf16(weight), as_bf16(out), rows, d, x_stride, eps)
        else:
            norm_rows(as_f32(x), as_f32(weight), as_f32(out), rows, d, x_stride, eps)


@kernel(parallel_from=1 << 16)
def _add_rms_norm(
    mode: int,
    threads: int,
    x: int,
    residual: int,
    weight: int,
    out: int,
    n_rows: int,
    d: int,
    stride: int,
    eps: float,
) -> None:
    """Addresses of x, residual (updated, row stride `stride`), weight [d], out; [n_rows, d]."""
    for t in numba.prange(threads):
        rows = range(n_rows * t // threads, n_rows * (t + 1) // threads)
        if mode == 1:
            bf16 = (as_bf16(x), as_bf16(residual), as_bf16(weight), as_bf16(out))
            add_norm_rows(bf16, rows, d, stride, eps)
        else:
            f32 = (as_f32(x), as_f32(residual), as_f32(weight), as_f32(out))
            add_norm_rows(f32, rows, d, stride, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    d = x.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.contiguous().view(-1, d)
    rows = x.shape[0]
    mode = 1 if x.dtype is torch.bfloat16 else 0
    addresses = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
    _rms_norm(rows * d, mode, *addresses, rows, d, x.stride(0), eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    rows, d = x.shape
    mode = 1 if x.dtype is torch.bfloat16 else 0
    addresses = (x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr())
    _add_rms_norm(rows * d, mode, *addresses, rows, d, residual.stride(0), eps)
    return out
