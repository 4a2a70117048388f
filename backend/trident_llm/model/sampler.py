"""From logits to tokens, for the whole batch at once.

A draw depends on (seed, sequence index, position) and the row's own logits alone: one uniform number
from Philox, used by inverse CDF in vocabulary order. So neighbours in the batch, chunking, preemption
and prefix hits never change it. Every reduction below works row by row for the same reason.

Nothing sorts the vocabulary on the ordinary path: top-k reads the k-th largest value, top-p looks for
its threshold among the largest values and widens the search only when they do not carry the mass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trident_llm.core.sampling_params import SamplingParams

_PHILOX_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_PHILOX_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox_uniform(
    seeds: npt.NDArray[np.uint64],
    sequence_indices: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """One uniform in [0, 1) with 53 bits per (seed, sequence index, position); all ``[N]``.

    Philox-4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11): the seed
    is the key, position and sequence index are the counter.
    """
    c0 = positions.astype(np.uint64) & _LOW
    c1 = positions.astype(np.uint64) >> _SHIFT
    c2 = sequence_indices.astype(np.uint64) & _LOW
    c3 = np.zeros_like(c0)
    k0, k1 = seeds & _LOW, seeds >> _SHIFT
    for _ in range(10):
        product0 = _PHILOX_MULTIPLIERS[0] * c0
        product1 = _PHILOX_MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0 = (k0 + _PHILOX_WEYL[0]) & _LOW
        k1 = (k1 + _PHILOX_WEYL[1]) & _LOW
    bits = ((c0 << _SHIFT) | c1) >> np.uint64(11)
    uniform: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return uniform


@dataclass(frozen=True)
class SampleOutput:
    """What the device chose for L rows. Still on the device: reading it waits for the step."""

    token_ids: torch.Tensor  # [L] int64
    finite: torch.Tensor  # [L] bool; false: the logits were not finite, the token means nothing
    logprobs: LogprobOutput | None


@dataclass(frozen=True)
class LogprobOutput:
    """Log-probabilities under the raw logits, for the rows that asked; P rows, k the largest ask."""

    rows: list[int]  # [P] indices into the L rows
    sampled: torch.Tensor  # [P] float32, of the sampled token
    ranks: torch.Tensor  # [P] int64, 1 is the most likely
    top_ids: torch.Tensor  # [P, k] int64
    top: torch.Tensor  # [P, k] float32, descending


class RowSampling:
    """Sampling parameters of all rows as host arrays, so that a step gathers them by index."""

    def __init__(self, num_rows: int) -> None:
        self.temperature = np.ones(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int64)
        self.top_p = np.ones(num_rows, np.float32)
        self.min_p = np.zeros(num_rows, np.float32)
        self.greedy = np.zeros(num_rows, np.bool_)
        self.seed = np.zeros(num_rows, np.uint64)
        self.sequence_index = np.zeros(num_rows, np.int64)
        self.num_logprobs = np.full(num_rows, -1, np.int64)  # -1: none asked
        self.min_length = np.zeros(num_rows, np.int64)  # tokens before which no end is sampled
        self.end_ids: list[tuple[int, ...]] = [()] * num_rows

    def set(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        sequence_index: int,
        num_prompt_tokens: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        """Fills a row for a sequence that enters it."""
        self.greedy[row] = params.greedy
        self.temperature[row] = 1.0 if params.greedy else params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = np.uint64(seed % 2**64)
        self.sequence_index[row] = sequence_index
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.min_length[row] = num_prompt_tokens + params.min_tokens
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else eos_token_ids)
        self.end_ids[row] = tuple(sorted(ends))

    def fork(self, parent: int, child: int, sequence_index: int) -> None:
        """Makes ``child`` a copy of ``parent`` that draws for its own sequence index."""
        for values in (
            self.temperature, self.top_k, self.top_p, self.min_p, self.greedy, self.seed,
            self.num_logprobs, self.min_length,
        ):  # fmt: skip
            values[child] = values[parent]
        self.end_ids[child] = self.end_ids[parent]
        self.sequence_index[child] = sequence_index


def sample(
    logits: torch.Tensor,
    state: RowSampling,
    rows: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> SampleOutput:
    """Chooses one token per row.

    Args:
        logits: ``[L, V]`` float32, over the tokenizer's vocabulary; changed in place.
        rows: ``[L]`` the row of each line of logits.
        lengths: ``[L]`` tokens of the sequence so far, which is the position of the new one.
    """
    top = _raw_logprobs(logits, state.num_logprobs[rows])
    _forbid_ends(logits, state, rows, lengths)
    best, token_ids = logits.max(dim=-1)
    finite = torch.isfinite(best)
    chance = np.flatnonzero(~state.greedy[rows])
    if chance.size:
        drawn = _draw(logits, state, rows, lengths, chance)
        token_ids = token_ids.index_copy(0, _on(chance, logits), drawn)
    if top is None:
        return SampleOutput(token_ids, finite, None)
    asked, raw, values, indices = top
    sampled = raw.gather(1, token_ids[_on(asked, logits)].unsqueeze(1))
    logprobs = LogprobOutput(
        rows=asked.tolist(),
        sampled=sampled.squeeze(1),
        ranks=(raw > sampled).sum(dim=-1) + 1,
        top_ids=indices,
        top=values,
    )
    return SampleOutput(token_ids, finite, logprobs)


def _on(array: npt.NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(array).to(like.device, non_blocking=True)


def _raw_logprobs(
    logits: torch.Tensor, num_logprobs: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Rows that ask for log-probabilities, their log-softmax, and its largest values and ids."""
    asked = np.flatnonzero(num_logprobs >= 0)
    if not asked.size:
        return None
    raw = torch.log_softmax(logits[_on(asked, logits)], dim=-1)
    values, indices = raw.topk(int(num_logprobs.max()), dim=-1)
    return asked, raw, values, indices


