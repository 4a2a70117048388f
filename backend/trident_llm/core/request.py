"""A request and its sequences: what the scheduler knows of a user's work.

A :class:`Request` is what a user sent; a :class:`Sequence` is one of its n continuations and the unit
of scheduling, or one of the beams of a search, which are scheduled together. A sequence is preempted by going back to WAITING: its tokens stay, its blocks go.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from trident_llm.core.messages import TokenLogprob
from trident_llm.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trident_llm.core.beam import BeamSearch, BeamText
    from trident_llm.core.block_pool import Block


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a sequence ended; the values are what a client reads."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


@dataclass(slots=True, eq=False)
class Request:
    """One user's work. ``params`` are checked and resolved: seed and max_tokens are set."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: int = 0  # order of arrival, set by the scheduler
    cache_salt: str = ""
    # The host decides what may follow a token (a grammar, a beam search): a sequence is scheduled
    # only once its last token is known, however far steps are launched ahead.
    in_lockstep: bool = False
    sequences: list[Sequence] = field(default_factory=list)
    beams: BeamSearch | None = None  # set by the scheduler
    beam_text: BeamText | None = None  # the empty output's, if a search must look for stop strings
    # Of the prompt tokens from the second on, as far as computed; only if asked for.
    prompt_logprobs: list[list[TokenLogprob]] = field(default_factory=list)

    @property
    def seed(self) -> int:
        assert self.params.seed is not None, "a seed is chosen before a request reaches the core"
        return self.params.seed

    @property
    def max_tokens(self) -> int:
        assert self.params.max_tokens is not None, "max_tokens is resolved before the core"
        return self.params.max_tokens

    @property
    def finished(self) -> bool:
        return all(seq.status is RequestStatus.FINISHED for seq in self.sequences)


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of a request.

    Lengths, while a step that samples is in flight::

        |<--------- token_ids (known) --------->|<- num_placeholders ->|
        |<----------------- num_tokens ----------------------------->|
        |<-- num_computed_tokens (KV written or being written) -->|
    """

    request: Request
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_placeholders: int = 0  # tokens sampled by launched steps, not known here yet
    blocks: list[Block] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks of known tokens
    num_registered_blocks: int = 0  # leading blocks that were offered to the prefix cache
    num_sent_blocks: int = 0  # leading blocks that the row's table on the device holds
    row: int | None = None
    num_cached_tokens: int = 0  # prompt tokens that the first admission found in the prefix cache
    first_scheduled: bool = False
    num_preemptions: int = 0
    num_resumed_blocks: int = 0  # of the tokens that were known when it was resumed
    overtaken: int = 0  # later sequences admitted before this one
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_placeholders

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated and known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def protected(self) -> bool:
        """Whether it was resumed and has not gained a block since."""
        return len(self.blocks) <= self.num_resumed_blocks

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_held_back(self) -> int:
        """Of those, how many it may not compute alone: beams compute their newest one together."""
        return int(self.request.beams is not None and self.num_output_tokens > 0)

    @property
    def exhausted(self) -> bool:
        """Whether every token it may generate is sampled already, known or in flight."""
        return self.num_tokens - self.num_prompt_tokens >= self.request.max_tokens
