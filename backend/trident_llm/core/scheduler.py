"""Which tokens to compute in the next step, and what became of them.

There are no phases: a sequence is scheduled until ``num_computed_tokens`` reaches ``num_tokens``,
whether those are prompt or output tokens. One step's tokens come from one budget, in this order:
sequences that decode, running prefills, waiting sequences. When blocks run out, the sequence that
costs least to redo is preempted: its blocks go, its tokens stay, and it is computed again later.

The scheduler knows no tensors and no text. It may be some steps ahead of the device: ``schedule``
counts tokens as computed at once and sampled ones as placeholders; ``update`` makes them known, in
the order of the steps.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from trident_llm.core.block_pool import Block, BlockPool, block_hash, root_hash
from trident_llm.core.config import SchedulerConfig
from trident_llm.core.messages import (
    BlockCopy,
    Fork,
    NewRow,
    PromptLogprobs,
    SampledRow,
    ScheduledRow,
    SchedulerOutput,
    StepResult,
    TokenLogprob,
)
from trident_llm.core.request import FinishReason, Request, RequestStatus, Sequence

# A waiting sequence that does not fit may be overtaken this often; then it goes first.
MAX_OVERTAKEN = 16
REPETITION_STOP_REASON = "repetition_detected"
NOTHING_ALLOWED = "nothing_allowed"  # the stop reason of an error that the request caused itself
# How far behind the first waiting sequence one that fits is looked for.
SKIP_AHEAD_WINDOW = 32


class SequenceUpdate(NamedTuple):
    """What one step brought one sequence. The finish, if any, is in the sequence itself."""

    sequence: Sequence
    token_ids: list[int]
    logprobs: list[list[TokenLogprob]] | None


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
class _Step:
    """A launched step: whose tokens it carries and what it promised to the prefix cache."""

    output: SchedulerOutput
    sampled: list[Sequence] = field(default_factory=list)
    forked: list[Sequence] = field(default_factory=list)
    scheduled: list[Sequence] = field(default_factory=list)
    registered: list[Block] = field(default_factory=list)


def _extend_prompt_logprobs(request: Request, scored: PromptLogprobs) -> None:
    """Adds what is new: after a preemption the first chunks are scored once more."""
    known = request.prompt_logprobs
    assert scored.first <= len(known) + 1, "chunks are computed in order"
    known += scored.entries[len(known) + 1 - scored.first :]


def _blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


class Scheduler:
    """Requests in, :class:`SchedulerOutput` out, results back. Not thread-safe: the engine's thread."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(
            config.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.waiting: list[Sequence] = []  # in scheduling order
        self.running: list[Sequence] = []  # in scheduling order
        self.stats = SchedulerStats()
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._finished_rows: list[int] = []
        self._pending_forks: dict[Request, list[Sequence]] = {}  # rows reserved for children
        self._in_flight: deque[_Step] = deque()
        self._next_step = 1
        self._arrivals = 0

    # ---- requests in and out ----------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a checked request; its continuations fork when the prompt is computed."""
        self._arrivals += 1
        request.arrival = self._arrivals
        prompt = request.prompt_token_ids
        assert prompt and len(prompt) + 1 <= self.config.max_model_len, "checked at the door"
        assert request.params.num_sequences <= self.config.max_num_seqs, "checked at the door"
        request.sequences = [
            Sequence(request, index, list(prompt), len(prompt))
            for index in range(request.params.num_sequences)
        ]
        self._extend_hashes(request.sequences[0])
        insort(self.waiting, request.sequences[0], key=self._order)

    def _order(self, seq: Sequence) -> tuple[int, int, int]:
        """Sort key: lower goes first. A preempted sequence keeps its place by its arrival."""
        by_priority = self.config.scheduling_policy == "priority"
        priority = seq.request.params.priority if by_priority else 0
        return (priority, seq.request.arrival, seq.index)

    def finish(self, seq: Sequence, reason: FinishReason, stop: int | str | None = None) -> None:
        """Ends a sequence in whatever state it is; ending it again changes nothing."""
        if seq.status is RequestStatus.FINISHED:
            return
        if seq.status is RequestStatus.RUNNING:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self._release(seq)
        seq.status = RequestStatus.FINISHED
        seq.finish_reason = reason
        seq.stop_reason = stop
        for child in self._drop_pending_forks(seq):
            child.status = RequestStatus.FINISHED
            child.finish_reason = reason

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends all sequences of a request."""
        for seq in request.sequences:
            self.finish(seq, reason)

    @property
    def newest_sampled(self) -> list[Sequence]:
        """The sequences that sample in the newest step, in the order of its ``sampled_rows``."""
        step = self._in_flight[-1]
        return step.sampled + step.forked

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._in_flight)

    @property
    def num_in_flight(self) -> int:
        """Steps launched and not yet updated."""
        return len(self._in_flight)

    def check_integrity(self) -> list[str]:
        """What is wrong with the pool's accounts; empty when all is well."""
        live = [*self.running, *self.waiting]
        problems = self.pool.check_integrity([seq.blocks for seq in live])
        held_rows = sum(seq.row is not None for seq in live)
        held_rows += sum(len(children) for children in self._pending_forks.values())
        if held_rows + len(self._free_rows) != self.config.max_num_seqs:
            problems.append(f"{held_rows} rows held, {len(self._free_rows)} free")
        return problems

    # ---- one step -----------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """The next step's work, or None if there is nothing that can be computed now."""
        step = _Step(SchedulerOutput(self._next_step, finished_rows=self._finished_rows))
        budget = self.config.max_num_batched_tokens
        preempted = self.stats.num_preemptions
        done: set[Sequence] = set()
        for seq in list(self.running):
            if seq.num_placeholders and seq.request.in_lockstep:
                continue
            if seq.num_remaining == 1 and not seq.exhausted and budget > 0:
                budget -= self._schedule_running(step, seq, 1, done)
        prefills = [seq for seq in self.running if seq.num_remaining > 1]
        share = self._prefill_share(len(prefills) + len(self.waiting))
        for seq in prefills:
            if seq.status is RequestStatus.RUNNING and budget > 0:
                chunk = min(seq.num_remaining, share, budget)
                budget -= self._schedule_running(step, seq, chunk, done)
        if self.stats.num_preemptions == preempted:
            self._admit_waiting(step, budget, share)
        if not step.scheduled:
            return None
        self._finished_rows = []
        self._next_step += 1
        self._in_flight.append(step)
        self.stats.scheduled_tokens += step.output.num_tokens
        return step.output

    def _prefill_share(self, num_prefills: int) -> int:
        """Most tokens of one prefill in a step: a long prompt must not hold up the others'."""
        if self.config.long_prefill_token_threshold is not None:
            return self.config.long_prefill_token_threshold
        budget = self.config.max_num_batched_tokens
        return budget if num_prefills <= 1 else max(1, budget // 2)

    def _schedule_running(
        self, step: _Step, seq: Sequence, num_tokens: int, done: set[Sequence]
    ) -> int:
        """Schedules tokens of a running sequence, preempting others for blocks; tokens scheduled."""
        if seq.status is not RequestStatus.RUNNING:
            return 0  # preempted for an earlier one of this pass
        while self._blocks_wanted(seq, num_tokens) > self.pool.num_free:
            if self.pool.num_fenced:
                return 0  # blocks are on their way back: wait for the steps in flight
            victim = self._choose_victim(seq, done)
            self._preempt(victim)
            if victim is seq:
                return 0
        self._place(step, seq, num_tokens)
        done.add(seq)
        return num_tokens

    def _choose_victim(self, seq: Sequence, done: set[Sequence]) -> Sequence:
        """The running sequence that costs least to redo, among those not yet scheduled.

        One that was resumed and has gained no block since is spared while there is another, so that
        two sequences cannot evict each other for ever; ``seq`` itself is the last choice.
        """
        others = [s for s in self.running if s is not seq and s not in done]
        if self.config.scheduling_policy == "priority":
            own = seq.request.params.priority
            others = [s for s in others if s.request.params.priority >= own]
        candidates = [s for s in others if not s.protected] or others
        if not candidates:
            return seq
        return min(candidates, key=lambda s: (s.num_computed_tokens, -s.request.arrival, -s.index))

    def _preempt(self, seq: Sequence) -> None:
        self.stats.num_preemptions += 1
        self.stats.recomputed_tokens += seq.num_computed_tokens
        seq.num_preemptions += 1
        self.running.remove(seq)
        self._release(seq)
        self._drop_pending_forks(seq)
        seq.status = RequestStatus.WAITING
        seq.num_computed_tokens = 0
        seq.protected = False
        insort(self.waiting, seq, key=self._order)

    # ---- admission ----------------------------------------------------------------------------

    def _admit_waiting(self, step: _Step, budget: int, share: int) -> None:
        """Moves waiting sequences to running, in order, past a few that do not fit."""
        promised = sum(max(0, self._blocks_wanted(seq, seq.num_remaining)) for seq in self.running)
        overtaken: list[Sequence] = []
        for seq in self.waiting[:SKIP_AHEAD_WINDOW]:
            if budget <= 0 or not self._free_rows:
                break
            admitted = self._admit(step, seq, min(budget, share), promised)
            if admitted is None:
                overtaken.append(seq)
                if any(s.overtaken >= MAX_OVERTAKEN for s in overtaken):
                    break
                continue
            budget -= admitted
            promised += max(0, self._blocks_wanted(seq, seq.num_remaining))
            for waiting in overtaken:
                waiting.overtaken += 1

    def _admit(self, step: _Step, seq: Sequence, limit: int, promised: int) -> int | None:
        """Starts a waiting sequence if all its known tokens fit; tokens scheduled, or None."""
        if seq.num_placeholders:
            return None  # preempted with a token in flight: it must be known first
        num_rows = self._rows_wanted(seq)
        if num_rows > len(self._free_rows):
            return None
        hit = self._cached_prefix(seq)
        wanted = _blocks_for(seq.num_tokens, self.config.block_size) - len(hit)
        # Running sequences grow by the token: a resumed one that took the last block would be
        # preempted again at once.
        spare = 1 if seq.num_preemptions and self.running else 0
        free = self.pool.num_free - sum(
            block.ref_count == 0 and block.on_free_list for block in hit
        )
        if wanted + promised + spare > free:
            return None
        self.waiting.remove(seq)
        insort(self.running, seq, key=self._order)
        seq.status = RequestStatus.RUNNING
        seq.overtaken = 0
        seq.protected = seq.num_preemptions > 0
        self._start_row(step, seq, hit)
        num_tokens = min(seq.num_remaining, limit)
        self._place(step, seq, num_tokens)
        return num_tokens

    def _rows_wanted(self, seq: Sequence) -> int:
        """Rows to take at admission: the sequence's own and its children's, if it is yet to fork."""
        return len(seq.request.sequences) if self._forks_ahead(seq) else 1

    def _forks_ahead(self, seq: Sequence) -> bool:
        siblings = seq.request.sequences
        return seq.index == 0 and len(siblings) > 1 and not siblings[1].first_scheduled

    def _cached_prefix(self, seq: Sequence) -> list[Block]:
        """Cached blocks of the known tokens; at least one token is always left to compute."""
        if not seq.request.params.reads_prefix_cache:
            return []
        self._extend_hashes(seq)
        most = (seq.num_tokens - 1) // self.config.block_size
        return self.pool.match(seq.block_hashes[:most])

    def _start_row(self, step: _Step, seq: Sequence, hit: list[Block]) -> None:
        self.pool.share(hit)
        seq.blocks = list(hit)
        seq.num_registered_blocks = len(hit)
        seq.num_computed_tokens = len(hit) * self.config.block_size
        seq.row = self._free_rows.pop()
        self.stats.prefix_queries += seq.num_tokens
        self.stats.prefix_hits += seq.num_computed_tokens
        if not seq.first_scheduled:
            seq.first_scheduled = True
            seq.num_cached_tokens = seq.num_computed_tokens
        if self._forks_ahead(seq):
            children = seq.request.sequences[1:]
            for child in children:
                child.row = self._free_rows.pop()
            self._pending_forks[seq.request] = children
        step.output.new_rows.append(
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

    # ---- placing tokens in blocks -------------------------------------------------------------

    def _shared_tail(self, seq: Sequence) -> bool:
        """Whether the block that the next token goes to is shared, and must be copied first."""
        index, offset = divmod(seq.num_computed_tokens, self.config.block_size)
        return offset > 0 and seq.blocks[index].ref_count > 1

    def _blocks_wanted(self, seq: Sequence, num_tokens: int) -> int:
        total = _blocks_for(seq.num_computed_tokens + num_tokens, self.config.block_size)
        return total - len(seq.blocks) + self._shared_tail(seq)

    def _place(self, step: _Step, seq: Sequence, num_tokens: int) -> None:
        """Gives ``num_tokens`` tokens their blocks and puts them into the step."""
        assert seq.row is not None
        fresh = self.pool.allocate(self._blocks_wanted(seq, num_tokens))
        first = seq.num_sent_blocks
        if self._shared_tail(seq):
            first = len(seq.blocks) - 1
            source, copy = seq.blocks[first], fresh.pop(0)
            step.output.block_copies.append(BlockCopy(source.block_id, copy.block_id))
            seq.blocks[first] = copy
            self.pool.release([source], step.output.step)
        if fresh:
            seq.protected = False
        seq.blocks += fresh
        seq.num_sent_blocks = len(seq.blocks)
        prompt_left = seq.num_prompt_tokens - seq.num_computed_tokens
        self.stats.prompt_tokens_scheduled += max(0, min(num_tokens, prompt_left))
        seq.num_computed_tokens += num_tokens
        samples = seq.num_remaining == 0
        step.output.scheduled_rows.append(
            ScheduledRow(
                row=seq.row,
                num_tokens=num_tokens,
                first_block=first,
                block_ids=[block.block_id for block in seq.blocks[first:]],
                samples=samples,
            )
        )
        step.scheduled.append(seq)
        self._register_full_blocks(step, seq)
        if samples:
            seq.num_placeholders += 1
            step.sampled.append(seq)
            self._fork(step, seq)

    def _fork(self, step: _Step, parent: Sequence) -> None:
        """The prompt is computed: the request's other sequences share its blocks from here on."""
        for child in self._pending_forks.pop(parent.request, []):
            assert parent.row is not None and child.row is not None
            step.output.forks.append(Fork(parent.row, child.row, child.index))
            self.pool.share(parent.blocks)
            child.blocks = list(parent.blocks)
            child.block_hashes = list(parent.block_hashes)
            child.num_registered_blocks = parent.num_registered_blocks
            child.num_sent_blocks = parent.num_sent_blocks
            child.num_computed_tokens = parent.num_computed_tokens
            child.num_cached_tokens = parent.num_cached_tokens
            child.num_placeholders = 1
            child.first_scheduled = True
            child.status = RequestStatus.RUNNING
            insort(self.running, child, key=self._order)
            step.forked.append(child)

    def _drop_pending_forks(self, parent: Sequence) -> list[Sequence]:
        """Gives back the rows kept for children that will not fork now."""
        if parent.index != 0:
            return []
        children = self._pending_forks.pop(parent.request, [])
        for child in children:
            assert child.row is not None
            self._free_rows.append(child.row)
            child.row = None
        return children

    def _release(self, seq: Sequence) -> None:
        """Takes a sequence off the device: its blocks (once no step uses them) and its row."""
        # Fenced by the newest launched step of all, not of this sequence: another owner of a shared
        # block may have been in it.
        newest = self._in_flight[-1].output.step if self._in_flight else 0
        self.pool.release(seq.blocks, newest)
        seq.blocks = []
        seq.num_registered_blocks = seq.num_sent_blocks = 0
        if seq.row is not None:
            self._finished_rows.append(seq.row)
            self._free_rows.append(seq.row)
            seq.row = None

    # ---- the prefix cache ---------------------------------------------------------------------

    def _extend_hashes(self, seq: Sequence) -> None:
        """Hashes the full blocks of known tokens that are not hashed yet."""
        if not self.config.enable_prefix_caching:
            return
        size = self.config.block_size
        hashes = seq.block_hashes
        if not hashes and len(seq.token_ids) >= size:
            parent = root_hash(self.config.cache_identity, size, seq.request.cache_salt)
            hashes.append(block_hash(parent, seq.token_ids[:size]))
        for start in range(len(hashes) * size, len(seq.token_ids) - size + 1, size):
            hashes.append(block_hash(hashes[-1], seq.token_ids[start : start + size]))

    def _register_full_blocks(self, step: _Step, seq: Sequence) -> None:
        """Offers the blocks that are full of known tokens, written by ``step`` at the latest."""
        self._extend_hashes(seq)
        if not self.config.enable_prefix_caching:
            return
        full = min(seq.num_computed_tokens, len(seq.token_ids)) // self.config.block_size
        for index in range(seq.num_registered_blocks, full):
            if self.pool.register(seq.blocks[index], seq.block_hashes[index]):
                step.registered.append(seq.blocks[index])
        seq.num_registered_blocks = max(full, seq.num_registered_blocks)

    # ---- results --------------------------------------------------------------------------------

    def update(self, result: StepResult) -> list[SequenceUpdate]:
        """Makes a step's tokens known and ends the sequences that reached an end.

        Tokens for a sequence that ended meanwhile are dropped; one that was preempted keeps its own.
        """
        step = self._in_flight.popleft()
        assert step.output.step == result.step, "steps are collected in the order of their launch"
        sampled = step.sampled + step.forked
        assert len(sampled) == len(result.sampled)
        self.pool.complete_step(result.step)
        for scored in result.prompt_logprobs:
            _extend_prompt_logprobs(step.scheduled[scored.place].request, scored)
        updates: list[SequenceUpdate] = []
        for seq, row in zip(sampled, result.sampled):
            seq.num_placeholders -= 1
            if seq.status is RequestStatus.FINISHED:
                continue
            unusable = row.failed or row.nothing_allowed
            updates.append(self._fail(seq, row) if unusable else self._accept(seq, row))
            if seq.status is RequestStatus.RUNNING:
                self._register_full_blocks(self._in_flight[-1] if self._in_flight else step, seq)
        return updates

    def _accept(self, seq: Sequence, row: SampledRow) -> SequenceUpdate:
        accepted: list[int] = []
        for token_id in row.token_ids:
            seq.token_ids.append(token_id)
            accepted.append(token_id)
            reason, stop = self._reached_end(seq, token_id)
            if reason is not None:
                self.finish(seq, reason, stop)
                break
        logprobs = None if row.logprobs is None else row.logprobs[: len(accepted)]
        return SequenceUpdate(seq, accepted, logprobs)

    def _reached_end(
        self, seq: Sequence, token_id: int
    ) -> tuple[FinishReason | None, int | str | None]:
        params = seq.request.params
        if seq.num_output_tokens >= params.min_tokens:
            if not params.ignore_eos and token_id in self.config.eos_token_ids:
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

    def _fail(self, seq: Sequence, row: SampledRow) -> SequenceUpdate:
        """Nothing could be sampled. After logits that were not finite nothing written stays cached."""
        if row.failed:
            for block in seq.blocks:
                self.pool.forget(block)
        self.finish(seq, FinishReason.ERROR, None if row.failed else NOTHING_ALLOWED)
        return SequenceUpdate(seq, [], None)

    def fail_in_flight(self) -> list[Request]:
        """All launched steps are lost: ends their requests, forgets what they were to write."""
        requests: dict[Request, None] = {}
        while self._in_flight:
            step = self._in_flight.popleft()
            for block in step.registered:
                self.pool.forget(block)
            for seq in step.scheduled + step.forked:
                seq.num_placeholders = 0
                requests[seq.request] = None
            self.pool.complete_step(step.output.step)
        for request in requests:
            self.abort(request, FinishReason.ERROR)
        return list(requests)

    def reset_stats(self) -> None:
        """Starts counting anew, after a warm-up."""
        self.stats = SchedulerStats()
