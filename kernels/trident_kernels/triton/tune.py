"""Times tile sizes of the attention kernel: `python -m trident_kernels.triton.tune`; needs a GPU.

For each model shape and kind of step it runs every candidate that compiles without spilling and prints
the fastest ones beside what `configs` chooses now. It changes nothing: the lines of `configs` are
edited by hand, since one line serves several shapes.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from dataclasses import dataclass

import torch
import triton

from trident_kernels.triton import aot, attention, configs
from trident_kernels.triton.configs import AttentionConfig
from trident_kernels.triton.runtime import Launch, device_of, recording

BLOCK_SIZE = 16
# (tokens, sequences, longest sequence): decode of many, of one, and a prompt of several
STEPS = {"decode": (64, 64, 2048), "long": (1, 1, 32768), "prompt": (8192, 4, 2048)}


@dataclass(frozen=True)
class Case:
    """The arguments of one attention call, on the device."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    starts: torch.Tensor
    lens: torch.Tensor
    longest_query: int
    longest: int
    scale: float
    window: int | None

    def run(self, config: AttentionConfig | None) -> None:
        attention.paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.starts,
            self.lens,
            self.longest_query,
            self.longest,
            self.scale,
            self.window,
            deterministic=False,
            config=config,
        )


def make_case(shape: aot.Shape, dtype: torch.dtype, step: str, device: str = "cuda") -> Case:
    tokens, num_seqs, longest = STEPS[step]
    columns = -(-longest // BLOCK_SIZE)
    cache = torch.randn(
        (2, num_seqs * columns, shape.kv_heads, BLOCK_SIZE, shape.head_dim),
        dtype=dtype,
        device=device,
    )
    order = torch.randperm(num_seqs * columns, device=device).to(torch.int32)
    starts = torch.arange(num_seqs + 1, device=device) * (tokens // num_seqs)
    lens = torch.full((num_seqs,), longest, dtype=torch.int32, device=device)
    q = torch.randn((tokens, shape.heads, shape.head_dim), dtype=dtype, device=device)
    return Case(
        q,
        cache[0],
        cache[1],
        order.view(num_seqs, columns),
        starts.to(torch.int32),
        lens,
        tokens // num_seqs,
        longest,
        shape.head_dim**-0.5,
        shape.window,
    )


def spills(case: Case, config: AttentionConfig) -> bool:
    """Whether the kernel spills, does not fit or does not compile."""
    launches: list[Launch] = []
    device = device_of(case.q)
    with recording(launches.append, device):
        case.run(config)
    return any(aot.compile_launch("", each, device.arch).problem for each in launches)


def candidates(step: str) -> list[AttentionConfig]:
    rows = (32, 64, 128) if step == "prompt" else (16, 32)
    return [
        AttentionConfig(*sizes)
        for sizes in itertools.product(rows, (16, 32, 64, 128), (4, 8), (2, 3, 4))
    ]


def tune(shape: aot.Shape, dtype: torch.dtype, step: str, keep: int) -> None:
    case = make_case(shape, dtype, step)
    now = triton.testing.do_bench(lambda: case.run(None))
    times = {
        config: triton.testing.do_bench(functools.partial(case.run, config))
        for config in candidates(step)
        if not spills(case, config)
    }
    print(f"{shape.name} {str(dtype).removeprefix('torch.')} {step}: now {now * 1000:.1f} us")
    for config, time in sorted(times.items(), key=lambda item: item[1])[:keep]:
        print(f"  {time * 1000:8.1f} us  {config}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", nargs="*", default=[shape.name for shape in aot.SHAPES])
    parser.add_argument("--dtype", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--step", nargs="*", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--keep", type=int, default=5, help="how many of the fastest to print")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "tuning times kernels on a GPU, and torch sees none here; the sizes in "
            "trident_kernels/triton/configs.py stay as they are",
            file=sys.stderr,
        )
        return 2
    arch = device_of(torch.empty(0, device="cuda")).arch
    print(f"compute capability {arch / 10}, {configs.shared_memory(arch)} bytes of shared memory")
    for shape in aot.SHAPES:
        if shape.name in options.shape:
            for dtype, step in itertools.product(options.dtype, options.step):
                tune(shape, getattr(torch, dtype), step, options.keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
