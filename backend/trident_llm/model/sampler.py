"""From logits to tokens, for the whole batch at once.

A draw depends on (seed, sequence index, position) and the row's own logits and tokens alone. So
neighbours in the batch, chunking, preemption and prefix hits never change it. Nothing here waits for
the device: a step is sampled before the tokens of the one before it have reached the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trident_llm.model.sampling.draw import draw, most_likely
from trident_llm.model.sampling.edits import EditPlanner, apply_edits, apply_mask, on_device
from trident_llm.model.sampling.logprobs import (
    TokenLogprobs,
    most_likely_logprobs,
    of_chosen,
)
from trident_llm.model.sampling.mask import TokenMask
from trident_llm.model.sampling.rows import RowSampling

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SampleOutput:
    """What the device chose for L rows. Still on the device: reading it waits for the step."""

    token_ids: torch.Tensor  # [L] int64
    finite: torch.Tensor  # [L] bool; false: the logits were not finite, the token means nothing
    allowed: torch.Tensor | None  # [L] bool; false: every token was forbidden; None: none was
    logprobs: TokenLogprobs | None  # of the rows that asked, in order
    # Of the rows of beams, in order: log-probabilities [B, K], descending, and token ids [B, K].
    candidates: tuple[torch.Tensor, torch.Tensor] | None


class Sampler:
    """Samples rows of ``state`` by their parameters and their tokens so far.

    Args:
        token_ids: ``[rows, columns]`` int64, each row's tokens from its first on.
    """

    def __init__(self, state: RowSampling, token_ids: torch.Tensor) -> None:
        self.state = state
        self._token_ids = token_ids
        self._planner = EditPlanner()

    def sample(
        self,
        logits: torch.Tensor,
        rows: IntArray,
        lengths: IntArray,
        mask: TokenMask | None = None,
    ) -> SampleOutput:
        """Chooses one token per row; of a row of a beam the candidates count.

        Args:
            logits: ``[L, V]`` float32, over the tokenizer's vocabulary; changed in place.
            rows: ``[L]`` the row of each line of logits.
            lengths: ``[L]`` tokens of the sequence so far, which is the position of the new one.
            mask: what grammars allow some of the lines.
        """
        asked = np.flatnonzero(self.state.num_logprobs[rows] >= 0)
        raw = None
        if asked.size:
            wanted = logits.index_select(0, on_device(asked, logits))
            raw = most_likely_logprobs(wanted, int(self.state.num_logprobs[rows].max()))
        beams = np.flatnonzero(self.state.num_candidates[rows])
        if beams.size:  # edits change the log-probabilities of beams, as in transformers
            lines = on_device(beams, logits)
            logits[lines] = torch.log_softmax(logits[lines], dim=-1)
        edits = self._planner.plan(self.state, rows, lengths, logits, mask)
        raw_best = None
        if edits is not None:
            # What is forbidden may hide what is not finite: that is looked for before.
            raw_best = most_likely(logits)[0]
            apply_edits(logits, edits, self._token_ids, lengths)
        if mask is not None:
            apply_mask(logits, mask)
        best, token_ids = most_likely(logits)
        chance = np.flatnonzero(~self.state.greedy[rows])
        if chance.size:
            drawn = draw(logits, best, self.state, rows, lengths, chance)
            token_ids = token_ids.index_copy(0, on_device(chance, logits), drawn)
        logprobs = None
        if raw is not None:
            logprobs = of_chosen(*raw, token_ids[on_device(asked, logits)])
        candidates = None
        if beams.size:
            most = min(int(self.state.num_candidates[rows].max()), logits.shape[1])
            top = logits[lines].topk(most, dim=-1)
            candidates = (top.values, top.indices)
        return SampleOutput(
            token_ids=token_ids,
            finite=torch.isfinite(best if raw_best is None else raw_best),
            allowed=None if raw_best is None else best > -torch.inf,
            logprobs=logprobs,
            candidates=candidates,
        )
