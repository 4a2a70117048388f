"""What crosses the seam between host decisions and the device: plain integers, no tensors.

A :class:`SchedulerOutput` is a delta. The runner owns *rows*: one row holds what the device knows of
one sequence (its tokens, block table, lengths, sampling parameters). A sequence is sent in full once,
as a :class:`NewRow`; afterwards only its token count and new block ids travel. The runner applies an
output in this order:

    finished_rows -> continuations -> new_rows -> block tables -> block_copies -> KV write and forward
    -> forks -> sample

Outputs are launched and collected in the order of their ``step``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from trident_llm.core.sampling_params import SamplingParams


class NewRow(NamedTuple):
    """A sequence that enters the device, new or resumed after a preemption."""

    row: int
    token_ids: list[int]  # all known tokens: the prompt and, when resumed, the output so far
    num_prompt_tokens: int
    num_computed_tokens: int  # tokens whose KV already lies in the blocks (a prefix hit)
    sampling_params: SamplingParams
    seed: int
    sequence_index: int


class ScheduledRow(NamedTuple):
    """``num_tokens`` tokens of one row to compute in this step.

    ``block_ids`` replace or extend the row's block table from column ``first_block`` on; a replaced
    entry is a shared block that this row now owns a copy of. ``samples`` is true when the last of
    these tokens is the newest known one, so that its logits choose the next token.
    """

    row: int
    num_tokens: int
    first_block: int
    block_ids: list[int]
    samples: bool


class Fork(NamedTuple):
    """After the forward pass ``child_row`` becomes a copy of ``parent_row`` and samples for itself."""

    parent_row: int
    child_row: int
    sequence_index: int


class Continuation(NamedTuple):
    """``row`` of a beam search becomes a copy of ``parent_row``, with ``token_id`` behind it.

    All continuations of a step happen at once: rows may swap.
    """

    row: int
    parent_row: int
    token_id: int


class BlockCopy(NamedTuple):
    """Copy a block's KV in all layers before anything of this step is written (copy-on-write)."""

    source: int
    destination: int


@dataclass(frozen=True)
class SchedulerOutput:
    """One step's work. Sampled tokens come back for the sampling rows in order, then for the forks."""

    step: int
    finished_rows: list[int] = field(default_factory=list)
    continuations: list[Continuation] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    scheduled_rows: list[ScheduledRow] = field(default_factory=list)
    block_copies: list[BlockCopy] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.scheduled_rows)

    @property
    def sampled_rows(self) -> list[int]:
        """Rows that sample, in the order of the step's results."""
        rows = [scheduled.row for scheduled in self.scheduled_rows if scheduled.samples]
        return rows + [fork.child_row for fork in self.forks]


class TokenLogprob(NamedTuple):
    """Log-probability of one token under the raw logits; rank 1 is the most likely token."""

    token_id: int
    logprob: float
    rank: int


class Candidate(NamedTuple):
    """A token that may follow in a beam search, with its log-probability after the request's edits."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class SampledRow:
    """What one row sampled: a list of tokens, since speculation yields several at once.

    ``logprobs[i]`` belongs to ``token_ids[i]``: the sampled token first, then the most likely ones.
    ``failed`` says that the row's logits were not finite, ``nothing_allowed`` that the request's own
    parameters forbade every token: in both cases the tokens must not be used. A beam's row samples
    nothing: it has ``candidates``, the most likely first, and the host decides.
    """

    token_ids: list[int]
    logprobs: list[list[TokenLogprob]] | None = None
    failed: bool = False
    nothing_allowed: bool = False
    candidates: list[Candidate] | None = None


class PromptLogprobs(NamedTuple):
    """Log-probabilities of consecutive prompt tokens of one row, from position ``first`` on.

    ``place`` is the row's in :attr:`SchedulerOutput.scheduled_rows`.
    """

    place: int
    first: int
    entries: list[list[TokenLogprob]]


@dataclass(frozen=True)
class StepResult:
    """The outcome of one step; ``sampled`` is aligned with :attr:`SchedulerOutput.sampled_rows`."""

    step: int
    sampled: list[SampledRow]
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
