"""Linear layers with weights packed once.

Owns LinearWeight. On the CPU the weight is kept only in the layout of its product: in bfloat16, where
the CPU multiplies it, that of our own kernel; else oneDNN's, since packing at load saves a reorder in
each call (M=1 on a 576 x 49152 head: 4.6 ms -> 1.1 ms). Elsewhere it stays plain. On request a weight
is quantized to int8, where the CPU multiplies that.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

try:
    from trident_kernels.cpu import linear as _bf16
    from trident_kernels.cpu import linear_int8 as _int8
except ImportError:  # numba is missing or told not to compile
    _bf16 = _int8 = None  # type: ignore[assignment]

# The overload itself: looking it up by signature in each call costs more than a small product.
_linear_pointwise: Any = (
    torch.ops.mkldnn._linear_pointwise.default
    if hasattr(torch.ops.mkldnn, "_linear_pointwise")
    else None
)


class Layout(Enum):
    """How a weight lies in memory, and so what multiplies it."""

    PLAIN = "plain"
    ONEDNN = "onednn"
    PANELS = "panels"  # trident_kernels.cpu.linear
    INT8 = "int8"  # trident_kernels.cpu.linear_int8


@dataclass(frozen=True, slots=True, eq=False)
class LinearWeight:
    """A weight [out, in] and bias [out] in the layout of the device's matmul."""

    weight: Tensor  # opaque unless plain
    bias: Tensor | None  # [out]; filled up where the weight is in panels
    in_features: int
    out_features: int
    layout: Layout


def _has_onednn() -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and _linear_pointwise is not None


def can_quantize() -> bool:
    """Whether weights of this machine's CPU can be int8."""
    return _int8 is not None and _int8.is_available()


def _layout_for(weight: Tensor, int8: bool) -> Layout:
    if weight.device.type != "cpu":
        return Layout.PLAIN
    if int8 and _int8 is not None and _int8.can_multiply(weight):
        return Layout.INT8
    if _bf16 is not None and _bf16.can_multiply(weight):
        return Layout.PANELS
    if _has_onednn() and weight.dtype is torch.float32:
        return Layout.ONEDNN
    if _has_onednn() and weight.dtype is torch.bfloat16:
        return Layout.ONEDNN if torch.ops.mkldnn._is_mkldnn_bf16_supported() else Layout.PLAIN
    return Layout.PLAIN


def pack_linear(weight: Tensor, bias: Tensor | None = None, *, int8: bool = False) -> LinearWeight:
    """Take over a weight [out, in] and bias [out]; the caller drops its own reference.

    With ``int8`` the weight is quantized, if `can_quantize` and its inputs are a multiple of 64.
    oneDNN packs for no particular batch size: measured on Zen 4 the layout it then picks is best or
    equal for 1 to 512 rows in both dtypes, while a hint of 1 costs float32 a reorder per call.
    """
    out_features, in_features = weight.shape
    layout = _layout_for(weight, int8)
    if layout is Layout.INT8:
        weight, bias = _int8.pack(weight, bias)
    elif layout is Layout.PANELS:
        weight, bias = _bf16.pack(weight, bias)
    elif layout is Layout.ONEDNN:
        weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return LinearWeight(weight, bias, in_features, out_features, layout)


def linear(x: Tensor, w: LinearWeight) -> Tensor:
    """x [T, in] -> x @ weight.T + bias, [T, out], any T including 0."""
    if w.layout is Layout.PLAIN:
        return functional.linear(x, w.weight, w.bias)
    if x.shape[0] == 0:
        return x.new_empty((0, w.out_features))
    if w.layout in (Layout.PANELS, Layout.INT8):
        assert w.bias is not None
        multiply = _bf16.linear if w.layout is Layout.PANELS else _int8.linear
        return multiply(x, w.weight, w.bias, w.out_features)
    result: Tensor = _linear_pointwise(x, w.weight, w.bias, "none", [], "")
    return result
