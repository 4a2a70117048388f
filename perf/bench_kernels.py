"""Measure every kernel at decode and prefill sizes against what this machine can do.

Limits first: copy bandwidth (bytes read plus written) and the rate of one packed matmul of the
model's sizes. Then a table of microseconds, the share of the copy bandwidth for operations bound by
memory, and GFLOP/s with the share of the matmul rate for products. Last, one JSON object.

    python perf/bench_kernels.py --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

import trident_kernels as ops


@dataclass(frozen=True)
class Model:
    """Sizes of one decoder layer."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True)
class Case:
    """A flat batch of equal sequences: each computes query_len tokens and then has seq_len."""

    name: str
    seqs: int
    query_len: int
    seq_len: int

    @property
    def tokens(self) -> int:
        return self.seqs * self.query_len


@dataclass(frozen=True)
class Result:
    case: str
    operation: str
    us: float  # median
    best_us: float
    gb_per_s: float
    percent_of_copy: float
    gflop_per_s: float
    percent_of_matmul: float


Measured = tuple[str, Callable[[], object], float, float]  # name, call, bytes, FLOPs

CASES = (
    Case("decode 1 x 256", 1, 1, 256),
    Case("decode 1 x 4096", 1, 1, 4096),
    Case("decode 32 x 256", 32, 1, 256),
    Case("prefill 512", 1, 512, 512),
    Case("prefill 4096", 1, 4096, 4096),
)


def timed(call: Callable[[], object], seconds: float) -> tuple[float, float]:
    """(median, least) seconds of a call repeated for about `seconds`, at least three times."""
    call()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples), min(samples)


def copy_bandwidth(seconds: float) -> float:
    """Bytes per second, read plus written, of a copy far larger than the caches."""
    source = torch.ones(1 << 26)
    target = torch.empty_like(source)
    _, best = timed(lambda: target.copy_(source), seconds)
    return 2 * 4 * source.numel() / best


def matmul_rate(dtype: torch.dtype, hidden: int, intermediate: int, seconds: float) -> float:
    """FLOP per second of a packed product of 512 rows with a [intermediate, hidden] weight."""
    x = torch.randn(512, hidden).to(dtype)
    weight = ops.pack_linear(torch.randn(intermediate, hidden).to(dtype))
    _, best = timed(lambda: ops.linear(x, weight), seconds)
    return 2 * 512 * hidden * intermediate / best


