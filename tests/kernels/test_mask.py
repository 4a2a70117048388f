"""Masks of tokens against the plain form."""

from __future__ import annotations

import pytest
import torch

import trident_kernels as ops
from trident_kernels import reference


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 480, 500, 1000])
@pytest.mark.parametrize(("rows", "lines"), [(1, [0]), (5, [1, 4]), (300, list(range(0, 300, 3)))])
def test_bits_that_are_not_set_forbid(vocab: int, rows: int, lines: list[int]) -> None:
    g = torch.Generator().manual_seed(vocab)
    wide = torch.randn(rows, vocab + 3, generator=g)
    logits = wide[:, :vocab]  # the head is wider: what lies beyond is not touched
    words = -(-vocab // 32)
    bits = torch.randint(-(2**31), 2**31, (len(lines), words), generator=g).to(torch.int32)
    index = torch.tensor(lines)
    expected = logits.clone()
    reference.mask_logits(expected, index, bits)
    for i, line in enumerate(lines):
        for v in range(vocab):
            allowed = int(bits[i, v // 32]) >> (v % 32) & 1
            assert (expected[line, v] == -torch.inf) != bool(allowed)
    before = wide.clone()
    ops.mask_logits(logits, index, bits)
    assert torch.equal(logits, expected)
    assert torch.equal(wide[:, vocab:], before[:, vocab:])
