"""Compiles the kernels without a GPU: `python -m trident_kernels.triton.aot` (`make kernels-aot`).

The operations run on tensors without storage while a recorder stands in for the device, so what is
compiled is what the engine starts: the same kernels, tile sizes and specialisations. For each it tells
shared memory, registers and spilled bytes per thread; the exit status is 1 if a kernel spills, needs
more shared memory than a program may use, or does not compile.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trident_kernels.triton import activation, attention, norm, rope
from trident_kernels.triton.configs import shared_memory
from trident_kernels.triton.runtime import Device, Launch, recording

NUM_SMS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 120: 170}
ARCHS = (80, 90, 100)
_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Shape:
    """What of a model the kernels depend on."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    window: int | None = None
    qk_norm: bool = False


SHAPES = (
    Shape("smollm2-135m", 9, 3, 64, 576, 1536),
    Shape("llama-3-8b", 32, 8, 128, 4096, 14336),
    Shape("qwen3-4b", 32, 8, 128, 2560, 9728, qk_norm=True),
    Shape("mistral-window", 32, 8, 128, 4096, 14336, window=4096),
    Shape("phi-3-mini", 32, 32, 96, 3072, 8192, window=2047),
    Shape("gemma-2b", 8, 1, 256, 2048, 16384),
)


@dataclass(frozen=True)
class Report:
    """One kernel as compiled for one architecture."""

    kernel: str
    case: str
    arch: int
    tiles: str
    shared: int  # bytes of one program
    registers: int  # of one thread
    spilled: int  # bytes of one thread
    error: str = ""

    @property
    def problem(self) -> str:
        if self.error:
            return self.error
        if self.spilled:
            return f"spills {self.spilled} bytes"
        if self.shared > shared_memory(self.arch):
            return f"needs {self.shared} bytes of shared memory, {shared_memory(self.arch)} exist"
        return ""


def record(shape: Shape, dtype: torch.dtype, arch: int) -> Iterator[tuple[str, Launch]]:
    """All launches of a layer: a decode step, a long sequence alone, a prompt, a deterministic step."""
    found: list[Launch] = []
    empty = functools.partial(torch.empty, device="meta", dtype=dtype)
    integers = functools.partial(torch.empty, device="meta", dtype=torch.int32)
    heads, kv_heads, d = shape.heads, shape.kv_heads, shape.head_dim
    k_cache, v_cache = empty(2, 4096, kv_heads, 16, d)
    weight = empty(shape.hidden)
    head_weight = empty(d) if shape.qk_norm else None
    # name: tokens, sequences, longest query, longest sequence, deterministic
    steps = {
        "decode": (256, 256, 1, 2048, False),
        "long": (1, 1, 1, 32768, False),
        "prompt": (8192, 8, 1024, 4096, False),
        "fixed": (8192, 8, 1024, 4096, True),
    }
    with recording(found.append, Device(arch, NUM_SMS[arch])):
        for step, (tokens, num_seqs, longest_q, longest, deterministic) in steps.items():
            positions = torch.empty(tokens, device="meta", dtype=torch.int64)
            if step == "decode":
                x = empty(tokens, shape.hidden)
                norm.rms_norm(x, weight, 1e-5)
                norm.add_rms_norm(x, empty(tokens, shape.hidden), weight, 1e-5)
                activation.silu_and_mul(empty(tokens, 2 * shape.intermediate))
                angles = torch.empty(8192, d, device="meta")
                qkv = empty(tokens, (heads + 2 * kv_heads) * d)
                rope.rope_and_write_kv(
                    qkv, positions, angles, k_cache, v_cache, positions,
                    heads, kv_heads, d, head_weight, head_weight, 1e-5,
                )  # fmt: skip
            attention.paged_attention(
                empty(tokens, heads, d),
                k_cache,
                v_cache,
                integers(num_seqs, 512),
                integers(num_seqs + 1),
                integers(num_seqs),
                longest_q,
                longest,
                d**-0.5,
                shape.window,
                deterministic=deterministic,
            )
            yield from ((step, each) for each in found)
            found.clear()