def attention_call(case: Case, model: Model, dtype: torch.dtype) -> Measured:
    blocks = -(-case.seq_len // model.block_size)
    shape = (case.seqs * blocks, model.kv_heads, model.block_size, model.head_dim)
    k_cache, v_cache = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    q = torch.randn(case.tokens, model.heads, model.head_dim).to(dtype)
    tables = torch.randperm(shape[0]).int().view(case.seqs, blocks)
    starts = torch.arange(case.seqs + 1, dtype=torch.int32) * case.query_len
    lens = torch.full((case.seqs,), case.seq_len, dtype=torch.int32)
    scale = model.head_dim**-0.5

    def call() -> Tensor:
        longest = (case.query_len, case.seq_len)
        return ops.paged_attention(q, k_cache, v_cache, tables, starts, lens, *longest, scale)

    context = case.seq_len - case.query_len
    pairs = case.query_len * context + case.query_len * (case.query_len + 1) // 2
    flops = 4 * model.heads * model.head_dim * pairs * case.seqs
    moved = 2 * k_cache.nbytes + 2 * q.nbytes
    return "paged_attention", call, moved, flops


def elementwise_calls(case: Case, model: Model, dtype: torch.dtype) -> Iterator[Measured]:
    t, d = case.tokens, model.hidden
    x, residual, weight = (torch.randn(s).to(dtype) for s in ((t, d), (t, d), (d,)))
    gate_up = torch.randn(t, 2 * model.intermediate).to(dtype)
    qkv = torch.randn(t, model.qkv).to(dtype)
    blocks = -(-t // model.block_size)
    k_cache, v_cache = torch.zeros(
        2, blocks, model.kv_heads, model.block_size, model.head_dim, dtype=dtype
    )
    positions = slots = torch.arange(t)
    cos_sin = torch.randn(t, model.head_dim)
    sizes = (model.heads, model.kv_heads, model.head_dim, None, None, 1e-5)
    yield "rms_norm", lambda: ops.rms_norm(x, weight, 1e-5), 2 * x.nbytes, 0
    yield "add_rms_norm", lambda: ops.add_rms_norm(x, residual, weight, 1e-5), 4 * x.nbytes, 0
    yield "silu_and_mul", lambda: ops.silu_and_mul(gate_up), gate_up.nbytes * 1.5, 0
    yield (
        "rope_and_write_kv",
        lambda: ops.rope_and_write_kv(qkv, positions, cos_sin, k_cache, v_cache, slots, *sizes),
        2 * qkv.nbytes + cos_sin.nbytes,
        0,
    )


def linear_calls(case: Case, model: Model, dtype: torch.dtype) -> Iterator[Measured]:
    for name, out, inner in (
        ("linear qkv", model.qkv, model.hidden),
        ("linear gate_up", 2 * model.intermediate, model.hidden),
        ("linear down", model.hidden, model.intermediate),
    ):
        x, w = torch.randn(case.tokens, inner).to(dtype), torch.randn(out, inner).to(dtype)
        packed = ops.pack_linear(w)
        moved = w.nbytes + x.nbytes + case.tokens * out * w.element_size()
        call = lambda x=x, packed=packed: ops.linear(x, packed)  # noqa: E731
        yield name, call, moved, 2 * case.tokens * out * inner


def measure(case: Case, args: argparse.Namespace, copy: float, matmul: float) -> Iterator[Result]:
    model = Model(
        args.hidden, args.intermediate, args.heads, args.kv_heads, args.head_dim, args.block_size
    )
    dtype = getattr(torch, args.dtype)
    calls = [
        *elementwise_calls(case, model, dtype),
        attention_call(case, model, dtype),
        *linear_calls(case, model, dtype),
    ]
    for name, call, moved, flops in calls:
        median, best = timed(call, args.seconds)
        bandwidth, rate = moved / best, flops / best
        yield Result(
            case.name,
            name,
            round(median * 1e6, 1),
            round(best * 1e6, 1),
            round(bandwidth / 1e9, 1),
            round(100 * bandwidth / copy, 1),
            round(rate / 1e9, 1),
            round(100 * rate / matmul, 1),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.3, help="per operation and case")
    sizes = {"hidden": 576, "intermediate": 1536, "heads": 9, "kv-heads": 3, "head-dim": 64}
    for name, default in {**sizes, "block-size": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    compile_s = ops.compile_cpu_kernels()
    load = os.getloadavg()[0]
    copy = copy_bandwidth(args.seconds)
    matmul = matmul_rate(getattr(torch, args.dtype), args.hidden, args.intermediate, args.seconds)
    print(f"copy {copy / 1e9:.1f} GB/s, matmul {matmul / 1e9:.0f} GFLOP/s, load {load:.1f}")
    header = ("case", "operation", "median us", "best us", "GB/s", "% copy", "GFLOP/s", "% matmul")
    layout = "{:<16} {:<18} {:>10} {:>10} {:>7} {:>7} {:>8} {:>8}"
    print(layout.format(*header))
    results = []
    for case in CASES:
        for result in measure(case, args, copy, matmul):
            print(layout.format(*asdict(result).values()), flush=True)
            results.append(asdict(result))
    limits = {"copy_gb_per_s": round(copy / 1e9, 1), "matmul_gflop_per_s": round(matmul / 1e9, 1)}
    run = {"settings": vars(args), "load": load, "compile_s": round(compile_s, 2)}
    print(json.dumps({**run, **limits, "results": results}))


if __name__ == "__main__":
    main()
