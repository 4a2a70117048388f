"""Every operation in plain torch: the specification, the test oracle and the fallback.

Works on any device and dtype that torch supports, vectorised over sequences. Arithmetic is float32
inside; results are rounded to the input's dtype where the docstrings say so. Knows nothing of the
fast paths; they must agree with it within rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# Scores computed at once by paged_attention, as float32 elements: bounds its memory (64 MiB each).
SCORE_ELEMENTS = 1 << 24


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """round(x * rsqrt(mean(x^2) + eps)) * weight over the last dimension (HF Llama's rounding)."""
    wide = x.float()
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return unit.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place, rounded; returns rms_norm of the rounded sum."""
    residual += x
    return rms_norm(residual, weight, eps)


def mask_logits(logits: Tensor, lines: Tensor, bits: Tensor) -> None:
    packed = bits.view(torch.uint8).to(torch.int32)  # little-endian: byte j holds tokens 8 j on
    forbidden = (packed.unsqueeze(2) >> torch.arange(8, device=bits.device)) & 1 == 0
    masked = logits.index_select(0, lines)
    masked.masked_fill_(forbidden.flatten(1)[:, : logits.shape[1]], -torch.inf)
    logits.index_copy_(0, lines, masked)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """round(silu(gate)) * up, where [gate, up] are the halves of the last dimension."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate.float()).to(gate_up.dtype) * up


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotary embedding, NeoX halves. x [T, heads, D], cos_sin [T, R] float32 -> like x."""
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    wide = x.float()
    low, high = wide[..., :half], wide[..., half : 2 * half]
    turned = [low * cos - high * sin, high * cos + low * sin, wide[..., 2 * half :]]
    return torch.cat(turned, dim=-1).to(x.dtype)


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
    """Split, normalise per head if given weights, rotate q and k, write k and v; returns q."""
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    angles = cos_sin[positions]
    block_size = k_cache.shape[2]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    k_cache[blocks, :, offsets] = rotate(k, angles)
    v_cache[blocks, :, offsets] = v
    return rotate(q, angles)


def _gather(
    cache: Tensor, block_tables: Tensor, seq_lens: Tensor, max_seq_len: int
) -> tuple[Tensor, Tensor]:
    """Rows of each sequence side by side, as float32 [S, K, n, D], and which are used [S, n].

    Unused rows are zeros: a free block may hold NaN, and 0 * NaN is NaN.
    """
    _, kv_heads, block_size, head_dim = cache.shape
    count = -(-max_seq_len // block_size)
    used = torch.arange(count * block_size, device=cache.device) < seq_lens[:, None]
    has_block = used[:, ::block_size]
    blocks = block_tables[:, :count].long().masked_fill(~has_block, 0)
    rows = cache[blocks].permute(0, 2, 1, 3, 4).reshape(len(blocks), kv_heads, -1, head_dim)
    return rows.float().masked_fill(~used[:, None, :, None], 0.0), used


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
) -> Tensor:
    """out[p] = softmax(scale * q[p] . k[j]) v[j] over p - window < j <= p, per sequence.

    Pads the queries to [S, max_seqlen_q] and gathers K and V up to max_seq_len; the scores are made
    in slices of query positions, so that memory grows with max_seq_len, not with its product with
    max_seqlen_q.
    """
    tokens, heads, head_dim = q.shape
    kv_heads, n_seqs, device = k_cache.shape[1], len(seq_lens), q.device
    if tokens == 0:
        return torch.empty_like(q)
    starts, query_lens = cu_seqlens_q[:-1].long(), cu_seqlens_q.diff().long()
    k, used = _gather(k_cache, block_tables, seq_lens, max_seq_len)
    v, _ = _gather(v_cache, block_tables, seq_lens, max_seq_len)
    key_pos = torch.arange(k.shape[2], device=device)
    out = torch.empty_like(q)
    step = max(1, SCORE_ELEMENTS // max(1, n_seqs * heads * k.shape[2]))
    for first in range(0, max_seqlen_q, step):
        local = torch.arange(first, min(first + step, max_seqlen_q), device=device)
        valid = local < query_lens[:, None]
        index = (starts[:, None] + local).clamp(max=tokens - 1)
        rows = q[index].float().view(n_seqs, len(local), kv_heads, -1, head_dim)
        position = (seq_lens - query_lens)[:, None] + local
        distance = position[:, :, None] - key_pos
        visible = (distance >= 0) & used[:, None, :]
        if sliding_window is not None:
            visible &= distance < sliding_window
        scores = torch.einsum("stkgd,sknd->skgtn", rows, k) * softmax_scale
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
        # Padding rows see nothing; their NaN is dropped by `valid`.
        result = torch.einsum("skgtn,sknd->stkgd", scores.softmax(-1), v)
        result = result.reshape(n_seqs, len(local), heads, head_dim).to(q.dtype)
        out[index[valid]] = result[valid]
    return out
