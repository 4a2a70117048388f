"""Compile every CPU kernel ahead of time: `python -m trident_kernels.cpu.compile`.

Fills the cache folder, so that later processes load code instead of compiling it (about a minute).
There is nothing to choose: a kernel's signature depends on no model, dtype or head size.
"""

from __future__ import annotations

import time

from trident_kernels.cpu.activation import _silu_and_mul
from trident_kernels.cpu.attention import _paged_attention
from trident_kernels.cpu.jit import CACHE_FOLDER
from trident_kernels.cpu.linear import _linear
from trident_kernels.cpu.linear_int8 import _linear_int8, _quantize
from trident_kernels.cpu.mask import _mask_logits
from trident_kernels.cpu.norm import _add_rms_norm, _rms_norm
from trident_kernels.cpu.rope import _rope_and_write_kv
from trident_kernels.cpu.simd import native_bf16_dot
from trident_kernels.cpu.tile_int8 import native_int8_dot

KERNELS = [
    _mask_logits,
    _rms_norm,
    _add_rms_norm,
    _silu_and_mul,
    _rope_and_write_kv,
    _paged_attention,
]
if native_bf16_dot():
    KERNELS.append(_linear)
if native_int8_dot():
    KERNELS += [_quantize, _linear_int8]


def compile_kernels() -> float:
    """Compile or load all kernels; returns the seconds it took."""
    start = time.perf_counter()
    for each in KERNELS:
        each.compile()
    return time.perf_counter() - start


if __name__ == "__main__":
    seconds = compile_kernels()
    where = CACHE_FOLDER if CACHE_FOLDER is not None else "memory only: no writable cache folder"
    print(f"CPU kernels ready in {seconds:.1f} s ({where})")
