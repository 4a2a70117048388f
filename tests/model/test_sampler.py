"""The sampler alone: exact distributions, and rows that do not see each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from trident_llm.core.sampling_params import SamplingParams
from trident_llm.model.sampler import RowSampling, philox_uniform, sample


def draw(logits: torch.Tensor, params: list[SamplingParams], lengths: list[int]) -> list[int]:
    state = RowSampling(len(params))
    for row, item in enumerate(params):
        state.set(
            row, item, seed=item.seed or 0, sequence_index=0, num_prompt_tokens=0,
            eos_token_ids=frozenset(),
        )  # fmt: skip
    rows = np.arange(len(params))
    output = sample(logits.clone(), state, rows, np.asarray(lengths, np.int64))
    return output.token_ids.tolist()


def test_philox_known_answers() -> None:
    # Random123's test vectors for philox4x32-10: counters and keys of all zeros.
    zero = np.zeros(1, np.int64)
    expected = ((0x6627E8D5 << 32 | 0xE169C58D) >> 11) * 2.0**-53
    assert philox_uniform(zero.astype(np.uint64), zero, zero)[0] == expected


def test_uniforms_are_uniform_and_independent() -> None:
    seeds = np.repeat(np.arange(64, dtype=np.uint64), 256)
    positions = np.tile(np.arange(256), 64)
    values = philox_uniform(seeds, np.zeros_like(positions), positions).reshape(64, 256)
    counts = np.histogram(values, bins=32, range=(0, 1))[0]
    assert ((counts - 512) ** 2 / 512).sum() < 61.1  # chi-square, 31 degrees, p = 0.001
    assert abs(np.corrcoef(values[:, :-1].ravel(), values[:, 1:].ravel())[0, 1]) < 0.03
    assert len(np.unique(values)) == values.size


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 7},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
    {"top_p": 1e-6},
    {"top_k": 1},
]


def hf_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    scores = logits.unsqueeze(0) / params.temperature
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return torch.softmax(scores, dim=-1)[0]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_frequencies_follow_the_exact_distribution(filters: dict[str, Any]) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 1.5
    params = SamplingParams(**filters)
    count = 8000
    draws = draw(
        logits.expand(count, -1), [SamplingParams(seed=3, **filters)] * count, list(range(count))
    )
    expected = hf_probabilities(logits, params)
    observed = torch.bincount(torch.tensor(draws), minlength=40).double()
    assert observed[expected == 0].sum() == 0
    kept = expected > 0
    statistic = ((observed - count * expected) ** 2 / (count * expected))[kept].sum()
    degrees = int(kept.sum()) - 1
    assert statistic <= degrees + 4 * (2 * degrees) ** 0.5 + 1


def test_kept_sets_equal_those_of_transformers() -> None:
    generator = torch.Generator().manual_seed(2)
    for trial in range(40):
        logits = torch.randn(1000, generator=generator) * (0.2 + trial / 8)
        params = SamplingParams(
            temperature=0.7, top_k=[0, 5, 300][trial % 3], top_p=[1.0, 0.95, 0.3][trial % 2 + 1],
            min_p=[0.0, 0.02][trial % 2],
        )  # fmt: skip
        kept = set(hf_probabilities(logits, params).nonzero().flatten().tolist())
        many = [SamplingParams(seed=trial, **{k: getattr(params, k) for k in
                ("temperature", "top_k", "top_p", "min_p")})] * 400  # fmt: skip
        assert set(draw(logits.expand(400, -1), many, list(range(400)))) <= kept


def test_rows_do_not_see_their_neighbours() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(12, 3000, generator=generator) * 3
    params = [
        SamplingParams(temperature=[0.0, 0.7, 1.5][i % 3], top_k=[0, 50][i % 2],
                       top_p=[1.0, 0.9][i // 6], seed=i)
        for i in range(12)
    ]  # fmt: skip
    lengths = list(range(100, 112))
    together = draw(logits, params, lengths)
    for i in range(12):
        assert draw(logits[i : i + 1], [params[i]], [lengths[i]]) == together[i : i + 1]


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_choose_the_most_likely(temperature: float) -> None:
    logits = torch.tensor([[1.0, 11.0, 10.5, -3.0]])
    assert draw(logits, [SamplingParams(temperature=temperature, seed=1)], [0]) == [1]


def test_rows_that_are_not_finite_are_marked() -> None:
    logits = torch.zeros(4, 10)
    logits[1, 3] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    state = RowSampling(4)
    for row in range(4):
        state.set(
            row, SamplingParams(seed=0), seed=0, sequence_index=0, num_prompt_tokens=0,
            eos_token_ids=frozenset(),
        )  # fmt: skip
    output = sample(logits, state, np.arange(4), np.zeros(4, np.int64))
    assert output.finite.tolist() == [True, False, False, False]
    assert all(0 <= token < 10 for token in output.token_ids.tolist())


def test_a_masked_token_is_never_drawn() -> None:
    logits = torch.zeros(1, 50)
    logits[0, 10:] = -torch.inf
    draws = draw(logits.expand(500, -1), [SamplingParams(seed=1)] * 500, list(range(500)))
    assert max(draws) < 10
