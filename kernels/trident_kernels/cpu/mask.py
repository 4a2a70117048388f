"""Masks of tokens on the CPU: logits of forbidden tokens become -inf.

Bound by memory: the logits are read and written once, a bit each of the masks is read.
"""

from __future__ import annotations

from typing import Any

import numba
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from torch import Tensor

from trident_kernels.cpu.jit import device, kernel
from trident_kernels.cpu.simd import (
    I16,
    LANES,
    Ptr,
    as_f32,
    as_i16,
    as_i64,
    constant,
    emitter,
    load16,
    ptr_i16,
    shifted,
    store1,
    store16,
    types,
    vec16,
)


@emitter
def keep_bits(typing: Any, value: Any, words: Any, index: Any) -> Any:
    """Lane i stays if bit i of the 16-bit word at the index is set, else becomes -inf."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.load(builder.gep(args[1], [args[2]]), align=2)
        lanes = builder.bitcast(word, ir.VectorType(ir.IntType(1), LANES))
        return builder.select(lanes, args[0], constant(float("-inf")))

    assert I16.width == LANES
    return vec16(vec16, ptr_i16, types.int64), codegen


@device
def _mask_row(logits: Ptr, words: Ptr, vocab: int) -> None:
    whole = vocab // LANES * LANES
    for j in range(0, whole, LANES):
        store16(logits, j, keep_bits(load16(logits, j), words, j // LANES))
    for j in range(whole, vocab):
        if not (words[j // LANES] >> (j % LANES)) & 1:
            store1(logits, j, -numba.float32(float("inf")))


@kernel(parallel_from=1 << 17)
def _mask_logits(
    mode: int,
    threads: int,
    logits: int,
    lines: int,
    bits: int,
    count: int,
    vocab: int,
    stride: int,
    words: int,
) -> None:
    """Addresses of logits (row stride `stride`), lines [count] int64, bits [count, words] of 16."""
    for t in numba.prange(threads):
        for i in range(count * t // threads, count * (t + 1) // threads):
            row = shifted(as_f32(logits), as_i64(lines)[i] * stride)
            _mask_row(row, shifted(as_i16(bits), i * words), vocab)


def mask_logits(logits: Tensor, lines: Tensor, bits: Tensor) -> None:
    count, words = bits.shape
    vocab = logits.shape[1]
    assert lines.dtype is torch.int64 and bits.dtype is torch.int32
    assert bits.is_contiguous() and lines.is_contiguous() and logits.stride(1) == 1
    assert 32 * words >= vocab
    addresses = (logits.data_ptr(), lines.data_ptr(), bits.data_ptr())
    _mask_logits(count * vocab, 0, *addresses, count, vocab, logits.stride(0), 2 * words)
