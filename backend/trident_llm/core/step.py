"""A launched step as the scheduler keeps it until its results are in, and what it keeps of all steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from trident_llm.core.block_pool import Block
from trident_llm.core.messages import (
    BlockCopy,
    NewRow,
    PromptLogprobs,
    ScheduledRow,
    SchedulerOutput,
    TokenLogprob,
)
from trident_llm.core.request import Request, Sequence


class SequenceUpdate(NamedTuple):
    """What one step brought one sequence. The finish, if any, is in the sequence itself."""

    sequence: Sequence
    token_ids: list[int]
    logprobs: list[list[TokenLogprob]] | None
    cumulative_logprob: float | None = None  # of all tokens, where the search has summed them


@dataclass
class SchedulerStats:
    """Counts since the start; tokens unless named otherwise."""

    num_preemptions: int = 0
    recomputed_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    scheduled_tokens: int = 0
    prompt_tokens_scheduled: int = 0


@dataclass
class Step:
    """A launched step: whose tokens it carries and what it promised to the prefix cache."""

    output: SchedulerOutput
    sampled: list[Sequence] = field(default_factory=list)
    forked: list[Sequence] = field(default_factory=list)
    scheduled: list[Sequence] = field(default_factory=list)
    scored: list[Sequence] = field(default_factory=list)  # whole prompts that nothing follows
    registered: list[Block] = field(default_factory=list)
    num_awaited: int = 0  # blocks that sequences wait for: later ones must not take them

    def start_row(self, seq: Sequence) -> None:
        """The device learns all known tokens of a sequence."""
        assert seq.row is not None
        self.output.new_rows.append(
            NewRow(
                row=seq.row,
                token_ids=list(seq.token_ids),
                num_prompt_tokens=seq.num_prompt_tokens,
                num_computed_tokens=seq.num_computed_tokens,
                sampling_params=seq.request.params,
                seed=seq.request.seed,
                sequence_index=seq.index,
            )
        )

    def schedule_row(
        self,
        seq: Sequence,
        num_tokens: int,
        first_block: int,
        copy: BlockCopy | None,
        samples: bool,
    ) -> None:
        """Tokens of a sequence are computed; its table is sent from column ``first_block`` on."""
        assert seq.row is not None and num_tokens > 0
        if copy is not None:
            self.output.block_copies.append(copy)
        block_ids = [block.block_id for block in seq.blocks[first_block:]]
        self.output.scheduled_rows.append(
            ScheduledRow(seq.row, num_tokens, first_block, block_ids, samples)
        )
        self.scheduled.append(seq)


def extend_prompt_logprobs(request: Request, scored: PromptLogprobs) -> None:
    """Adds what is new: after a preemption the first chunks are scored once more."""
    known = request.prompt_logprobs
    assert scored.first <= len(known) + 1, "chunks are computed in order"
    known += scored.entries[len(known) + 1 - scored.first :]
