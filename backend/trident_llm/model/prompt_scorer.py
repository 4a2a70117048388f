"""Log-probabilities of prompt tokens, chunk by chunk as prompts are computed.

The logits of a whole chunk would be far larger than its hidden states, so they are made for a slice of
tokens at a time and only what was asked for is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from trident_llm.core.messages import PromptLogprobs, TokenLogprob
from trident_llm.model.sampling.edits import on_device
from trident_llm.model.sampling.logprobs import (
    TokenLogprobs,
    most_likely_logprobs,
    of_chosen,
    to_host,
)

SLICE_TOKENS = 256  # tokens whose logits exist at once


@dataclass(frozen=True)
class PromptSpan:
    """``count`` tokens of one row, from ``first`` on, each of which scores the token after it."""

    place: int  # of the row in SchedulerOutput.scheduled_rows
    row: int
    first: int
    count: int
    num_logprobs: int  # most likely tokens wanted beside each scored one


@dataclass(frozen=True)
class PromptScores:
    """Scores of all spans, one token after another; still on the device."""

    spans: list[PromptSpan]
    token_ids: torch.Tensor  # [N] int64, the scored tokens
    slices: list[TokenLogprobs]  # N tokens in all

    def to_host(self) -> list[PromptLogprobs]:
        """Brings the scores to the host; waits for the device."""
        token_ids: list[int] = self.token_ids.tolist()
        counts = [span.num_logprobs for span in self.spans for _ in range(span.count)]
        entries: list[list[TokenLogprob]] = []
        for scores in self.slices:
            start, end = len(entries), len(entries) + len(scores.chosen)
            entries += to_host(scores, token_ids[start:end], counts[start:end])
        result, start = [], 0
        for span in self.spans:
            result.append(
                PromptLogprobs(span.place, span.first + 1, entries[start : start + span.count])
            )
            start += span.count
        return result


def score_prompts(
    hidden: torch.Tensor,
    spans: list[PromptSpan],
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    token_table: torch.Tensor,
) -> PromptScores:
    """Scores the tokens that follow those of ``spans``.

    Args:
        hidden: ``[N, hidden_size]`` final hidden states of the spans' tokens.
        logits_of: gives ``[M, vocab_size]`` for ``[M, hidden_size]``.
        token_table: ``[rows, columns]`` int64.
    """
    rows = np.concatenate([np.full(span.count, span.row) for span in spans])
    positions = np.concatenate([span.first + 1 + np.arange(span.count) for span in spans])
    index = on_device(np.stack((rows, positions)), hidden)
    token_ids = token_table[index[0], index[1]]
    most = max(span.num_logprobs for span in spans)
    slices = [
        of_chosen(*most_likely_logprobs(logits_of(part), most), scored)
        for part, scored in zip(
            torch.split(hidden, SLICE_TOKENS), torch.split(token_ids, SLICE_TOKENS)
        )
    ]
    return PromptScores(spans, token_ids, slices)
