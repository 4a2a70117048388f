"""The Triton kernels against reference.py, through the dispatch that the engine uses.

Run by test_triton.py in a process of its own, since Triton decides at import whether it interprets:
here on CPU tensors in the interpreter, and on a CUDA device where there is one. bfloat16 only on a
device: the interpreter's conversions to it truncate, and its products of it are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import trident_kernels as ops
from tests.kernels.batches import PagedBatch, make_batch
from trident_kernels import reference
from trident_kernels.triton import attention
from trident_kernels.triton.configs import AttentionConfig

# numpy, in the interpreter, on infinities and NaN that are meant; older interpreters use it in old ways.
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore:Conversion of an array:DeprecationWarning"
)
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 1000)
bounded = settings(max_examples=100 if ON_GPU else 12, deadline=None, derandomize=True)


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    """Every torch.empty is full of NaN: what a kernel leaves unwritten shows."""
    assert ops.HAS_TRITON_KERNELS
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)


def randn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)


def check(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype is expected.dtype
    assert actual.shape == expected.shape
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


@bounded
@given(st.integers(0, 5), st.integers(1, 200), dtypes, seeds)
def test_rms_norm(rows: int, d: int, dtype: torch.dtype, seed: int) -> None:
    x, weight = randn(rows, d, dtype=dtype, seed=seed), randn(d, dtype=dtype, seed=seed + 1)
    check(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_takes_heads_and_strided_rows(dtype: torch.dtype) -> None:
    x, weight = randn(5, 4, 24, dtype=dtype, seed=0), randn(24, dtype=dtype, seed=1)
    check(ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    check(ops.rms_norm(x[:, 2], weight, 1e-6), reference.rms_norm(x[:, 2], weight, 1e-6))
    check(ops.rms_norm(x[..., 4], weight[:4], 0.1), reference.rms_norm(x[..., 4], weight[:4], 0.1))


@bounded
@given(st.integers(0, 5), st.integers(1, 200), dtypes, seeds)
def test_add_rms_norm_writes_the_residual_and_nothing_else(
    rows: int, d: int, dtype: torch.dtype, seed: int
) -> None:
    x, weight = randn(rows, d, dtype=dtype, seed=seed), randn(d, dtype=dtype, seed=seed + 1)
    pool = randn(rows, d + 7, dtype=dtype, seed=seed + 2)
    before = pool.clone()
    out = ops.add_rms_norm(x, pool[:, 3 : 3 + d], weight, 1e-5)
    residual = before[:, 3 : 3 + d].clone()
    check(out, reference.add_rms_norm(x, residual, weight, 1e-5))
    assert torch.equal(pool[:, 3 : 3 + d], residual)
    assert torch.equal(pool[:, :3], before[:, :3])
    assert torch.equal(pool[:, 3 + d :], before[:, 3 + d :])


@bounded
@given(st.integers(0, 5), st.integers(1, 1300), dtypes, seeds, st.sampled_from([1.0, 100.0]))
def test_silu_and_mul(rows: int, d: int, dtype: torch.dtype, seed: int, scale: float) -> None:
    gate_up = randn(rows, 2 * d, dtype=dtype, seed=seed) * scale
    check(ops.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))


def test_nan_stays_in_its_row() -> None:
    x = randn(3, 64, dtype=torch.float32, seed=0)
    x[1, 5] = float("nan")
    weight = torch.ones(64, device=DEVICE)
    assert ops.rms_norm(x, weight, 1e-5).isnan().any(-1).tolist() == [False, True, False]
    assert ops.silu_and_mul(x).isnan().any(-1).tolist() == [False, True, False]


@bounded
@given(
    tokens=st.integers(0, 6),
    heads=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    quarter=st.integers(2, 32),
    partial=st.booleans(),
    block_size=st.sampled_from([4, 7, 16]),
    dtype=dtypes,
    with_norm=st.booleans(),
    strided=st.booleans(),
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
    strided: bool,
    seed: int,
) -> None:
    d = 4 * quarter
    rotary = d // 2 if partial else d
    g = torch.Generator().manual_seed(seed)
    n_blocks = 40 // block_size + 3
    qkv = randn(tokens, (heads + 2 * kv_heads) * d, dtype=dtype, seed=seed)
    angles = torch.randn(100, rotary // 2, generator=g)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(DEVICE)
    positions = torch.randint(0, 100, (tokens,), generator=g).to(DEVICE)
    slots = torch.randperm(n_blocks * block_size, generator=g)[:tokens].to(DEVICE)
    weights = [randn(d, dtype=dtype, seed=seed + i) for i in (1, 2)]
    q_norm, k_norm = weights if with_norm else (None, None)
    # The pool is one canary: every cell must still hold it unless its slot is named.
    shape = (2, n_blocks, kv_heads, block_size, d)
    pool = torch.full(shape, 77.0, dtype=dtype, device=DEVICE)
    if strided:
        pool = pool.transpose(0, 1).contiguous().transpose(0, 1)
    expected_pool = pool.clone()
    rest = (slots, heads, kv_heads, d, q_norm, k_norm, 1e-6)
    q = ops.rope_and_write_kv(qkv, positions, cos_sin, pool[0], pool[1], *rest)
    expected = reference.rope_and_write_kv(
        qkv, positions, cos_sin, expected_pool[0], expected_pool[1], *rest
    )
    check(q, expected)
    check(pool, expected_pool)
    untouched = torch.ones(n_blocks * block_size, dtype=torch.bool)
    untouched[slots.cpu()] = False
    for cache in pool:
        assert (cache.transpose(1, 2).flatten(0, 1)[untouched] == 77.0).all()


@st.composite
def batches(draw: st.DrawFn) -> tuple[PagedBatch, int | None]:
    """Prefill, chunks, decode and empty sequences, mixed; any group, head_dim and block_size."""
    group, kv_heads = draw(st.integers(1, 8)), draw(st.integers(1, 2))
    decode = draw(st.booleans())
    queries = st.just(1) if decode else st.integers(0, 40)
    lens = draw(st.lists(st.tuples(queries, st.integers(1, 100)), min_size=1, max_size=5))
    lens = [(min(q, n), n) for q, n in lens]
    if not any(q for q, _ in lens):
        lens[0] = (1, lens[0][1])
    batch = make_batch(
        [q for q, _ in lens],
        [n for _, n in lens],
        (group * kv_heads, kv_heads),
        draw(st.sampled_from([8, 16, 24, 64, 80])),
        draw(st.sampled_from([4, 7, 16, 32, 48])),
        draw(dtypes),
        draw(seeds),
    )
    return on_device(batch), draw(st.sampled_from([None, None, 1, 20, 130]))


def on_device(batch: PagedBatch) -> PagedBatch:
    return PagedBatch(**{name: values.to(DEVICE) for name, values in vars(batch).items()})


@bounded
@given(batches())
def test_attention_as_dispatched(case: tuple[PagedBatch, int | None]) -> None:
    batch, window = case
    scale = batch.q.shape[2] ** -0.5
    actual = ops.paged_attention(*batch.arguments(), scale, window)
    check(actual, reference.paged_attention(*batch.arguments(), scale, window))


@bounded
@given(
    batches(),
    st.sampled_from([16, 32, 64]),
    st.sampled_from([16, 32, 64]),
    st.sampled_from([1, 2, 3, 5, 32]),
)
def test_attention_for_any_tile_and_split(
    case: tuple[PagedBatch, int | None], block_m: int, tile: int, splits: int
) -> None:
    batch, window = case
    config = AttentionConfig(block_m, tile, num_warps=4, num_stages=1)
    actual = attention.paged_attention(
        *batch.arguments(), 0.2, window, config=config, splits=splits
    )
    check(actual, reference.paged_attention(*batch.arguments(), 0.2, window))


@pytest.mark.parametrize("head_dim", [96, 112, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_heads(head_dim: int, dtype: torch.dtype) -> None:
    batch = on_device(make_batch([1, 5, 1], [20, 33, 70], (4, 2), head_dim, 16, dtype, seed=6))
    for splits in (1, 3):
        actual = attention.paged_attention(*batch.arguments(), 0.1, splits=splits)
        check(actual, reference.paged_attention(*batch.arguments(), 0.1))


def test_long_sequences_are_split_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[int, ...]] = []
    launch = attention.launch

    def noted(kernel: object, grid: tuple[int, ...], *args: object, **rest: object) -> None:
        started.append(grid)
        launch(kernel, grid, *args, **rest)

    monkeypatch.setattr(attention, "launch", noted)
    batch = on_device(make_batch([1, 1], [1100, 3], (4, 2), 16, 16, torch.float32, seed=7))
    actual = attention.paged_attention(*batch.arguments(), 0.2, deterministic=False)
    check(actual, reference.paged_attention(*batch.arguments(), 0.2))
    assert started == [(2, 2, 4), (8,)]
    started.clear()
    attention.paged_attention(*batch.arguments(), 0.2, deterministic=True)
    assert started == [(2, 2, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 30])
def test_deterministic_rows_are_bitwise_the_same_alone(
    dtype: torch.dtype, window: int | None
) -> None:
    batch = on_device(make_batch([1, 50, 5, 1], [90, 70, 40, 8], (6, 2), 16, 16, dtype, seed=1))
    mixed = attention.paged_attention(*batch.arguments(), 0.125, window, deterministic=True)
    for seq in range(4):
        first, end = batch.cu_seqlens_q[seq], batch.cu_seqlens_q[seq + 1]
        alone = on_device(batch.alone(seq)).arguments()
        result = attention.paged_attention(*alone, 0.125, window, deterministic=True)
        assert torch.equal(mixed[first:end], result)


@pytest.mark.parametrize("splits", [1, 3])
def test_upper_bounds_may_be_loose(splits: int) -> None:
    """A graph is captured for the largest step: counts on the device are what holds."""
    batch = on_device(make_batch([1, 1, 1], [40, 3, 17], (4, 2), 16, 16, torch.float32, seed=2))
    *tensors, _, _ = batch.arguments()
    expected = reference.paged_attention(*tensors, 1, 40, 0.2)
    for most, longest in ((1, 4096), (3, 64), (300, 4096)):
        actual = attention.paged_attention(*tensors, most, longest, 0.2, splits=splits)
        check(actual, expected)


def test_cache_and_table_may_be_strided_views() -> None:
    batch = on_device(make_batch([3, 1], [50, 20], (4, 2), 32, 16, torch.float32, seed=4))
    expected = ops.paged_attention(*batch.arguments(), 0.2)
    pool = torch.stack([batch.k_cache, batch.v_cache], 1)  # [N, 2, K, B, D]
    wide = torch.cat([batch.block_tables, batch.block_tables], 1)
    view = wide[:, : batch.block_tables.shape[1]]
    strided = replace(batch, k_cache=pool[:, 0], v_cache=pool[:, 1], block_tables=view)
    assert torch.equal(ops.paged_attention(*strided.arguments(), 0.2), expected)


def test_offsets_beyond_32_bits() -> None:
    """A pool whose blocks lie 2**31 elements apart; only the touched pages exist."""
    stride = 2**31
    if ON_GPU and torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of device memory")
    batch = on_device(make_batch([1], [20], (2, 1), 16, 16, torch.float16, seed=8))
    caches = []
    for cache in (batch.k_cache, batch.v_cache):
        # numpy's zeros take no memory until they are written.
        pool = torch.from_numpy(np.zeros(stride + 2**10, np.float16)).to(DEVICE)
        far = pool.as_strided((2, 1, 16, 16), (stride, 256, 16, 1))
        far.copy_(cache[batch.block_tables[0, :2].long()])
        caches.append(far)
    table = torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE)
    apart = replace(batch, k_cache=caches[0], v_cache=caches[1], block_tables=table)
    expected = reference.paged_attention(*batch.arguments(), 0.2)
    check(ops.paged_attention(*apart.arguments(), 0.2), expected)


@pytest.mark.parametrize("splits", [1, 3])
def test_nan_in_a_query_stays_in_its_row(splits: int) -> None:
    batch = on_device(make_batch([2, 1], [40, 30], (2, 1), 24, 16, torch.float32, seed=5))
    batch.q[1, 0, 3] = float("nan")
    out = attention.paged_attention(*batch.arguments(), 0.2, splits=splits)
    bad = out.isnan().any(-1)
    assert bad.tolist() == [[False, False], [True, False], [False, False]]


def test_padded_rows_touch_block_0_alone() -> None:
    """What a padded decode step does: one-token sequences whose table and slot are 0."""
    kv_heads, d, size = 2, 16, 16
    pool = torch.full((2, 6, kv_heads, size, d), 77.0, device=DEVICE)
    qkv = randn(4, 8 * d, dtype=torch.float32, seed=0)
    zeros = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    slots = torch.tensor([3 * size, 0, 0, 0], device=DEVICE)
    angles = torch.ones(1, d, device=DEVICE)
    q = ops.rope_and_write_kv(
        qkv, zeros, angles, pool[0], pool[1], slots, 4, kv_heads, d, None, None, 1e-6
    )
    assert (pool[:, 1:3] == 77.0).all()
    assert (pool[:, 4:] == 77.0).all()
    assert (pool[:, [0, 3], :, 1:] == 77.0).all()
    tables = torch.tensor([[3], [0], [0], [0]], dtype=torch.int32, device=DEVICE)
    starts = torch.arange(5, dtype=torch.int32, device=DEVICE)
    lens = torch.ones(4, dtype=torch.int32, device=DEVICE)
    out = ops.paged_attention(q, pool[0], pool[1], tables, starts, lens, 1, 64, 0.25)
    check(out[0], pool[1, 3, :, 0].repeat_interleave(2, 0))
