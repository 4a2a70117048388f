"""RMSNorm, gated SiLU and RoPE with the KV write: each against reference and written-out formulas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import trident_kernels as ops
from trident_kernels import reference

DTYPES = [torch.float32, torch.bfloat16]
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 1000)
bounded = settings(max_examples=40, deadline=None, derandomize=True)


def randn(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def check(actual: Tensor, expected: Tensor) -> None:
    """Equal but for the last bit of each of two roundings."""
    assert actual.dtype is expected.dtype
    tolerance = 1e-5 if actual.dtype is torch.float32 else 2**-7
    torch.testing.assert_close(
        actual.float(), expected.float(), rtol=tolerance, atol=tolerance / 10
    )


@bounded
@given(st.integers(0, 9), st.integers(1, 200), dtypes, seeds)
def test_rms_norm(rows: int, d: int, dtype: torch.dtype, seed: int) -> None:
    x, weight = randn(rows, d, dtype=dtype, seed=seed), randn(d, dtype=dtype, seed=seed + 1)
    check(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5).double(), exact, rtol=2e-2, atol=1e-6)


def test_rms_norm_takes_heads_and_strided_rows() -> None:
    x = randn(5, 4, 64, dtype=torch.bfloat16, seed=0)
    weight = randn(64, dtype=torch.bfloat16, seed=1)
    check(ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    check(ops.rms_norm(x[:, 2], weight, 1e-6), reference.rms_norm(x[:, 2], weight, 1e-6))


@bounded
@given(st.integers(1, 9), st.integers(1, 200), dtypes, seeds)
def test_add_rms_norm_updates_the_residual(
    rows: int, d: int, dtype: torch.dtype, seed: int
) -> None:
    x, weight = randn(rows, d, dtype=dtype, seed=seed), randn(d, dtype=dtype, seed=seed + 1)
    residual = randn(rows, d, dtype=dtype, seed=seed + 2)
    total = x + residual
    out = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    check(out, reference.rms_norm(total, weight, 1e-5))


@bounded
@given(st.integers(0, 9), st.integers(1, 200), dtypes, seeds, st.sampled_from([1.0, 100.0]))
def test_silu_and_mul(rows: int, d: int, dtype: torch.dtype, seed: int, scale: float) -> None:
    gate_up = randn(rows, 2 * d, dtype=dtype, seed=seed, scale=scale)
    check(ops.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))
    gate, up = gate_up.double().chunk(2, -1)
    exact = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(
        ops.silu_and_mul(gate_up).double(), exact, rtol=2e-2, atol=1e-30 if scale > 1 else 1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    x = randn(3, 64, dtype=dtype, seed=0)
    x[1, 5] = float("nan")
    weight = torch.ones(64, dtype=dtype)
    assert ops.rms_norm(x, weight, 1e-5).isnan().any(-1).tolist() == [False, True, False]
    assert ops.silu_and_mul(x).isnan().any(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    """600 rows run on all threads, one row on one: the same bits."""
    x, weight = randn(600, 576, dtype=dtype, seed=0), randn(576, dtype=dtype, seed=1)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5)[599:], ops.rms_norm(x[599:], weight, 1e-5))
    assert torch.equal(ops.silu_and_mul(x)[599:], ops.silu_and_mul(x[599:]))
    residual = x.clone()
    alone = residual[599:].clone()
    whole = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(whole[599:], ops.add_rms_norm(x[599:], alone, weight, 1e-5))


@bounded
@given(
    tokens=st.integers(0, 40),
    heads=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    quarter=st.integers(2, 32),
    partial=st.booleans(),
    block_size=st.sampled_from([4, 7, 16]),
    dtype=dtypes,
    with_norm=st.booleans(),
    seed=seeds,
)
def test_rope_and_write_kv(
    tokens: int,
    heads: int,
    kv_heads: int,
    quarter: int,
    partial: bool,
    block_size: int,
    dtype: torch.dtype,
    with_norm: bool,
    seed: int,
) -> None:
    d = 4 * quarter
    rotary = d // 2 if partial else d
    g = torch.Generator().manual_seed(seed)
    n_blocks = 40 // block_size + 3
    qkv = randn(tokens, (heads + 2 * kv_heads) * d, dtype=dtype, seed=seed)
    angles = torch.randn(100, rotary // 2, generator=g)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    positions = torch.randint(0, 100, (tokens,), generator=g)
    slots = torch.randperm(n_blocks * block_size, generator=g)[:tokens]
    weights = [randn(d, dtype=dtype, seed=seed + i) for i in (1, 2)]
    q_norm, k_norm = weights if with_norm else (None, None)
    # The pool is one canary: every cell must still hold it unless its slot is named.
    caches = [torch.full((n_blocks, kv_heads, block_size, d), 77.0, dtype=dtype) for _ in range(4)]
    shape = (slots, heads, kv_heads, d, q_norm, k_norm, 1e-6)
    q = ops.rope_and_write_kv(qkv, positions, cos_sin, caches[0], caches[1], *shape)
    expected = reference.rope_and_write_kv(qkv, positions, cos_sin, caches[2], caches[3], *shape)
    check(q, expected)
    check(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])
    untouched = torch.ones(n_blocks * block_size, dtype=torch.bool)
    untouched[slots] = False
    for cache in caches[:2]:
        assert (cache.transpose(1, 2).flatten(0, 1)[untouched] == 77.0).all()


def test_reference_rope_is_the_complex_rotation() -> None:
    """(low + i high) * e^(i angle), and every value lands in the slot that names it."""
    d, angle = 8, torch.rand(6, 4) * 7
    qkv = randn(6, 3 * d, dtype=torch.float32, seed=0)
    cos_sin = torch.cat([angle.cos(), angle.sin()], 1)
    positions = torch.tensor([3, 1, 5])
    k_cache, v_cache = torch.zeros(2, 1, 4, d), torch.zeros(2, 1, 4, d)
    slots = torch.tensor([6, 0, 3])
    q = reference.rope_and_write_kv(
        qkv[:3], positions, cos_sin, k_cache, v_cache, slots, 1, 1, d, None, None, 1e-6
    )
    for t in range(3):
        turn = torch.polar(torch.ones(4), angle[positions[t]])
        for start, result in ((0, q[t, 0]), (d, k_cache[slots[t] // 4, 0, slots[t] % 4])):
            x = torch.complex(qkv[t, start : start + 4], qkv[t, start + 4 : start + 8]) * turn
            torch.testing.assert_close(result, torch.cat([x.real, x.imag]))
        assert torch.equal(v_cache[slots[t] // 4, 0, slots[t] % 4], qkv[t, 2 * d :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_writes_into_a_strided_pool(dtype: torch.dtype) -> None:
    pool = torch.zeros(5, 2, 2, 8, 32, dtype=dtype)  # [N, k and v, K, B, D]
    qkv = randn(9, (4 + 4) * 32, dtype=dtype, seed=1)
    cos_sin, slots = torch.randn(20, 32), torch.arange(30, 39)
    k_cache, v_cache = torch.zeros(2, 5, 2, 8, 32, dtype=dtype)
    rest = (slots, 4, 2, 32, None, None, 1e-6)
    positions = torch.arange(9)
    ops.rope_and_write_kv(qkv, positions, cos_sin, pool[:, 0], pool[:, 1], *rest)
    reference.rope_and_write_kv(qkv, positions, cos_sin, k_cache, v_cache, *rest)
    check(pool[:, 0], k_cache)
    assert torch.equal(pool[:, 1], v_cache)
