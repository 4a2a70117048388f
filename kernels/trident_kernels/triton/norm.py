"""RMSNorm, and the residual addition before it, one program per row.

    residual = round(residual + x)             only with a residual; rounded to the dtype
    out      = round(r * rsqrt(mean(r^2) + eps)) * weight

Bound by memory: each row is read once and stays in registers.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from trident_kernels.triton.runtime import jit, launch, power_of_two


@jit()
def _rms_norm(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D_PAD)
    inside = d < D
    x = tl.load(x_ptr + row * x_stride + d, mask=inside, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if HAS_RESIDUAL:
        cells = residual_ptr + row * residual_stride + d
        x += tl.load(cells, mask=inside, other=0.0).to(tl.float32)
        tl.store(cells, x.to(dtype), mask=inside)
        x = x.to(dtype).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    unit = (x * scale).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + d, (unit * weight).to(dtype), mask=inside)


def _start(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    rows, d = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((rows, d), dtype=x.dtype, device=x.device)
    width = power_of_two(d)
    launch(
        _rms_norm,
        (rows,),
        x,
        residual,
        weight,
        out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        D=d,
        D_PAD=width,
        HAS_RESIDUAL=residual is not None,
        num_warps=min(16, max(1, width // 512)),
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _start(x.reshape(-1, x.shape[-1]), None, weight, eps).view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    assert residual.stride(1) == 1
    return _start(x, residual, weight, eps)
