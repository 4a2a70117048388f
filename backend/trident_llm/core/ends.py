"""Where a sequence ends by its own tokens, and why. Stop strings are looked for in its text."""

from __future__ import annotations

from trident_llm.core.request import FinishReason, Sequence

REPETITION_STOP_REASON = "repetition_detected"


def reached_end(
    seq: Sequence, token_id: int, eos_token_ids: frozenset[int]
) -> tuple[FinishReason | None, int | str | None]:
    """The reason and the stop reason after ``token_id``, its newest token; None if it goes on."""
    params = seq.request.params
    if seq.num_output_tokens >= params.min_tokens:
        if not params.ignore_eos and token_id in eos_token_ids:
            return FinishReason.STOP, None
        if token_id in params.stop_token_ids:
            return FinishReason.STOP, token_id
    if seq.num_output_tokens >= seq.request.max_tokens:
        return FinishReason.LENGTH, None
    detection = params.repetition_detection
    if detection is not None and seq.num_output_tokens >= params.min_tokens:
        longest = detection.max_pattern_size * detection.min_count
        start = max(seq.num_prompt_tokens, len(seq.token_ids) - longest)
        if detection.repeats(seq.token_ids[start:]):
            return FinishReason.REPETITION, REPETITION_STOP_REASON
    return None, None
