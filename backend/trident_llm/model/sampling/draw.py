"""Choosing tokens: the most likely one, or a draw from what top-k, top-p and min-p keep.

A filter is a threshold on a row's weights, found exactly and without sorting: positive floats order as
their bits do, so a histogram over ten bits at a time finds the value at which a count or a mass is
reached in three passes. Masses are added as integers, so no order of adding changes them. A draw is an
inverse CDF in vocabulary order, first over blocks of tokens, then within one block. Every reduction
goes through each row alone, and nothing here waits for the device.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from trident_llm.model.sampling.edits import on_device
from trident_llm.model.sampling.philox import philox_uniform
from trident_llm.model.sampling.rows import RowSampling

IntArray = npt.NDArray[np.int64]

BLOCK = 256  # tokens of one block of the two-level search
_LEVEL_BITS = 10
_LEVELS = 3  # weights are in [0, 1]: the bits of 1.0 end below 2**30
_BUCKETS = 2**_LEVEL_BITS
_MASS_UNIT = 2.0**40  # of a weight of 1; a whole vocabulary of them stays far below 2**63
_LOWEST_EXPONENT = -80.0  # e**-80 beside the most likely token: no draw of 53 bits reaches it
_NEGLIGIBLE = 1e-34
_BELOW_ONE = 1.0 - 2.0**-52  # times any positive float64 it is less than that
_SMALL_K = 64  # up to here selecting the largest is cheaper than histograms
_SLICE_ELEMENTS = 2**17  # elements of the filters' 64-bit temporaries at a time, on CPU


def most_likely(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each line's largest value and the first token that has it: ``[L]`` float32, ``[L]`` int64.

    NaN counts as the largest. By block maxima, since a maximum with its index is slow to find.
    """
    size = logits.shape[1]
    full = size // BLOCK * BLOCK
    blocks = logits[:, :full].view(len(logits), full // BLOCK, BLOCK).amax(dim=2)
    if full < size:
        blocks = torch.cat((blocks, logits[:, full:].amax(dim=1, keepdim=True)), dim=1)
    best, block = blocks.max(dim=1)
    offsets = torch.arange(BLOCK, device=logits.device)
    index = (block.unsqueeze(1) * BLOCK + offsets).clamp_(max=size - 1)
    within = logits.gather(1, index).argmax(dim=1)
    return best, block * BLOCK + within


def draw(
    logits: torch.Tensor,
    best: torch.Tensor,
    state: RowSampling,
    rows: IntArray,
    lengths: IntArray,
    chance: IntArray,
) -> torch.Tensor:
    """``[C]`` tokens drawn for the lines ``chance``; filters in the order top-k, top-p, min-p.

    Args:
        logits: ``[L, V]`` float32.
        best: ``[L]`` the largest of each line.
        rows: ``[L]`` rows of ``state``.
        lengths: ``[L]`` the position of the token to draw.
        chance: ``[C]`` indices into L.
    """
    chosen = rows[chance]
    weights = _weights(logits, best, state.temperature[chosen], chance)
    lowest = _lowest_kept(weights, state, chosen, logits.shape[1])
    if lowest is not None:
        weights.mul_(weights >= lowest)
    uniform = philox_uniform(state.seed[chosen], state.sequence_index[chosen], lengths[chance])
    drawn = _inverse_cdf(weights, on_device(uniform, logits).unsqueeze(1))
    return drawn.clamp_(max=logits.shape[1] - 1)


def _weights(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: npt.NDArray[np.float32],
    chance: IntArray,
) -> torch.Tensor:
    """Weights relative to the most likely token's, which has 1: ``[C, V]``, zeros up to a whole block.

    Rows that are not finite end with an error: they only must not disturb others.
    """
    size = logits.shape[1]
    width = -(-size // BLOCK) * BLOCK
    lines = on_device(chance, logits)
    weights = logits.new_empty(len(chance), width)
    weights[:, size:] = -torch.inf
    own = logits if len(chance) == len(logits) else logits.index_select(0, lines)
    torch.sub(own, best[lines].unsqueeze(1), out=weights[:, :size])
    weights.div_(on_device(temperature, logits).unsqueeze(1))
    weights.clamp_(min=_LOWEST_EXPONENT).exp_()
    return torch.threshold_(weights, _NEGLIGIBLE, 0.0)


def _lowest_kept(
    weights: torch.Tensor, state: RowSampling, rows: IntArray, vocab_size: int
) -> torch.Tensor | None:
    """``[C, 1]`` the smallest weight that each line's filters keep, or None if none has a filter.

    top-k keeps the k largest weights, top-p the fewest of those that carry its share of their sum,
    min-p what is at least its share of the largest; equals of the smallest one kept are kept too.
    """
    top_k, top_p, min_p = state.top_k[rows], state.top_p[rows], state.min_p[rows]
    limits_k = (top_k > 0) & (top_k < vocab_size)
    limits_p = top_p < 1.0
    if not (limits_k.any() or limits_p.any() or (min_p > 0).any()):
        return None
    lowest = weights.new_zeros(len(weights), 1)
    for k_lines in (
        np.flatnonzero(limits_k & (top_k <= _SMALL_K)),
        np.flatnonzero(limits_k & (top_k > _SMALL_K)),
    ):
        for lines in _slices(k_lines, weights):
            index = on_device(lines, weights)
            kth = _kth_largest(_lines(weights, index), top_k[lines])
            lowest.index_copy_(0, index, kth)
    for lines in _slices(np.flatnonzero(limits_p), weights):
        index = on_device(lines, weights)
        own = _lines(weights, index)
        masses = (own * _MASS_UNIT).to(torch.int64)
        kept = masses.mul(own >= lowest[index]) if limits_k[lines].any() else masses
        total = kept.sum(dim=1, keepdim=True)
        share = on_device(top_p[lines], weights).unsqueeze(1)
        wanted = (total.double() * share).ceil_().to(torch.int64).clamp_(min=1)
        reached = _threshold(own, masses, wanted)
        lowest.index_copy_(0, index, torch.maximum(lowest[index], reached))
    return torch.maximum(lowest, on_device(min_p, weights).unsqueeze(1))


def _lines(weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return weights if len(index) == len(weights) else weights.index_select(0, index)


def _slices(lines: IntArray, weights: torch.Tensor) -> list[IntArray]:
    """``lines`` in parts whose temporaries stay small enough for a cache."""
    if not lines.size:
        return []
    if not weights.is_cpu:
        return [lines]
    most = max(1, _SLICE_ELEMENTS // weights.shape[1])
    return np.array_split(lines, -(-len(lines) // most))


def _kth_largest(weights: torch.Tensor, k: IntArray) -> torch.Tensor:
    """``[C, 1]`` the k-th largest of each line; a few largest are found faster by selection."""
    most = int(k.max())
    wanted = on_device(k, weights).unsqueeze(1)
    if most <= _SMALL_K:
        return weights.topk(most, dim=1).values.gather(1, wanted - 1)
    return _threshold(weights, torch.ones_like(weights, dtype=torch.int64), wanted)


def _threshold(weights: torch.Tensor, amounts: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """``[C, 1]`` the largest weight t such that the amounts of all weights >= t reach ``wanted``.

    Args:
        weights: ``[C, W]`` float32 in [0, 1]; lines with NaN give any threshold.
        amounts: ``[C, W]`` int64.
        wanted: ``[C, 1]`` int64, from 1 to the line's sum of amounts.
    """
    bits = weights.view(torch.int32)
    lowest = torch.zeros(len(weights), 1, dtype=torch.int32, device=weights.device)
    for level in reversed(range(_LEVELS)):
        shift = level * _LEVEL_BITS
        # The first bucket takes what lies below this level's range, the last what lies above.
        key = (bits - lowest).bitwise_right_shift_(shift).clamp_(-1, _BUCKETS).add_(1)
        histogram = torch.zeros(len(weights), _BUCKETS + 2, dtype=torch.int64, device=key.device)
        histogram.scatter_add_(1, key.to(torch.int64), amounts)
        reached = histogram.flip(1).cumsum(1) >= wanted
        bucket = reached.sum(dim=1, keepdim=True) - 1
        lowest += ((bucket - 1) << shift).to(torch.int32)
    return lowest.view(torch.float32)


def _inverse_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """``[C]`` the first token whose cumulative weight passes ``uniform``'s share of the sum.

    ``weights`` is ``[C, W]`` with whole blocks, ``uniform`` ``[C, 1]`` float64 in [0, 1).
    """
    blocks = weights.view(len(weights), weights.shape[1] // BLOCK, BLOCK)
    cdf = blocks.sum(dim=2).double().cumsum_(dim=1)
    # The target stays below the sum, so that what is found has a weight above 0.
    target = uniform.clamp(max=_BELOW_ONE) * cdf[:, -1:]
    last = cdf.shape[1] - 1
    block = torch.searchsorted(cdf, target, right=True).clamp_(max=last)
    below = torch.where(block > 0, cdf.gather(1, (block - 1).clamp(min=0)), 0.0)
    share = (target - below) / (cdf.gather(1, block) - below)
    chosen = blocks.gather(1, block.unsqueeze(2).expand(-1, -1, BLOCK)).squeeze(1)
    within = chosen.double().cumsum_(dim=1)
    target = share.clamp_(0.0, _BELOW_ONE) * within[:, -1:]
    offset = torch.searchsorted(within, target, right=True).clamp_(max=BLOCK - 1)
    return (block * BLOCK + offset).squeeze(1)
