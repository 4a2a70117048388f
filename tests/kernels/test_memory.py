"""Memory for long use: apart, aligned, zeroed, and given back."""

from __future__ import annotations

import gc

import pytest
import torch

from trident_kernels import memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_tensors_lie_apart_and_are_zero(dtype: torch.dtype) -> None:
    shapes = [(3,), (1,), (0, 5), (7, 9), (1000, 1000), (4, 3000, 3000), (5,)]
    tensors = [memory.zeros(shape, dtype) for shape in shapes]
    for number, tensor in enumerate(tensors):
        assert tensor.dtype is dtype and tensor.shape == shapes[number]
        assert not tensor.any()
        assert tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    for number, tensor in enumerate(tensors):
        assert (tensor == number + 1).all()


def test_a_mapping_goes_with_its_last_tensor() -> None:
    tensor = memory.zeros((64 * 2**20,), torch.uint8)
    part = tensor[5:9]
    tensor.fill_(1)
    before = _resident()
    del tensor
    assert part.tolist() == [1, 1, 1, 1]
    del part
    gc.collect()
    assert before - _resident() > 60 * 2**20


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
