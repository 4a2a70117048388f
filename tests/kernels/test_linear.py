"""Packed linear layers against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import trident_kernels as ops
from trident_kernels.cpu.simd import native_bf16_dot
from trident_kernels.linear import Layout


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
    assert packed.layout is Layout.ONEDNN
    assert packed.weight.is_mkldnn
    if native_bf16_dot():
        packed = ops.pack_linear(weight.bfloat16())
        assert packed.layout is Layout.PANELS
        assert packed.weight.nbytes == 2 * weight.numel()


def test_other_dtypes_stay_plain() -> None:
    weight, x = torch.randn(8, 4).double(), torch.randn(3, 4).double()
    packed = ops.pack_linear(weight)
    assert packed.layout is Layout.PLAIN
    torch.testing.assert_close(ops.linear(x, packed), functional.linear(x, weight))


@pytest.mark.skipif(not native_bf16_dot(), reason="this CPU does not multiply bfloat16")
@pytest.mark.parametrize("shape", [(16, 2), (48, 2), (64, 10), (80, 64), (130, 34), (640, 576)])
@pytest.mark.parametrize("rows", [1, 5, 6, 7, 13, 96, 97, 200])
def test_a_rows_bits_do_not_depend_on_the_others(shape: tuple[int, int], rows: int) -> None:
    g = torch.Generator().manual_seed(rows)
    weight = torch.randn(shape, generator=g).bfloat16()
    x = torch.randn(rows, shape[1], generator=g).bfloat16()
    packed = ops.pack_linear(weight, torch.randn(shape[0], generator=g).bfloat16())
    together = ops.linear(x, packed)
    exact = x.double() @ weight.double().t() + packed.bias[: shape[0]].double()
    torch.testing.assert_close(together.double(), exact, rtol=2**-7, atol=2e-2)
    for row in range(0, rows, 7):
        assert torch.equal(ops.linear(x[row : row + 1], packed)[0], together[row])


@pytest.mark.skipif(not native_bf16_dot(), reason="this CPU does not multiply bfloat16")
def test_rows_that_lie_apart_and_weights_with_nothing_beside_them() -> None:
    """Strided inputs; and nothing is read or written beyond what is named."""
    weight = torch.randn(40, 12).bfloat16()
    packed = ops.pack_linear(weight)
    wide = torch.full((9, 16), float("nan")).bfloat16()
    wide[:, :12] = torch.randn(9, 12).bfloat16()
    out = ops.linear(wide[:, :12], packed)
    torch.testing.assert_close(
        out, functional.linear(wide[:, :12].contiguous(), weight), rtol=2e-2, atol=2e-2
    )
    odd = torch.randn(9, 13).bfloat16()[:, :12]  # rows begin in the middle of a word
    torch.testing.assert_close(
        ops.linear(odd, packed), functional.linear(odd, weight), rtol=2e-2, atol=2e-2
    )


@pytest.mark.skipif(not native_bf16_dot(), reason="this CPU does not multiply bfloat16")
def test_what_is_not_finite_stays_in_its_row() -> None:
    packed = ops.pack_linear(torch.randn(64, 32).bfloat16())
    x = torch.randn(8, 32).bfloat16()
    clean = ops.linear(x, packed)
    x[3, 5] = float("nan")
    out = ops.linear(x, packed)
    assert out[3].isnan().all()
    rest = [row for row in range(8) if row != 3]
    assert torch.equal(out[rest], clean[rest])


needs_int8 = pytest.mark.skipif(not ops.can_quantize(), reason="this CPU does not multiply int8")


def quantized_weight(weight: torch.Tensor) -> torch.Tensor:
    """What is left of a weight [out, in] after rounding to int8, a scale per output and 64 inputs."""
    groups = weight.float().view(len(weight), -1, 64)
    scale = groups.abs().amax(dim=2, keepdim=True) / 127
    return ((groups / scale).round() * scale).view(weight.shape)


def quantized_inputs(x: torch.Tensor) -> torch.Tensor:
    """What is left of inputs [T, in] after rounding to int8 with a scale per row and 64 of them."""
    groups = x.float().view(len(x), x.shape[1] // 64, 64)
    scale = groups.abs().amax(dim=2, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    # The kernel rounds the exact product once; in double it is exact.
    return ((groups.double() * inverse.double()).round().float() * scale).view(x.shape)


@needs_int8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16, 64), (48, 128), (70, 192), (130, 64), (640, 576)])
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 7, 13, 97, 200])
def test_int8_is_the_product_of_what_was_rounded(
    dtype: torch.dtype, shape: tuple[int, int], rows: int
) -> None:
    g = torch.Generator().manual_seed(rows)
    weight = torch.randn(shape, generator=g).to(dtype)
    bias = torch.randn(shape[0], generator=g).to(dtype)
    x = torch.randn(rows, shape[1], generator=g).to(dtype)
    if rows:
        x[0, :64] = 0.0  # a group without a scale
        x[-1, 5] = 300.0  # one input far above the others
    packed = ops.pack_linear(weight, bias, int8=True)
    assert packed.layout is Layout.INT8
    assert packed.weight.nbytes == -(-shape[0] // 16) * 16 * shape[1] * 17 // 16
    out = ops.linear(x, packed)
    assert out.shape == (rows, shape[0]) and out.dtype is dtype
    exact = quantized_inputs(x) @ quantized_weight(weight).t() + bias.float()
    rounding = 2**-7 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.float(), exact, rtol=rounding, atol=1e-3 + rounding)
    for row in range(0, rows, 7):
        assert torch.equal(ops.linear(x[row : row + 1], packed)[0], out[row])


@needs_int8
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_int8_shows_what_is_not_finite_in_its_row_alone(value: float) -> None:
    packed = ops.pack_linear(torch.randn(64, 128).bfloat16(), int8=True)
    x = torch.randn(8, 128).bfloat16()
    clean = ops.linear(x, packed)
    x[3, 70] = value
    out = ops.linear(x, packed)
    assert not out[3].isfinite().any()
    rest = [row for row in range(8) if row != 3]
    assert torch.equal(out[rest], clean[rest])


@needs_int8
def test_a_weight_whose_inputs_make_no_groups_stays_as_it_is() -> None:
    weight, x = torch.randn(32, 36), torch.randn(3, 36)
    packed = ops.pack_linear(weight, int8=True)
    assert packed.layout is not Layout.INT8
    torch.testing.assert_close(ops.linear(x, packed), functional.linear(x, weight))
