"""Penalties, bias and masks: equal to Hugging Face's processors and to vLLM's formulas."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from trident_llm.core.sampling_params import SamplingParams
from trident_llm.model.sampler import Sampler
from trident_llm.model.sampling.edits import EditPlanner, apply_edits
from trident_llm.model.sampling.rows import RowSampling

VOCAB = 60
EOS = frozenset({7, 9})


def edited(
    logits: torch.Tensor,
    params: list[SamplingParams],
    sequences: list[tuple[list[int], list[int]]],
    *,
    planner: EditPlanner | None = None,
) -> torch.Tensor:
    """``logits`` as sampling sees them, for sequences given as (prompt, output)."""
    state = RowSampling(len(params))
    longest = max(len(prompt) + len(output) for prompt, output in sequences)
    # What lies behind a sequence's end is another's leftovers, or worse.
    table = torch.full((len(params), longest + 3), 10**9)
    for row, (item, (prompt, output)) in enumerate(zip(params, sequences)):
        state.set(
            row, item, seed=0, sequence_index=0, num_prompt_tokens=len(prompt), eos_token_ids=EOS
        )  # fmt: skip
        table[row, : len(prompt) + len(output)] = torch.tensor([*prompt, *output])
    rows = np.arange(len(params))
    lengths = np.asarray([len(prompt) + len(output) for prompt, output in sequences])
    result = logits.clone()
    plan = (planner or EditPlanner()).plan(state, rows, lengths, result)
    if plan is not None:
        apply_edits(result, plan, table, lengths)
    return result


def random_sequences(count: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))],
            [rng.randrange(VOCAB) for _ in range(rng.randint(0, 30))],
        )
        for _ in range(count)
    ]


def random_logits(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("penalty", [1.3, 0.7, 1e-3])
def test_repetition_penalty_equals_that_of_transformers(penalty: float) -> None:
    sequences, logits = random_sequences(12), random_logits(12)
    result = edited(logits, [SamplingParams(repetition_penalty=penalty)] * 12, sequences)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    for line, (prompt, output) in enumerate(sequences):
        expected = processor(torch.tensor([prompt + output]), logits[line : line + 1].clone())
        torch.testing.assert_close(result[line : line + 1], expected)


@pytest.mark.parametrize(
    ("presence", "frequency"), [(0.5, 0.0), (0.0, 0.4), (-1.5, 2.0), (2.0, -2.0)]
)
def test_presence_and_frequency_count_the_output_only(presence: float, frequency: float) -> None:
    sequences, logits = random_sequences(12), random_logits(12)
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    result = edited(logits, [params] * 12, sequences)
    for line, (_, output) in enumerate(sequences):
        for token_id in range(VOCAB):
            count = Counter(output)[token_id]
            expected = logits[line, token_id] - frequency * count - presence * (count > 0)
            assert float(result[line, token_id]) == pytest.approx(float(expected), abs=1e-5)


def test_a_prompt_alone_is_penalized_by_repetition_only() -> None:
    logits = torch.ones(2, VOCAB)
    params = [
        SamplingParams(presence_penalty=2.0, frequency_penalty=2.0),
        SamplingParams(repetition_penalty=2.0),
    ]
    result = edited(logits, params, [([5, 5, 5], [])] * 2)
    assert (result[0] == 1.0).all()
    assert result[1, 5] == 0.5 and result[1].sum() == VOCAB - 0.5


def test_ids_that_are_no_tokens_are_not_penalized() -> None:
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0)
    strange = [VOCAB, 10**12, -1, 2**40]
    result = edited(
        torch.full((3, VOCAB), 4.0),
        [params] * 3,
        [(strange, strange), ([*strange, 3], [*strange, 3]), ([0], [])],
    )
    assert (result[0] == 4.0).all()
    assert result[1, 3] == 0.0 and result[1].sum() == 4.0 * (VOCAB - 1)
    assert result[2, 0] == 2.0 and result[2].sum() == 4.0 * VOCAB - 2.0


WORDS = ((4,), (1, 2), (3, 1, 2), (2, 2), (5, 6, 7, 8), (1, 3), (6, 3))


def test_bad_words_equal_those_of_transformers_over_the_output() -> None:
    rng = random.Random(1)
    # Few different tokens, so that words are nearly complete all the time.
    sequences = [
        ([1], [rng.randint(1, 7) for _ in range(rng.randint(1, 9))]) for _ in range(200)
    ] + [([1, 2, 3], [5, 6, 7]), ([9], [9, 3, 1])]
    logits = random_logits(len(sequences))
    processor = NoBadWordsLogitsProcessor([list(word) for word in WORDS], eos_token_id=59)
    params = [SamplingParams(bad_words_token_ids=WORDS)] * len(sequences)
    result = edited(logits, params, sequences)
    for line, (_, output) in enumerate(sequences):
        expected = processor(torch.tensor([output]), logits[line : line + 1].clone())
        assert torch.equal(result[line : line + 1], expected), output


def test_a_bad_word_that_began_in_the_prompt_is_not_one() -> None:
    params = SamplingParams(bad_words_token_ids=((5, 6, 7),))
    for prompt, output, forbidden in (
        ([5, 6], [], False), ([5], [6], False), ([1], [5, 6], True), ([1], [6], False),
    ):  # fmt: skip
        result = edited(torch.zeros(1, VOCAB), [params], [(prompt, output)])
        assert bool(result[0, 7] == -torch.inf) == forbidden


def test_logit_bias_equals_that_of_transformers() -> None:
    logits = random_logits(3)
    biases = ((0, 5.0), (17, -100.0), (VOCAB - 1, 100.0))
    params = [
        SamplingParams(logit_bias=biases),
        SamplingParams(),
        SamplingParams(logit_bias=biases),
    ]
    result = edited(logits, params, [([1], [])] * 3)
    processor = SequenceBiasLogitsProcessor([[[token_id], bias] for token_id, bias in biases])
    expected = processor(torch.tensor([[1], [1]]), logits[[0, 2]].clone())
    torch.testing.assert_close(result[[0, 2]], expected)
    assert torch.equal(result[1], logits[1])


def test_bias_comes_before_penalties() -> None:
    params = SamplingParams(logit_bias=((5, 3.0),), repetition_penalty=2.0)
    result = edited(torch.ones(1, VOCAB), [params], [([5], [])])
    assert result[0, 5] == 2.0


def test_only_allowed_tokens_are_left() -> None:
    logits = random_logits(2)
    params = [SamplingParams(allowed_token_ids=(3, 59)), SamplingParams()]
    result = edited(logits, params, [([1], [])] * 2)
    assert result[0].isfinite().nonzero().flatten().tolist() == [3, 59]
    assert torch.equal(result[0, [3, 59]], logits[0, [3, 59]])
    assert torch.equal(result[1], logits[1])


def test_before_min_tokens_nothing_may_end() -> None:
    for num_output, forbidden in ((0, [7, 9, 20]), (4, [7, 9, 20]), (5, [])):
        result = edited(
            torch.zeros(3, VOCAB),
            [
                SamplingParams(min_tokens=5, stop_token_ids=(20,)),
                SamplingParams(min_tokens=5, stop_token_ids=(20,), ignore_eos=True),
                SamplingParams(),
            ],
            [([1, 2], [3] * num_output)] * 3,
        )
        assert (result[0] == -torch.inf).nonzero().flatten().tolist() == forbidden
        assert (result[1] == -torch.inf).nonzero().flatten().tolist() == forbidden[2:]
        assert result[2].isfinite().all()


FEATURES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "bad_words_token_ids": WORDS},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.0, "frequency_penalty": 0.3},
    {"logit_bias": ((4, 3.0), (5, -2.0)), "repetition_penalty": 0.8},
    {"allowed_token_ids": tuple(range(0, 60, 3)), "frequency_penalty": -1.0},
    {"min_tokens": 20, "stop_token_ids": (1, 2), "presence_penalty": -2.0},
]


def test_lines_do_not_see_their_neighbours() -> None:
    count = 3 * len(FEATURES)
    sequences, logits = random_sequences(count, seed=3), random_logits(count, seed=3)
    params = [SamplingParams(seed=i, **FEATURES[i % len(FEATURES)]) for i in range(count)]
    together = edited(logits, params, sequences)
    for line in range(count):
        alone = edited(logits[line : line + 1], [params[line]], [sequences[line]])
        assert torch.equal(alone[0], together[line]), params[line]


def test_a_row_that_changes_hands_gets_a_new_plan() -> None:
    state = RowSampling(2)
    sampler = Sampler(state, torch.tensor([[5, 6], [5, 6]]))
    rows, lengths = np.arange(2), np.asarray([2, 2])

    def tokens(*params: SamplingParams) -> list[int]:
        for row, item in enumerate(params):
            state.set(
                row, item, seed=0, sequence_index=0, num_prompt_tokens=1, eos_token_ids=EOS
            )  # fmt: skip
        token_ids: list[int] = sampler.sample(torch.zeros(2, 9), rows, lengths).token_ids.tolist()
        return token_ids

    greedy = {"temperature": 0.0}
    assert tokens(
        SamplingParams(**greedy, allowed_token_ids=(3,)),  # type: ignore[arg-type]
        SamplingParams(**greedy, logit_bias=((8, 1.0),)),  # type: ignore[arg-type]
    ) == [3, 8]
    assert tokens(
        SamplingParams(**greedy, logit_bias=((4, 1.0),)),  # type: ignore[arg-type]
        SamplingParams(**greedy),  # type: ignore[arg-type]
    ) == [4, 0]
    state.fork(0, 1, sequence_index=1)
    assert sampler.sample(torch.zeros(2, 9), rows, lengths).token_ids.tolist() == [4, 4]


def test_a_line_without_a_token_left_is_told_from_one_that_is_not_finite() -> None:
    state = RowSampling(3)
    for row, params in enumerate(
        (
            SamplingParams(allowed_token_ids=(3,), bad_words_token_ids=((3,),)),
            SamplingParams(allowed_token_ids=(3,)),
            SamplingParams(allowed_token_ids=(3,)),
        )
    ):
        state.set(
            row, params, seed=0, sequence_index=0, num_prompt_tokens=1, eos_token_ids=EOS
        )  # fmt: skip
    logits = torch.zeros(3, 9)
    logits[2, 5] = torch.nan  # hidden by the mask
    sampler = Sampler(state, torch.ones(3, 1, dtype=torch.int64))
    output = sampler.sample(logits, np.arange(3), np.ones(3, np.int64))
    assert output.finite.tolist() == [True, True, False]
    assert output.allowed is not None
    assert output.allowed.tolist() == [False, True, True]
