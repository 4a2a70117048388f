"""The sampler alone: exact distributions, and rows that do not see each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from trident_llm.core.sampling_params import SamplingParams
from trident_llm.model.sampler import SampleOutput, Sampler
from trident_llm.model.sampling.draw import _inverse_cdf, _lowest_kept, _weights
from trident_llm.model.sampling.philox import philox_uniform
from trident_llm.model.sampling.rows import RowSampling


def run(logits: torch.Tensor, params: list[SamplingParams], lengths: list[int]) -> SampleOutput:
    state = RowSampling(len(params))
    for row, item in enumerate(params):
        state.set(
            row, item, seed=item.seed or 0, sequence_index=0, num_prompt_tokens=0,
            eos_token_ids=frozenset(),
        )  # fmt: skip
    table = torch.zeros(1, 1, dtype=torch.int64).expand(len(params), max(lengths) + 1)
    sampler = Sampler(state, table)
    return sampler.sample(logits.clone(), np.arange(len(params)), np.asarray(lengths, np.int64))


def draw(logits: torch.Tensor, params: list[SamplingParams], lengths: list[int]) -> list[int]:
    token_ids: list[int] = run(logits, params, lengths).token_ids.tolist()
    return token_ids


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
    ids: Any = None  # the filters do not look at them
    scores = logits.unsqueeze(0) / params.temperature
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return torch.softmax(scores, dim=-1)[0]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_frequencies_follow_the_exact_distribution(filters: dict[str, Any]) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 1.5
    params = SamplingParams(**filters)
    count = 4000
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


def kept_tokens(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """The tokens that a draw may give: those to which a weight is left."""
    state = RowSampling(1)
    state.set(
        0, params, seed=0, sequence_index=0, num_prompt_tokens=0, eos_token_ids=frozenset()
    )  # fmt: skip
    lines, row = logits.unsqueeze(0), np.zeros(1, np.int64)
    weights = _weights(lines, lines.amax(dim=1), state.temperature, row)
    lowest = _lowest_kept(weights, state, row, len(logits))
    if lowest is not None:
        weights *= weights >= lowest
    return set(weights[0].nonzero().flatten().tolist())


@pytest.mark.parametrize("vocab_size", [3, 255, 256, 1000, 5000])
@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
def test_kept_sets_equal_those_of_transformers(vocab_size: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(2)
    for top_k in (0, 1, 5, 65, 300, 10**6):
        for top_p in (1.0, 0.95, 0.3, 1e-9):
            for min_p in (0.0, 0.02, 1.0):
                logits = torch.randn(vocab_size, generator=generator).double() * spread
                params = SamplingParams(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)
                expected = set(hf_probabilities(logits, params).nonzero().flatten().tolist())
                assert kept_tokens(logits.float(), params) == expected


def test_equal_weights_stay_together() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    assert kept_tokens(logits, SamplingParams(top_k=2)) == {0, 1, 2, 3}
    assert kept_tokens(logits, SamplingParams(top_p=0.5)) == {0, 1, 2, 3}
    assert kept_tokens(torch.zeros(700), SamplingParams(top_k=100)) == set(range(700))


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


def test_rows_that_are_not_finite_are_marked_and_disturb_nobody() -> None:
    logits = torch.zeros(5, 300)
    logits[1, 3] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    logits[4] = -torch.nan
    for filters in ({}, {"top_p": 0.9}, {"top_k": 5}, {"top_k": 100, "top_p": 0.5, "min_p": 0.1}):
        params = [SamplingParams(seed=0, **filters)] * 5
        output = run(logits, params, [0] * 5)
        assert output.finite.tolist() == [True, False, False, False, False]
        token_ids = output.token_ids.tolist()
        assert all(0 <= token < 300 for token in token_ids)
        assert token_ids[0] == draw(logits[:1], params[:1], [0])[0]


@pytest.mark.parametrize("vocab_size", [1, 100, 256, 300, 700])
def test_greedy_takes_the_first_of_the_largest(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randint(0, 4, (50, vocab_size), generator=generator).float()
    greedy = SamplingParams(temperature=0)
    assert draw(logits, [greedy] * 50, [0] * 50) == logits.argmax(dim=1).tolist()


def test_every_uniform_lands_on_a_token_with_weight() -> None:
    weights = torch.zeros(1, 768)
    weights[0, [3, 300, 301]] = torch.tensor([0.2, 0.5, 0.3])
    for uniform, token in ((0.0, 3), (0.19, 3), (0.21, 300), (0.69, 300), (0.71, 301)):
        assert int(_inverse_cdf(weights, torch.tensor([[uniform]]).double())) == token
    assert int(_inverse_cdf(weights, torch.tensor([[1.0 - 2.0**-53]]).double())) == 301


class NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails where an operation would wait for an accelerator (it reads data, or its result's size is
    data), and where the vocabulary would be sorted."""

    WAITING = (
        "sort",
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "bincount",
        "unique",
        "is_nonzero",
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in self.WAITING
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device_or_sorts_the_vocabulary() -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=5, top_p=0.9, min_p=0.1, logprobs=3),
        SamplingParams(top_k=100, presence_penalty=1.0, frequency_penalty=1.0),
        SamplingParams(top_p=0.5, repetition_penalty=1.2, logit_bias=((3, 1.0),)),
        SamplingParams(allowed_token_ids=(3, 4), bad_words_token_ids=((3,), (3, 4)), min_tokens=9),
    ]
    with NoWaiting():  # type: ignore[no-untyped-call]
        run(torch.randn(5, 300), params, [3] * 5)
    with pytest.raises(AssertionError, match="not in"), NoWaiting():  # type: ignore[no-untyped-call]
        torch.ones(3).nonzero()


def test_extremes_of_every_parameter() -> None:
    logits = torch.tensor([[9.0, 11.0, 10.5, -3.0, -torch.inf]]).expand(400, -1)

    def tokens(**params: Any) -> set[int]:
        many = [SamplingParams(seed=1, **params)] * 400
        output = run(logits, many, list(range(1, 401)))
        assert output.finite.all()
        return set(output.token_ids.tolist())

    assert tokens(temperature=1e-5) == {1}
    assert tokens(temperature=1000.0) == {0, 1, 2, 3}
    assert tokens(temperature=1000.0, top_k=10**9) == {0, 1, 2, 3}
    assert tokens(temperature=1000.0, top_p=1e-300) == {1}
    assert tokens(temperature=1000.0, min_p=1.0) == {1}
    assert tokens(temperature=1000.0, repetition_penalty=1e300) == {0, 1, 2, 3}
    # The one token so far is 0; its logit overflows.
    assert tokens(temperature=1000.0, repetition_penalty=1e-300) == {0}
    assert tokens(temperature=0.0, logit_bias=((3, 100.0), (1, -100.0))) == {3}
    assert tokens(temperature=1000.0, allowed_token_ids=(3,)) == {3}
    words = ((0,), (1,), (2,))
    assert tokens(temperature=1000.0, bad_words_token_ids=words) == {3}


def test_a_masked_token_is_never_drawn() -> None:
    logits = torch.zeros(1, 50)
    logits[0, 10:] = -torch.inf
    draws = draw(logits.expand(500, -1), [SamplingParams(seed=1)] * 500, list(range(500)))
    assert max(draws) < 10
