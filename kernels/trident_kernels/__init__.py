"""The device operations of an LLM decoder, each picked by device and availability.

Owns the choice of implementation, nothing else: `reference` (plain torch) is the specification and
runs anywhere; `cpu` (Numba) serves float32 and bfloat16 on CPUs; `triton` serves CUDA devices. The
choice is made from the tensor itself, once per call, without imports. Knows nothing of models,
requests or schedulers.

TRIDENT_KERNELS=triton in the environment sends every tensor through the Triton kernels, those on the
CPU too: with TRITON_INTERPRET=1 everything that runs on a GPU then runs here, in Triton's interpreter.

Letters in shapes: T tokens of the flat batch, S sequences, H query heads, K kv heads, D head_dim,
B block_size, N blocks, M blocks per sequence at most. A slot is block * B + offset.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trident_kernels import memory, reference
from trident_kernels.linear import LinearWeight, can_quantize, linear, pack_linear

if TYPE_CHECKING:
    from trident_kernels.cpu.stack import Layer, LayerStack

try:
    from trident_kernels.cpu import activation as _activation
    from trident_kernels.cpu import attention as _attention
    from trident_kernels.cpu import mask as _mask
    from trident_kernels.cpu import norm as _norm
    from trident_kernels.cpu import rope as _rope
    from trident_kernels.cpu import stack as _stack
except ImportError:  # numba is missing or told not to compile
    _CPU_DTYPES: frozenset[torch.dtype] = frozenset()
else:
    _CPU_DTYPES = frozenset({torch.float32, torch.bfloat16})

HAS_CPU_KERNELS = bool(_CPU_DTYPES)

_TRITON_ALWAYS = os.environ.get("TRIDENT_KERNELS") == "triton"
HAS_TRITON_KERNELS = False
if _TRITON_ALWAYS or torch.version.cuda is not None:
    try:
        from trident_kernels.triton import activation as _triton_activation
        from trident_kernels.triton import attention as _triton_attention
        from trident_kernels.triton import norm as _triton_norm
        from trident_kernels.triton import rope as _triton_rope
        from trident_kernels.triton.runtime import DTYPES as _TRITON_DTYPES
    except ImportError:  # triton is missing
        if _TRITON_ALWAYS:
            raise
    else:
        HAS_TRITON_KERNELS = True

__all__ = [
    "HAS_CPU_KERNELS",
    "HAS_TRITON_KERNELS",
    "LinearWeight",
    "add_rms_norm",
    "can_quantize",
    "compile_cpu_kernels",
    "linear",
    "mask_logits",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rope_and_write_kv",
    "silu_and_mul",
    "stack_layers",
    "zeros_for_long",
]


def compile_cpu_kernels() -> float:
    """Compile all CPU kernels, or load them from the cache folder; returns the seconds it took.

    Needed before the first request on a CPU, if that is not to wait. One call serves every model.
    Without numba there is nothing to do.
    """
    if not HAS_CPU_KERNELS:
        return 0.0
    from trident_kernels.cpu.compile import compile_kernels  # also a program: not imported above

    return compile_kernels()


def stack_layers(
    layers: Sequence[Layer],
    final_norm: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    sliding_windows: Sequence[int | None],
    softmax_scale: float,
    eps: float,
) -> LayerStack | None:
    """All layers of a decoder as one operation, of the same bits as the single ones, where there is one.

    See :mod:`trident_kernels.cpu.stack`; ``sliding_windows`` has an entry per layer. None: run the
    operations one by one.
    """
    if not HAS_CPU_KERNELS or _TRITON_ALWAYS or not final_norm.is_cpu:
        return None
    return _stack.make(
        layers,
        final_norm,
        heads=num_heads,
        kv_heads=num_kv_heads,
        windows=sliding_windows,
        softmax_scale=softmax_scale,
        eps=eps,
    )


def zeros_for_long(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Zeros that are read in every step, such as a KV cache: on a CPU on huge pages, if it has some."""
    if device.type == "cpu":
        return memory.zeros(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def _takes_triton(x: Tensor) -> bool:
    return HAS_TRITON_KERNELS and (x.is_cuda or _TRITON_ALWAYS) and x.dtype in _TRITON_DTYPES


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """round(x * rsqrt(mean(x^2) + eps)) * weight over the last dimension, float32 inside.

    x [..., D], weight [D] of the same dtype -> like x. Rounding as in Hugging Face's Llama.
    """
    if _takes_triton(x) and weight.dtype is x.dtype:
        return _triton_norm.rms_norm(x, weight, eps)
    if x.is_cpu and x.dtype in _CPU_DTYPES and weight.dtype is x.dtype:
        return _norm.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place (rounded to the dtype); returns rms_norm(residual, weight, eps).

    x, residual [T, D], weight [D], all of one dtype -> [T, D].
    """
    if _takes_triton(x) and weight.dtype is x.dtype:
        return _triton_norm.add_rms_norm(x, residual, weight, eps)
    if x.is_cpu and x.dtype in _CPU_DTYPES and weight.dtype is x.dtype:
        return _norm.add_rms_norm(x, residual, weight, eps)
    return reference.add_rms_norm(x, residual, weight, eps)


def mask_logits(logits: Tensor, lines: Tensor, bits: Tensor) -> None:
    """logits[lines[i], v] = -inf, in place, where bit v of bits[i] is not set.

    logits [L, V] float32; lines [M] int64, distinct; bits [M, W] int32, 32 * W at least V, bit v being
    bit v % 32 of word v // 32.
    """
    if logits.is_cpu and _CPU_DTYPES and logits.stride(1) == 1:
        _mask.mask_logits(logits, lines, bits)
    else:
        reference.mask_logits(logits, lines, bits)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """round(silu(gate)) * up; gate_up [T, 2 * I] = [gate, up] -> [T, I]."""
    if _takes_triton(gate_up):
        return _triton_activation.silu_and_mul(gate_up)
    if gate_up.is_cpu and gate_up.dtype in _CPU_DTYPES:
        return _activation.silu_and_mul(gate_up)
    return reference.silu_and_mul(gate_up)


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
    """Split qkv, RMS-normalise q and k per head if given weights, rotate them, write k and v.

    qkv [T, (H + 2K) * D]; positions [T] int64, rows of cos_sin; cos_sin [P, R] float32, cosines in
    the first R/2 columns, sines in the rest (NeoX halves, R <= D); k_cache, v_cache [N, K, B, D]
    with equal strides, the last 1; slot_mapping [T] int64, distinct; q_norm and k_norm [D], both or
    neither -> q [T, H, D]. Writes exactly the slots named by slot_mapping.
    """
    assert (q_norm is None) == (k_norm is None), "q_norm and k_norm come together"
    assert positions.dtype is slot_mapping.dtype is torch.int64
    if _takes_triton(qkv) and k_cache.dtype is qkv.dtype:
        operation = _triton_rope.rope_and_write_kv
    elif qkv.is_cpu and qkv.dtype in _CPU_DTYPES and k_cache.dtype is qkv.dtype:
        operation = _rope.rope_and_write_kv
    else:
        operation = reference.rope_and_write_kv
    return operation(
        qkv,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        slot_mapping,
        num_heads,
        num_kv_heads,
        head_dim,
        q_norm,
        k_norm,
        eps,
    )


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
    """Causal attention of the flat batch over the paged cache: prefill, chunk and decode at once.

    q [T, H, D]; k_cache, v_cache [N, K, B, D] with equal strides, the last 1; block_tables [S, M]
    int32; cu_seqlens_q [S + 1] int32; seq_lens [S] int32 -> [T, H, D].

        |<-------------- seq_lens[s] ------------->|
        |<--- context (cached) --->|<-- queries -->|   queries = cu_seqlens_q[s+1] - cu_seqlens_q[s]

    A query at position p sees keys (p - sliding_window, p], or all up to p. max_seqlen_q and
    max_seq_len are upper bounds. Slots beyond seq_lens may hold anything, NaN included; entries of
    block_tables beyond a sequence's blocks are not read. A row's result depends on its own sequence
    alone. H is a multiple of K; softmax_scale is positive.
    """
    assert block_tables.dtype is cu_seqlens_q.dtype is seq_lens.dtype is torch.int32
    assert softmax_scale > 0
    if _takes_triton(q) and q.shape[2] <= 256 and k_cache.dtype is q.dtype:
        return _triton_attention.paged_attention(
            q,
            k_cache,
            v_cache,
            block_tables,
            cu_seqlens_q,
            seq_lens,
            max_seqlen_q,
            max_seq_len,
            softmax_scale,
            sliding_window,
        )
    if q.is_cpu and q.dtype in _CPU_DTYPES and q.shape[2] % 16 == 0 and k_cache.dtype is q.dtype:
        return _attention.paged_attention(
            q,
            k_cache,
            v_cache,
            block_tables,
            cu_seqlens_q,
            seq_lens,
            max_seq_len,
            softmax_scale,
            sliding_window,
        )
    return reference.paged_attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        cu_seqlens_q,
        seq_lens,
        max_seqlen_q,
        max_seq_len,
        softmax_scale,
        sliding_window,
    )
