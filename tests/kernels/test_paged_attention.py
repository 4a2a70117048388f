"""Paged attention: the reference against dense attention, the CPU kernel against the reference."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import trident_kernels as ops
from tests.kernels.batches import PagedBatch, error_scale, make_batch
from trident_kernels import reference

DTYPES = [torch.float32, torch.bfloat16]
needs_cpu_kernels = pytest.mark.skipif(not ops.HAS_CPU_KERNELS, reason="numba is not installed")


def dense(batch: PagedBatch, scale: float, window: int | None) -> Tensor:
    """One SDPA per sequence over contiguous keys, with the mask written out."""
    outputs = []
    for seq, n in enumerate(batch.seq_lens.tolist()):
        alone = batch.alone(seq)
        k, v = batch.keys_and_values(seq)
        group = batch.q.shape[1] // k.shape[0]
        position = torch.arange(n - len(alone.q), n)[:, None]
        key = torch.arange(n)
        mask = (key <= position) & (key > position - (window or n + 1))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        q = alone.q.float().transpose(0, 1)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


@st.composite
def batches(draw: st.DrawFn, dims: tuple[int, ...], longest: int) -> tuple[PagedBatch, int | None]:
    group, kv_heads = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    seqs = draw(
        st.lists(st.tuples(st.integers(0, 90), st.integers(1, longest)), min_size=1, max_size=5)
    )
    lens = [(min(q, n), n) for q, n in seqs]
    if not any(q for q, _ in lens):
        lens[0] = (1, lens[0][1])
    batch = make_batch(
        [q for q, _ in lens],
        [n for _, n in lens],
        (group * kv_heads, kv_heads),
        draw(st.sampled_from(dims)),
        draw(st.sampled_from([4, 7, 16, 32])),
        draw(st.sampled_from(DTYPES)),
        draw(st.integers(0, 1000)),
    )
    return batch, draw(st.sampled_from([None, None, 1, 20, 130]))


def check(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = error_scale(dtype)
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(batches((8, 20, 64), longest=150))
def test_reference_equals_dense_attention(case: tuple[PagedBatch, int | None]) -> None:
    batch, window = case
    scale = batch.q.shape[2] ** -0.5
    actual = reference.paged_attention(*batch.arguments(), scale, window)
    check(actual, dense(batch, scale, window), batch.q.dtype)


def test_reference_in_slices_equals_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch([40, 1], [60, 90], (4, 2), 16, 16, torch.float32, seed=0)
    whole = reference.paged_attention(*batch.arguments(), 0.25)
    monkeypatch.setattr(reference, "SCORE_ELEMENTS", 2 * 4 * 96 * 7)
    check(reference.paged_attention(*batch.arguments(), 0.25), whole, torch.float32)


@needs_cpu_kernels
@settings(max_examples=60, deadline=None, derandomize=True)
@given(batches((16, 32, 48, 64, 80, 112, 128, 256), longest=700))
def test_kernel_equals_reference(case: tuple[PagedBatch, int | None]) -> None:
    batch, window = case
    scale = batch.q.shape[2] ** -0.5
    actual = ops.paged_attention(*batch.arguments(), scale, window)
    expected = reference.paged_attention(*batch.arguments(), scale, window)
    check(actual, expected, batch.q.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
def test_sequence_is_bitwise_the_same_alone(dtype: torch.dtype, window: int | None) -> None:
    """Segments (700 keys), tiles of tokens (200) and decode share one batch; none notices another."""
    batch = make_batch([1, 200, 5, 1], [700, 300, 640, 40], (6, 2), 64, 16, dtype, seed=1)
    mixed = ops.paged_attention(*batch.arguments(), 0.125, window)
    for seq in range(4):
        first, end = batch.cu_seqlens_q[seq], batch.cu_seqlens_q[seq + 1]
        alone = ops.paged_attention(*batch.alone(seq).arguments(), 0.125, window)
        if ops.HAS_CPU_KERNELS:
            assert torch.equal(mixed[first:end], alone)
        else:
            check(mixed[first:end], alone, dtype)


@needs_cpu_kernels
def test_long_chunks_do_not_change_a_bit() -> None:
    """Key tiles start at fixed positions, so a prompt's chunking moves none of its sums."""
    batch = make_batch([400], [400], (4, 2), 32, 16, torch.bfloat16, seed=2)
    whole = ops.paged_attention(*batch.arguments(), 0.2)
    parts = []
    for first, end in ((0, 150), (150, 287), (287, 400)):
        lens = torch.tensor([end], dtype=torch.int32)
        cu_seqlens = torch.tensor([0, end - first], dtype=torch.int32)
        table = batch.block_tables
        q = batch.q[first:end]
        parts.append(
            ops.paged_attention(
                q, batch.k_cache, batch.v_cache, table, cu_seqlens, lens, end - first, end, 0.2
            )
        )
    assert torch.equal(torch.cat(parts), whole)


