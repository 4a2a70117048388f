"""Split QKV, normalise heads (optional), rotate, and write K and V into the paged cache: one pass.

    rotated[i]       = x[i] * cos[i] - x[i + R/2] * sin[i]          i < R/2 (NeoX halves;
    rotated[i + R/2] = x[i + R/2] * cos[i] + x[i] * sin[i]           Su et al., 2021)
    rotated[i]       = x[i]                                         i >= R

Bound by memory: each element of qkv is read once and written once, to q or to the cache. Writes
exactly the T slots named by slot_mapping.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import torch
from torch import Tensor

from trident_kernels.cpu.jit import device, kernel
from trident_kernels.cpu.norm import normalize_row
from trident_kernels.cpu.simd import (
    LANES,
    Ptr,
    as_bf16,
    as_f32,
    as_i64,
    fma,
    load1,
    load16,
    mul,
    shifted,
    store1,
    store16,
    sub,
)


class RopeLayout(NamedTuple):
    """Sizes and strides in elements."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    qkv_stride: int
    block_size: int
    block_stride: int
    head_stride: int
    slot_stride: int


@device
def _rotate(x: Ptr, out: Ptr, cos_sin: Ptr, layout: RopeLayout) -> None:
    """Rotate one head; out may be x."""
    half = layout.rotary_dim // 2
    whole = half // LANES * LANES
    for i in range(0, whole, LANES):
        low, high = load16(x, i), load16(x, half + i)
        cos, sin = load16(cos_sin, i), load16(cos_sin, half + i)
        store16(out, i, sub(mul(low, cos), mul(high, sin)))
        store16(out, half + i, fma(high, cos, mul(low, sin)))
    for i in range(whole, half):
        a, b = load1(x, i), load1(x, half + i)
        c, s = cos_sin[i], cos_sin[half + i]
        store1(out, i, a * c - b * s)
        store1(out, half + i, b * c + a * s)
    for i in range(layout.rotary_dim, layout.head_dim):
        out[i] = x[i]


@device
def _copy(x: Ptr, out: Ptr, d: int) -> None:
    whole = d // LANES * LANES
    for i in range(0, whole, LANES):
        store16(out, i, load16(x, i))
    for i in range(whole, d):
        out[i] = x[i]


@device
def rotate_tokens(
    data: Any, cos_sin: Ptr, index: Any, tokens: range, layout: RopeLayout, norm: Any
) -> None:
    """The pass above for some tokens.

    data = (qkv, q, k_cache, v_cache, q_weight, k_weight); index = (positions, slot_mapping);
    norm = (1 to normalise heads or 0, eps).
    """
    qkv, q, k_cache, v_cache, q_weight, k_weight = data
    positions, slot_mapping = index
    with_norm, eps = norm
    d, heads = layout.head_dim, layout.heads
    for t in tokens:
        row = shifted(qkv, t * layout.qkv_stride)
        angles = shifted(cos_sin, positions[t] * layout.rotary_dim)
        block = slot_mapping[t] // layout.block_size
        offset = slot_mapping[t] - block * layout.block_size
        slot = block * layout.block_stride + offset * layout.slot_stride
        for h in range(heads):
            source, target = shifted(row, h * d), shifted(q, (t * heads + h) * d)
            if with_norm == 1:
                normalize_row(source, q_weight, target, d, eps)
                source = target
            _rotate(source, target, angles, layout)
        for h in range(layout.kv_heads):
            source = shifted(row, (heads + h) * d)
            target = shifted(k_cache, slot + h * layout.head_stride)
            if with_norm == 1:
                normalize_row(source, k_weight, target, d, eps)
                source = target
            _rotate(source, target, angles, layout)
            source = shifted(row, (heads + layout.kv_heads + h) * d)
            _copy(source, shifted(v_cache, slot + h * layout.head_stride), d)


@kernel(parallel_from=1 << 16)
def _rope_and_write_kv(
    mode: int,
    threads: int,
    qkv: int,
    q: int,
    k_cache: int,
    v_cache: int,
    q_weight: int,
    k_weight: int,
    cos_sin: int,
    positions: int,
    slot_mapping: int,
    n_tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    qkv_stride: int,
    block_size: int,
    block_stride: int,
    head_stride: int,
    slot_stride: int,
    with_norm: int,
    eps: float,
) -> None:
    """Addresses, then sizes and strides in elements. with_norm 0: the weights are not read."""
    layout = RopeLayout(
        heads,
        kv_heads,
        head_dim,
        rotary_dim,
        qkv_stride,
        block_size,
        block_stride,
        head_stride,
        slot_stride,
    )
    norm = (with_norm, eps)
    for t in numba.prange(threads):
        tokens = range(n_tokens * t // threads, n_tokens * (t + 1) // threads)
        index = (as_i64(positions), as_i64(slot_mapping))
        if mode == 1:
            data = (
                as_bf16(qkv),
                as_bf16(q),
                as_bf16(k_cache),
                as_bf16(v_cache),
                as_bf16(q_weight),
                as_bf16(k_weight),
            )
            rotate_tokens(data, as_f32(cos_sin), index, tokens, layout, norm)
        else:
            f32 = (
                as_f32(qkv),
                as_f32(q),
                as_f32(k_cache),
                as_f32(v_cache),
                as_f32(q_weight),
                as_f32(k_weight),
            )
            rotate_tokens(f32, as_f32(cos_sin), index, tokens, layout, norm)


def rope_and_write_kv(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    if qkv.stride(1) != 1:
        qkv = qkv.contiguous()
    tokens, width = qkv.shape
    q = torch.empty((tokens, num_heads, head_dim), dtype=qkv.dtype)
    block_stride, head_stride, slot_stride, _ = k_cache.stride()
    with_norm = q_norm is not None and k_norm is not None
    _rope_and_write_kv(
        tokens * width,
        1 if qkv.dtype is torch.bfloat16 else 0,
        qkv.data_ptr(),
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        q_norm.data_ptr() if q_norm is not None else 0,
        k_norm.data_ptr() if k_norm is not None else 0,
        cos_sin.data_ptr(),
        positions.data_ptr(),
        slot_mapping.data_ptr(),
        tokens,
        num_heads,
        num_kv_heads,
        head_dim,
        cos_sin.shape[1],
        qkv.stride(0),
        k_cache.shape[2],
        block_stride,
        head_stride,
        slot_stride,
        1 if with_norm else 0,
        eps,
    )
    return q
