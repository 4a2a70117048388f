"""Packed linear layers against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import trident_kernels as ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 17, 64, 500])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_for_any_number_of_rows(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    g = torch.Generator().manual_seed(rows)
    weight = torch.randn(70, 36, generator=g).to(dtype)
    bias = torch.randn(70, generator=g).to(dtype) if with_bias else None
    x = torch.randn(rows, 36, generator=g).to(dtype)
    packed = ops.pack_linear(weight, bias)
    out = ops.linear(x, packed)
    assert out.shape == (rows, 70)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    expected = functional.linear(x, weight, bias)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=10 * tolerance)
    assert (packed.out_features, packed.in_features) == (70, 36)


def test_packing_keeps_no_plain_copy() -> None:
    weight = torch.randn(32, 32)
    packed = ops.pack_linear(weight)
    assert packed.packed
    assert packed.weight.is_mkldnn


def test_other_dtypes_stay_plain() -> None:
    weight, x = torch.randn(8, 4).double(), torch.randn(3, 4).double()
    packed = ops.pack_linear(weight)
    assert not packed.packed
    torch.testing.assert_close(ops.linear(x, packed), functional.linear(x, weight))
