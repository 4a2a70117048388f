"""The search alone, on made-up candidates, against the one that is written down plainly."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from tests.core.beam_reference import beam_search
from trident_llm.core.beam import BeamSearch
from trident_llm.core.messages import Candidate
from trident_llm.core.request import FinishReason
from trident_llm.core.sampling_params import SamplingParams

VOCAB = 9
EOS, STOP = 0, 4


class Model:
    """Log-probabilities that depend on all tokens; the longest tokens it was asked for."""

    def __init__(self, seed: int, sharpness: float) -> None:
        self._seed, self._sharpness = seed, sharpness
        self.longest = 0

    def __call__(self, token_ids: list[int]) -> list[Candidate]:
        self.longest = max(self.longest, len(token_ids))
        rng = random.Random(repr((self._seed, token_ids)))
        weights = [rng.gauss(0, self._sharpness) for _ in range(VOCAB)]
        total = math.log(sum(math.exp(weight) for weight in weights))
        found = [Candidate(token, weight - total) for token, weight in enumerate(weights)]
        return sorted(found, key=lambda candidate: -candidate.logprob)


def search(params: SamplingParams, prompt: list[int], model: Model) -> BeamSearch:
    found = BeamSearch(params, len(prompt), frozenset({EOS}))
    beams = [list(prompt)] * params.num_sequences
    ends = 2 if not params.ignore_eos else 1
    while True:
        candidates = [model(beam)[: found.width + ends] for beam in beams]
        choices = found.advance(beams, candidates)
        if not choices:
            return found
        beams = [[*beams[choice.parent], choice.token_id] for choice in choices]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-2.0, -0.5, 0.0, 1.0, 3.0])
def test_it_finds_what_the_plain_search_finds_in_as_many_steps(
    early_stopping: Any, length_penalty: float
) -> None:
    reasons = set()
    for seed in range(40):
        rng = random.Random(seed)
        params = SamplingParams(
            use_beam_search=True,
            beam_width=rng.randint(2, 6),
            max_tokens=rng.randint(1, 14),
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            ignore_eos=seed % 5 == 0,
            stop_token_ids=(STOP,),
        )
        assert params.max_tokens is not None
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))]
        models = [Model(seed, 0.5 + seed % 4) for _ in range(2)]
        expected = beam_search(
            prompt, models[0], width=params.num_sequences, max_tokens=params.max_tokens,
            ends=frozenset({STOP} if params.ignore_eos else {EOS, STOP}),
            length_penalty=length_penalty, early_stopping=early_stopping,
        )  # fmt: skip
        found = search(params, prompt, models[1])
        assert [(h.token_ids[len(prompt) :], h.logprob) for h in found.hypotheses] == expected
        assert models[0].longest == models[1].longest
        for hypothesis in found.hypotheses:
            length = len(hypothesis.token_ids) - len(prompt)
            assert hypothesis.score == hypothesis.logprob / length**length_penalty
            ends = {EOS: None, STOP: STOP}
            if hypothesis.finish_reason is FinishReason.STOP:
                assert hypothesis.stop_reason == ends[hypothesis.token_ids[-1]]
            reasons.add(hypothesis.finish_reason)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_a_first_child_stays_in_its_parents_place() -> None:
    params = SamplingParams(use_beam_search=True, beam_width=3, max_tokens=9, ignore_eos=True)
    found = BeamSearch(params, 1, frozenset())
    first = [Candidate(5, -0.1), Candidate(6, -0.2), Candidate(7, -0.3)]
    choices = found.advance([[1]] * 3, [first] * 3)
    assert [(choice.parent, choice.token_id) for choice in choices] == [(0, 5), (0, 6), (0, 7)]
    candidates = [
        [Candidate(5, -9.0)] * 3,
        [Candidate(5, -8.0)] * 3,
        [Candidate(5, -0.1), Candidate(6, -0.2), Candidate(7, -9.0)],
    ]
    choices = found.advance([[1, 5], [1, 6], [1, 7]], candidates)
    assert [(choice.parent, choice.token_id) for choice in choices] == [(2, 6), (1, 5), (2, 5)]
