"""Compile every CPU kernel ahead of time: `python -m trident_kernels.cpu.compile`.

Fills the cache folder, so that later processes load code instead of compiling it (a minute of processor
time, which two processes share). There is nothing to choose: a kernel's signature depends on no model,
dtype or head size.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from trident_kernels.cpu import barrier
from trident_kernels.cpu.activation import _silu_and_mul
from trident_kernels.cpu.attention import _paged_attention
from trident_kernels.cpu.jit import CACHE_FOLDER
from trident_kernels.cpu.linear import _linear
from trident_kernels.cpu.linear_int8 import _linear_int8, _quantize
from trident_kernels.cpu.mask import _mask_logits
from trident_kernels.cpu.norm import _add_rms_norm, _rms_norm
from trident_kernels.cpu.rope import _rope_and_write_kv
from trident_kernels.cpu.simd import native_bf16_dot
from trident_kernels.cpu.stack import _decoder_layers, _probe
from trident_kernels.cpu.tile_int8 import native_int8_dot

# The longest ones first.
KERNELS = [
    _paged_attention,
    _mask_logits,
    _rms_norm,
    _add_rms_norm,
    _silu_and_mul,
    _rope_and_write_kv,
]
if native_bf16_dot():
    KERNELS.insert(1, _linear)
if native_bf16_dot() and barrier.is_available():
    KERNELS[1:1] = [_decoder_layers, _probe]
if native_int8_dot():
    KERNELS[2:2] = [_linear_int8, _quantize]


def compile_kernels() -> float:
    """Compile or load all kernels; returns the seconds it took."""
    start = time.perf_counter()
    for each in KERNELS:
        each.compile()
    return time.perf_counter() - start


def _compile(number: int) -> None:
    KERNELS[number].compile()


def fill_cache() -> float:
    """As `compile_kernels`, with a process for each of up to two cores if there is much to do."""
    start = time.perf_counter()
    is_empty = CACHE_FOLDER is not None and not any(CACHE_FOLDER.rglob("*.nbi"))
    if is_empty and (os.cpu_count() or 1) > 1:
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
            list(processes.map(_compile, range(len(KERNELS))))
    compile_kernels()
    return time.perf_counter() - start


if __name__ == "__main__":
    seconds = fill_cache()
    where = CACHE_FOLDER if CACHE_FOLDER is not None else "memory only: no writable cache folder"
    print(f"CPU kernels ready in {seconds:.1f} s ({where})")