def _forbid_ends(
    logits: torch.Tensor,
    state: RowSampling,
    rows: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> None:
    """Rows below their min_tokens may not sample a token that would end them."""
    early = np.flatnonzero(lengths < state.min_length[rows])
    lines = [line for line in early for _ in state.end_ids[rows[line]]]
    if lines:
        ids = [token_id for line in early for token_id in state.end_ids[rows[line]]]
        index = _on(np.asarray([lines, ids], np.int64), logits)
        logits[index[0], index[1]] = -torch.inf


def _draw(
    logits: torch.Tensor,
    state: RowSampling,
    rows: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    chance: npt.NDArray[np.int64],
) -> torch.Tensor:
    """``[C]`` tokens drawn for the lines ``chance``; filters in the order top-k, top-p, min-p."""
    chosen = rows[chance]
    temperature = _on(state.temperature[chosen], logits).unsqueeze(1)
    scaled = logits[_on(chance, logits)] / temperature
    # Weights relative to the most likely token's, which has 1: no division by their sum is needed.
    weights = torch.exp(scaled - scaled.amax(dim=-1, keepdim=True))
    _keep_top_k(weights, state.top_k[chosen])
    _keep_top_p(weights, state.top_p[chosen])
    min_p = state.min_p[chosen]
    if (min_p > 0).any():
        weights.masked_fill_(weights < _on(min_p, logits).unsqueeze(1), 0.0)
    # A row that is not finite ends with an error; what is drawn for it only has to be an index.
    cdf = weights.double().cumsum(dim=-1)
    uniform = philox_uniform(state.seed[chosen], state.sequence_index[chosen], lengths[chance])
    target = _on(uniform, logits).unsqueeze(1) * cdf[:, -1:]
    drawn = torch.searchsorted(cdf, target, right=True).squeeze(1)
    return drawn.clamp_(max=logits.shape[-1] - 1)


def _keep_top_k(weights: torch.Tensor, top_k: npt.NDArray[np.int64]) -> None:
    """Zeroes weights below the k-th largest of their row; equals of the k-th stay."""
    lines = np.flatnonzero((top_k > 0) & (top_k < weights.shape[-1]))
    if not lines.size:
        return
    index = _on(lines, weights)
    own = weights[index]
    largest = own.topk(int(top_k[lines].max()), dim=-1).values
    kth = largest.gather(1, _on(top_k[lines] - 1, weights).unsqueeze(1))
    weights[index] = own.masked_fill(own < kth, 0.0)


def _keep_top_p(weights: torch.Tensor, top_p: npt.NDArray[np.float32]) -> None:
    """Keeps the fewest largest weights of a row that carry ``top_p`` of its sum; equals stay."""
    lines = np.flatnonzero(top_p < 1.0)
    width = 64
    while lines.size:
        index = _on(lines, weights)
        own = weights[index]
        # The sum is taken by cumsum, which goes through each row alone and in order.
        wanted = own.double().cumsum(dim=-1)[:, -1] * _on(top_p[lines].astype(np.float64), weights)
        width = min(width, own.shape[-1])
        largest = own.topk(width, dim=-1).values
        carried = largest.double().cumsum(dim=-1)
        last = (carried < wanted.unsqueeze(1)).sum(dim=-1)
        threshold = largest.gather(1, last.clamp(max=width - 1).unsqueeze(1))
        found = (last < width) if width < own.shape[-1] else torch.ones_like(last, dtype=torch.bool)
        kept = own.masked_fill(own < threshold, 0.0)
        weights[index] = torch.where(found.unsqueeze(1), kept, own)
        lines = lines[~found.cpu().numpy()]
        width *= 8
