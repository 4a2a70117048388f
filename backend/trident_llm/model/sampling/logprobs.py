"""Log-probabilities under the raw logits: before penalties, masks, temperature and filters."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trident_llm.core.messages import TokenLogprob


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of P chosen tokens and of the k most likely ones, on the device."""

    chosen: torch.Tensor  # [P] float32
    ranks: torch.Tensor  # [P] int64, 1 is the most likely
    top_ids: torch.Tensor  # [P, k] int64
    top: torch.Tensor  # [P, k] float32, descending


def most_likely_logprobs(
    logits: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``[P, V]`` log-probabilities, their ``count`` largest ``[P, count]``, and the ids of those."""
    logprobs = torch.log_softmax(logits, dim=-1)
    if not count:
        return logprobs, logprobs[:, :0], logprobs.new_zeros(len(logits), 0, dtype=torch.int64)
    top, top_ids = logprobs.topk(min(count, logits.shape[1]), dim=-1)
    return logprobs, top, top_ids


def of_chosen(
    logprobs: torch.Tensor, top: torch.Tensor, top_ids: torch.Tensor, token_ids: torch.Tensor
) -> TokenLogprobs:
    """The log-probabilities of ``token_ids`` ``[P]`` beside the most likely ones'.

    What is no token of the vocabulary cannot be chosen: its log-probability is minus infinity.
    """
    wanted, size = token_ids.unsqueeze(1), logprobs.shape[1]
    chosen = logprobs.gather(1, wanted.clamp(0, size - 1))
    chosen.masked_fill_((wanted < 0) | (wanted >= size), -torch.inf)
    ranks = (logprobs > chosen).sum(dim=1) + 1
    return TokenLogprobs(chosen.squeeze(1), ranks, top_ids, top)


def to_host(
    values: TokenLogprobs, token_ids: list[int], counts: list[int]
) -> list[list[TokenLogprob]]:
    """Per line: the chosen token, then the ``counts[i]`` most likely ones without it. Waits."""
    chosen, ranks = values.chosen.tolist(), values.ranks.tolist()
    top_ids, top = values.top_ids.tolist(), values.top.tolist()
    result = []
    for i, token_id in enumerate(token_ids):
        entries = [TokenLogprob(token_id, chosen[i], ranks[i])]
        entries += (
            TokenLogprob(top_ids[i][place], top[i][place], place + 1)
            for place in range(min(counts[i], len(top_ids[i])))
            if top_ids[i][place] != token_id
        )
        result.append(entries)
    return result