def source_of(each: Launch) -> ASTSource:
    """The kernel as the runtime would specialise it: by type, and by what 16 divides."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(each.constants)
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    values = dict(zip(each.kernel.arg_names, each.args))
    for index, param in enumerate(each.kernel.params):
        value = values.get(param.name)
        if param.name in constants or value is None:
            signature[param.name] = "constexpr"
            constants.setdefault(param.name, None)
            continue
        varies = param.do_not_specialize
        if isinstance(value, torch.Tensor):
            signature[param.name] = _POINTERS[value.dtype]
            divisible = not varies
        elif isinstance(value, float):
            signature[param.name], divisible = "fp32", False
        elif value == 1 and not varies:
            signature[param.name], divisible = "constexpr", False
            constants[param.name] = 1
        else:
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            divisible = value % 16 == 0 and not varies
        if divisible:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(each.kernel, signature, constants, attributes)


def resources(cubin: bytes, arch: int) -> tuple[int, int]:
    """Registers and spilled bytes of one thread."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump told nothing of sm_{arch}: {text[-200:]}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def compile_launch(case: str, each: Launch, arch: int) -> Report:
    options = {
        "num_warps": each.num_warps,
        "num_stages": each.num_stages,
        "enable_fp_fusion": True,
    }
    sizes = [str(each.constants[k]) for k in ("BLOCK_M", "TILE", "HEADS") if k in each.constants]
    tiles = f"{'x'.join(sizes) or '-'} w{each.num_warps} s{each.num_stages}"
    name = each.kernel.fn.__name__
    try:
        compiled = triton.compile(
            source_of(each), target=GPUTarget("cuda", arch, 32), options=options
        )
        registers, spilled = resources(compiled.asm["cubin"], arch)
    except Exception as error:  # any failure of the compiler is a result to report
        return Report(name, case, arch, tiles, 0, 0, 0, f"{type(error).__name__}: {error}"[:300])
    return Report(name, case, arch, tiles, compiled.metadata.shared, registers, spilled)


def _key(each: Launch) -> str:
    source = source_of(each)
    return f"{each.kernel.fn.__name__}{source.signature}{source.constants}{source.attrs}" + (
        f"{each.num_warps}{each.num_stages}"
    )


def compile_shape(shape: Shape, dtype: torch.dtype, arch: int) -> list[Report]:
    """Each different kernel that a model's layer starts."""
    reports, seen = [], set()
    kind = str(dtype).removeprefix("torch.")
    for step, each in record(shape, dtype, arch):
        if _key(each) not in seen:
            seen.add(_key(each))
            reports.append(compile_launch(f"{shape.name} {kind} {step}", each, arch))
    return reports


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--arch", type=int, nargs="*", choices=list(NUM_SMS), default=ARCHS)
    parser.add_argument("--shape", nargs="*", default=[shape.name for shape in SHAPES])
    parser.add_argument("--dtype", nargs="*", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("unset TRITON_INTERPRET: what is interpreted cannot be compiled")
    jobs = [
        (shape, getattr(torch, dtype), arch)
        for shape in SHAPES
        if shape.name in options.shape
        for dtype in options.dtype
        for arch in options.arch
    ]
    failed = count = 0
    print(f"{'kernel':20} {'case':36} arch  {'tiles':16} {'shared':>7} {'regs':>5} {'spill':>5}")
    with ProcessPoolExecutor(options.jobs) as pool:
        for reports in pool.map(compile_shape, *zip(*jobs)):
            for r in reports:
                count += 1
                failed += bool(r.problem)
                print(
                    f"{r.kernel:20} {r.case:36} sm_{r.arch:<3} {r.tiles:16} {r.shared:7} "
                    f"{r.registers:5} {r.spilled:5} {r.problem}",
                    flush=True,
                )
    print(f"{count} kernels compiled, {failed} with a problem")
    return 1 if failed or not count else 0


if __name__ == "__main__":
    sys.exit(main())
