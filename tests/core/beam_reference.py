"""Beam search written down plainly: one request alone, whole vocabularies, no blocks and no rows.

Follows Hugging Face's ``GenerationMixin._beam_search``, for one prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from trident_llm.core.messages import Candidate

LOST = -1.0e9


def beam_search(
    prompt: list[int],
    candidates: Callable[[list[int]], list[Candidate]],
    *,
    width: int,
    max_tokens: int,
    ends: frozenset[int],
    length_penalty: float,
    early_stopping: bool | Literal["never"],
) -> list[tuple[list[int], float]]:
    """The best ``width`` outputs with their summed log-probabilities, best first."""
    running: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[tuple[float, Any]] = []
    for length in range(1, max_tokens + 1):
        every = [
            ([*ids, candidate.token_id], total + candidate.logprob)
            for ids, total in running
            for candidate in candidates(prompt + ids)
        ]
        every.sort(key=lambda item: -item[1])
        hits = [ids[-1] in ends or length == max_tokens for ids, _ in every]
        finished += [
            (total / length**length_penalty, (ids, total))
            for (ids, total), hit in list(zip(every, hits))[:width]
            if hit
        ]
        finished = sorted(finished, key=lambda item: -item[0])[:width]
        running = [item for item, hit in zip(every, hits) if not hit][:width]
        if not running:
            break
        best_length = max_tokens if early_stopping == "never" and length_penalty > 0 else length
        worst = finished[-1][0] if len(finished) == width else LOST
        if not running[0][1] / best_length**length_penalty > worst:
            break
        if early_stopping is True and len(finished) == width:
            break
    return [item for _, item in finished]