def shared_prefixes(dtype: torch.dtype, block_size: int) -> PagedBatch:
    """Two prefixes, of 512 and of 256 keys, shared by some sequences each, between others."""
    lens = [700, 600, 512, 513, 90, 300, 256, 511, 700, 640]
    queries = [1, 1, 1, 1, 1, 1, 1, 1, 1, 5]  # the last one is no decode step
    batch = make_batch(queries, lens, (6, 2), 64, block_size, dtype, seed=4)
    whole = 256 // block_size
    for seq in (2, 3, 8, 9):
        batch.block_tables[seq, : 2 * whole] = batch.block_tables[0, : 2 * whole]
    for seq in (5, 6, 7):
        batch.block_tables[seq, :whole] = batch.block_tables[1, :whole]
    return batch


@needs_cpu_kernels
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
def test_a_shared_prefix_changes_no_bit(
    dtype: torch.dtype, block_size: int, window: int | None
) -> None:
    batch = shared_prefixes(dtype, block_size)
    together = ops.paged_attention(*batch.arguments(), 0.125, window)
    check(together, reference.paged_attention(*batch.arguments(), 0.125, window), dtype)
    for seq in range(len(batch.seq_lens)):
        first, end = batch.cu_seqlens_q[seq], batch.cu_seqlens_q[seq + 1]
        alone = ops.paged_attention(*batch.alone(seq).arguments(), 0.125, window)
        assert torch.equal(together[first:end], alone)


@needs_cpu_kernels
def test_a_shared_prefix_is_read_once() -> None:
    """The tasks, as (members of the chain, first key) with how many there are of each."""
    from tests.kernels.chains import chains_of

    batch = shared_prefixes(torch.float32, 16)
    assert chains_of(batch) == {
        # Sequences 0, 2, 3, 8 share two segments, 1, 5, 6, 7 one; each for two heads.
        (4, 0): 4, (4, 256): 2, (1, 0): 4,
        # On their own: the second segments of 1, 5 and 7, and that of 9; third ones of 0, 1, 3, 8, 9.
        (1, 256): 8, (1, 512): 10,
    }  # fmt: skip


@needs_cpu_kernels
def test_more_sequences_than_a_task_takes_share_a_prefix() -> None:
    batch = make_batch([1] * 150, [300] * 150, (6, 2), 16, 16, torch.bfloat16, seed=5)
    batch.block_tables[1:, :16] = batch.block_tables[0, :16]
    together = ops.paged_attention(*batch.arguments(), 0.25)
    for seq in (0, 63, 64, 149):
        alone = ops.paged_attention(*batch.alone(seq).arguments(), 0.25)
        assert torch.equal(together[seq : seq + 1], alone)


@needs_cpu_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from trident_kernels.cpu import attention

    batch = make_batch([1, 90, 1], [900, 200, 3], (6, 2), 80, 16, dtype, seed=3)
    kernel = attention._paged_attention
    monkeypatch.setattr(attention, "_paged_attention", replace(kernel, parallel_from=0))
    parallel = ops.paged_attention(*batch.arguments(), 0.11)
    monkeypatch.setattr(attention, "_paged_attention", replace(kernel, parallel_from=1 << 60))
    assert torch.equal(ops.paged_attention(*batch.arguments(), 0.11), parallel)


@needs_cpu_kernels
def test_kernel_without_bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs without the instruction widen bfloat16 to float32: the same module, told it is absent."""
    from trident_kernels.cpu import attention, jit, simd

    if jit.CACHE_FOLDER is not None:
        # Only what is compiled differs, not the source: its code is kept in a folder of its own.
        monkeypatch.setattr(jit, "CACHE_FOLDER", jit.CACHE_FOLDER / "widened")
    monkeypatch.setattr(simd, "native_bf16_dot", lambda: False)
    assert attention.__file__ is not None
    spec = importlib.util.spec_from_file_location("widened_attention", attention.__file__)
    assert spec is not None
    assert spec.loader is not None
    widened = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(widened)
    monkeypatch.setitem(sys.modules, "widened_attention", widened)
    batch = make_batch([1, 90, 1], [900, 200, 3], (6, 2), 80, 16, torch.bfloat16, seed=3)
    *tensors, _, longest = batch.arguments()
    actual = widened.paged_attention(*tensors, longest, 0.11, None)
    check(actual, reference.paged_attention(*batch.arguments(), 0.11), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_may_be_a_strided_view(dtype: torch.dtype) -> None:
    batch = make_batch([3, 1], [50, 20], (4, 2), 32, 16, dtype, seed=4)
    expected = ops.paged_attention(*batch.arguments(), 0.2)
    pool = torch.stack([batch.k_cache, batch.v_cache], 1)  # [N, 2, K, B, D]
    wide_table = torch.cat([batch.block_tables, batch.block_tables], 1)
    view = wide_table[:, : batch.block_tables.shape[1]]
    strided = replace(batch, k_cache=pool[:, 0], v_cache=pool[:, 1], block_tables=view)
    actual = ops.paged_attention(*strided.arguments(), 0.2)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("head_dim", [24, 64])
def test_nan_in_a_query_stays_in_its_row(head_dim: int) -> None:
    batch = make_batch([2, 1], [40, 30], (2, 1), head_dim, 16, torch.float32, seed=5)
    batch.q[1, 0, 3] = float("nan")
    out = ops.paged_attention(*batch.arguments(), 0.2)
    bad = out.isnan().any(-1)
    assert bad.tolist() == [[False, False], [True, False], [False, False]]
