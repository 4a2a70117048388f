"""Rotary embedding of q and k, their norm if there is one, and the write of k and v to their slots.

A program takes some heads of one token, queries, keys and values alike, as they lie in qkv:

    head:   0 .. H - 1   H .. H + K - 1   H + K .. H + 2K - 1
            q, rotated   k, rotated       v, as it is
            to `out`     to its slot      to its slot

Column d of a rotated head is x[d] cos + sign x[partner] sin, its partner half the rotary width away.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from trident_kernels.triton.runtime import jit, launch, power_of_two

ELEMENTS = 1024  # of one program


@jit(varying=["positions_ptr", "slots_ptr"])
def _rope_and_write_kv(
    qkv_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_qkv: tl.tensor,
    stride_angle: tl.tensor,
    stride_block: tl.tensor,
    stride_head: tl.tensor,
    stride_cell: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, D_PAD)[None, :]
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (d < D)
    is_q = head < NUM_HEADS
    is_v = head >= NUM_HEADS + NUM_KV_HEADS
    kv_head = head - tl.where(is_v, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS)

    # Columns beyond the rotary width have an angle of zero and are their own partners.
    partner = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
    row = qkv_ptr + token * stride_qkv + head * D
    raw = tl.load(row + d, mask=inside, other=0.0)
    x = raw.to(tl.float32)
    y = tl.load(row + partner, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1)[:, None] / D + eps)
        for_q, for_k = inside & is_q, inside & (head >= NUM_HEADS)
        w = tl.load(q_norm_ptr + d + head * 0, mask=for_q, other=0.0)
        w = tl.where(is_q, w, tl.load(k_norm_ptr + d + head * 0, mask=for_k, other=0.0))
        u = tl.load(q_norm_ptr + partner + head * 0, mask=for_q, other=0.0)
        u = tl.where(is_q, u, tl.load(k_norm_ptr + partner + head * 0, mask=for_k, other=0.0))
        x = (x * scale).to(raw.dtype).to(tl.float32) * w.to(tl.float32)
        y = (y * scale).to(raw.dtype).to(tl.float32) * u.to(tl.float32)
        x, y = x.to(raw.dtype).to(tl.float32), y.to(raw.dtype).to(tl.float32)
    angle = cos_sin_ptr + tl.load(positions_ptr + token) * stride_angle + d % HALF
    cos = tl.load(angle, mask=d < 2 * HALF, other=1.0)
    sin = tl.load(angle + HALF, mask=d < 2 * HALF, other=0.0)
    turned = (x * cos + tl.where(d < HALF, -y, y) * sin).to(raw.dtype)

    q_cells = out_ptr + (token * NUM_HEADS + head) * D + d
    tl.store(q_cells, turned, mask=inside & is_q)
    slot = tl.load(slots_ptr + token)
    cell = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_cell
    cells = cell + kv_head * stride_head + d
    tl.store(k_cache_ptr + cells, turned, mask=inside & (head >= NUM_HEADS) & (is_v == 0))
    tl.store(v_cache_ptr + cells, raw, mask=inside & is_v)


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
    tokens = qkv.shape[0]
    assert qkv.stride(1) == cos_sin.stride(1) == k_cache.stride(3) == 1
    assert k_cache.stride() == v_cache.stride()
    out = torch.empty((tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    width, all_heads = power_of_two(head_dim), num_heads + 2 * num_kv_heads
    heads = min(power_of_two(all_heads), max(1, ELEMENTS // width))
    launch(
        _rope_and_write_kv,
        (tokens, -(-all_heads // heads)),
        qkv,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        slot_mapping,
        q_norm,
        k_norm,
        out,
        qkv.stride(0),
        cos_sin.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        D=head_dim,
        D_PAD=width,
        HALF=cos_sin.shape[1] // 2,
        BLOCK_SIZE=k_cache.shape[2],
        HEADS=heads,
        HAS_NORM=q_norm is not None,
    )
    return out
