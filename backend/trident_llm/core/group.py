"""Sequences that are scheduled and preempted together: the beams of a search, any other one alone.

A group is named by its leader, the search's first beam.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from trident_llm.core.request import RequestStatus, Sequence


def leader_of(seq: Sequence) -> Sequence:
    """The sequence that stands for the group: a search's first beam, or the sequence itself."""
    return seq.request.sequences[0] if seq.request.beams is not None else seq


def group_of(leader: Sequence) -> list[Sequence]:
    return leader.request.sequences if leader.request.beams is not None else [leader]


def redo_cost(leader: Sequence) -> int:
    """About how many tokens to compute again if the sequence, with its group, loses its blocks."""
    group = group_of(leader)
    cost = sum(seq.num_computed_tokens for seq in group)
    if len(group) > 1:
        shared = min(num_shared_tokens(group), leader.num_computed_tokens)
        cost -= shared * sum(seq.num_computed_tokens > 0 for seq in group[1:])
    return cost


def num_shared_tokens(seqs: SequenceOf[Sequence]) -> int:
    """Leading tokens that all beams have in common, the newest one left out."""
    first, last = min(seq.token_ids for seq in seqs), max(seq.token_ids for seq in seqs)
    for index, (one, other) in enumerate(zip(first[:-1], last[:-1])):
        if one != other:
            return index
    return len(first) - 1


def due_with(seq: Sequence) -> list[Sequence]:
    """Who computes its newest token now, when it is this sequence's turn: all beams at once."""
    request = seq.request
    if seq.num_remaining != 1 or (seq.num_placeholders and request.in_lockstep):
        return []
    if request.beams is None or not seq.num_output_tokens:
        prompt_left = seq.num_computed_tokens < seq.num_prompt_tokens
        return [seq] if prompt_left or not seq.exhausted else []
    if seq is not leader_of(seq):
        return []
    beams = request.sequences
    ready = all(beam.status is RequestStatus.RUNNING and beam.num_remaining == 1 for beam in beams)
    return beams if ready else []
