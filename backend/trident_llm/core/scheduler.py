"""Which tokens to compute in the next step, and what became of them.

There are no phases: a sequence is scheduled until ``num_computed_tokens`` reaches ``num_tokens``,
whether those are prompt or output tokens. One step's tokens come from one budget: sequences that
decode have theirs set aside, running prefills share the rest, waiting sequences get what is left.
Blocks go to the running sequences in their order, by priority and arrival. When they run out, one that
comes later is preempted, of the least urgent the one that costs least to redo: its blocks go, its
tokens stay, and it is computed again later. So the first in order is never preempted.

The beams of a search are a group: admitted, preempted and computed together, apart from what they
compute again after a preemption. Then the first beam computes what all have in common, and the others
start from there.

The scheduler knows no tensors and no text. It may be some steps ahead of the device: ``schedule``
counts tokens as computed at once and sampled ones as placeholders; ``update`` makes them known, in
the order of the steps.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from trident_llm.core.beam import BeamSearch
from trident_llm.core.block_pool import Block, BlockPool, blocks_for
from trident_llm.core.block_tables import BlockTables
from trident_llm.core.config import SchedulerConfig
from trident_llm.core.ends import reached_end
from trident_llm.core.group import due_with, group_of, leader_of, num_shared_tokens, redo_cost
from trident_llm.core.messages import Continuation, Fork, SampledRow, SchedulerOutput, StepResult
from trident_llm.core.request import FinishReason, Request, RequestStatus, Sequence
from trident_llm.core.step import SchedulerStats, SequenceUpdate, Step, extend_prompt_logprobs

# A waiting sequence that does not fit may be overtaken this often; then it goes first.
MAX_OVERTAKEN = 16
NOTHING_ALLOWED = "nothing_allowed"  # the stop reason of an error that the request caused itself
# How far behind the first waiting sequence one that fits is looked for.
SKIP_AHEAD_WINDOW = 32


class Scheduler:
    """Requests in, :class:`SchedulerOutput` out, results back. Not thread-safe: the engine's thread."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(
            config.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._tables = BlockTables(self.pool, config)
        self.waiting: list[Sequence] = []  # in scheduling order; of a search its first beam only
        self.running: list[Sequence] = []  # in scheduling order
        self.stats = SchedulerStats()
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._finished_rows: list[int] = []
        self._pending_forks: dict[Request, list[Sequence]] = {}  # rows reserved for children
        self._in_flight: deque[Step] = deque()
        self._next_step = 1
        self._arrivals = 0

    # ---- requests in and out ----------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a checked request; its continuations fork when the prompt is computed."""
        self._arrivals += 1
        request.arrival = self._arrivals
        prompt = request.prompt_token_ids
        assert 0 < len(prompt) <= self.config.max_model_len, "checked at the door"
        assert request.params.num_sequences <= self.config.max_num_seqs, "checked at the door"
        if request.params.use_beam_search:
            request.in_lockstep = True
            request.beams = BeamSearch(
                request.params, len(prompt), self.config.eos_token_ids, request.beam_text
            )
        request.sequences = [
            Sequence(request, index, list(prompt), len(prompt))
            for index in range(request.params.num_sequences)
        ]
        self._tables.extend_hashes(request.sequences[0])
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
        step = Step(SchedulerOutput(self._next_step, finished_rows=self._finished_rows))
        budget = self.config.max_num_batched_tokens
        preempted = self.stats.num_preemptions
        done: set[Sequence] = set()
        turns = [(seq, due_with(seq)) for seq in self.running]
        set_aside = sum(len(due) for _, due in turns)  # for those that decode
        num_prefills = sum(seq.num_remaining > 1 for seq in self.running)
        share = self._prefill_share(num_prefills + len(self.waiting))
        for seq, due in turns:
            if due:
                set_aside -= len(due)
                if len(due) <= budget:
                    budget -= self._schedule_running(step, due, 1, done)
            elif seq.num_remaining > 1 and budget > set_aside:
                chunk = min(seq.num_remaining - seq.num_held_back, share, budget - set_aside)
                budget -= self._schedule_running(step, [seq], chunk, done)
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
        self, step: Step, seqs: list[Sequence], num_tokens: int, done: set[Sequence]
    ) -> int:
        """Schedules tokens of a running sequence, or of each beam of a search; tokens scheduled.

        Others are preempted for blocks. ``done`` holds those that this step needs, by their leaders.
        """
        if seqs[0].status is not RequestStatus.RUNNING:
            return 0  # preempted for an earlier one of this pass
        leader = leader_of(seqs[0])
        while True:
            wanted = self._tables.wanted_together(seqs, num_tokens)
            if wanted <= max(0, self.pool.num_free - step.num_awaited):
                break
            if self.pool.num_fenced:  # blocks are on their way back: wait for the steps in flight
                step.num_awaited += wanted
                return 0
            victim = self._choose_victim(leader, done)
            if victim in done:
                return 0  # another beam of its search is in this step already
            self._preempt(victim)
            if victim is leader:
                return 0
        if len(seqs) > 1:
            assert leader.request.beams is not None
            step.output.continuations.extend(leader.request.beams.continuations)
            leader.request.beams.continuations = []
        for seq in seqs:
            self._place(step, seq, num_tokens)
        done.add(leader)
        if step.forked:
            done.update(step.forked)  # their rows begin in this step
        return num_tokens * len(seqs)

    def _choose_victim(self, leader: Sequence, done: set[Sequence]) -> Sequence:
        """Who goes for ``leader``: of the least urgent that come later, the cheapest to redo.

        One that was resumed and has gained no block since is spared while there is another, so that
        two sequences cannot evict each other for ever; ``leader`` itself is the last choice.
        """
        own = self._order(leader)
        later = [s for s in self.running if s is leader_of(s) and self._order(s) > own]
        later = [s for s in later if s not in done]
        if not later:
            return leader
        if self.config.scheduling_policy == "priority":
            least_urgent = max(s.request.params.priority for s in later)
            later = [s for s in later if s.request.params.priority == least_urgent]
        candidates = [s for s in later if not s.protected] or later
        return min(candidates, key=lambda s: (redo_cost(s), -s.request.arrival, -s.index))

    def _preempt(self, leader: Sequence) -> None:
        self.stats.num_preemptions += 1
        self.stats.recomputed_tokens += redo_cost(leader)
        leader.num_preemptions += 1
        self._drop_pending_forks(leader)
        for seq in group_of(leader):
            if seq.status is RequestStatus.RUNNING:
                self.running.remove(seq)
                self._release(seq)
                seq.status = RequestStatus.WAITING
                seq.num_computed_tokens = 0
                seq.num_resumed_blocks = 0
        if leader.request.beams is not None:
            leader.request.beams.continuations = []
        insort(self.waiting, leader, key=self._order)

    # ---- admission ----------------------------------------------------------------------------

    def _admit_waiting(self, step: Step, budget: int, share: int) -> None:
        """Moves waiting sequences to running, in order, past a few that do not fit."""
        promised = sum(self._blocks_ahead(seq) for seq in self.running)
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
            promised += self._blocks_ahead(seq)
            for waiting in overtaken:
                waiting.overtaken += 1

    def _admit(self, step: Step, seq: Sequence, limit: int, promised: int) -> int | None:
        """Starts a waiting sequence if all its known tokens fit; tokens scheduled, or None."""
        if seq.num_placeholders:
            return None  # preempted with a token in flight: it must be known first
        children = self._children(seq)
        if 1 + len(children) > len(self._free_rows):
            return None
        if seq.num_held_back:
            assert seq.request.beams is not None
            seq.request.beams.num_shared_tokens = num_shared_tokens(seq.request.sequences)
        hit = self._tables.cached_prefix(seq)
        wanted = blocks_for(seq.num_tokens, self.config.block_size) - len(hit)
        wanted += self._blocks_of_beams(seq)
        # Running sequences grow by the token: a resumed one that took the last block would be
        # preempted again at once.
        spare = 1 if seq.num_preemptions and self.running else 0
        free = self.pool.num_free - sum(
            block.ref_count == 0 and block.on_free_list for block in hit
        )
        if wanted + promised + spare > free:
            return None
        self.waiting.remove(seq)
        seq.overtaken = 0
        if seq.num_preemptions:
            seq.num_resumed_blocks = blocks_for(seq.num_tokens, self.config.block_size)
        for child in children:
            child.row = self._free_rows.pop()
        if children:
            self._pending_forks[seq.request] = children
        seq.row = self._free_rows.pop()
        self._start(step, seq, hit)
        self.stats.prefix_queries += seq.num_tokens
        self.stats.prefix_hits += seq.num_computed_tokens
        if not seq.first_scheduled:
            seq.first_scheduled = True
            seq.num_cached_tokens = seq.num_computed_tokens
        num_tokens = min(seq.num_remaining - seq.num_held_back, limit)
        self._place(step, seq, num_tokens)
        return num_tokens

    def _children(self, seq: Sequence) -> list[Sequence]:
        """Sequences that will start from this one, and get their rows along with it.

        Other continuations do so once, when the prompt is computed; beams whenever they are resumed.
        """
        siblings = seq.request.sequences
        if seq.index or len(siblings) == 1:
            return []
        waits = seq.request.beams is not None or not siblings[1].first_scheduled
        return siblings[1:] if waits else []

    def _blocks_of_beams(self, seq: Sequence) -> int:
        """Blocks that the other beams of a resumed search will take to compute theirs again."""
        if not seq.num_held_back:
            return 0
        assert seq.request.beams is not None
        size = self.config.block_size
        own = blocks_for(seq.num_tokens, size) - seq.request.beams.num_shared_tokens // size
        return own * (len(seq.request.sequences) - 1)

    def _blocks_ahead(self, seq: Sequence) -> int:
        """Blocks that a running sequence will take for what is known: not to be given to others."""
        ahead = max(0, self._tables.wanted(seq, seq.num_remaining))
        if seq.index == 0 and seq.request in self._pending_forks:
            ahead += self._blocks_of_beams(seq)
        return ahead

    def _start(self, step: Step, seq: Sequence, shared: list[Block]) -> None:
        """A sequence that has a row begins to run, from blocks whose KV it need not compute."""
        self._tables.start(seq, shared)
        seq.status = RequestStatus.RUNNING
        insort(self.running, seq, key=self._order)
        step.start_row(seq)

    # ---- placing tokens in a step -------------------------------------------------------------

    def _place(self, step: Step, seq: Sequence, num_tokens: int) -> None:
        """Gives ``num_tokens`` tokens their blocks and puts them into the step."""
        first, copy = self._tables.grow(seq, num_tokens, step.output.step)
        prompt_left = seq.num_prompt_tokens - seq.num_computed_tokens
        self.stats.prompt_tokens_scheduled += max(0, min(num_tokens, prompt_left))
        seq.num_computed_tokens += num_tokens
        samples = seq.num_remaining == 0 and not seq.exhausted
        step.schedule_row(seq, num_tokens, first, copy, samples)
        step.registered += self._tables.register_full(seq)
        if samples:
            seq.num_placeholders += 1
            step.sampled.append(seq)
        elif seq.num_remaining == 0:
            step.scored.append(seq)
        if seq.num_held_back:
            self._resume_beams(step, seq)
        elif samples:
            self._fork(step, seq)

    def _fork(self, step: Step, parent: Sequence) -> None:
        """The prompt is computed: the request's other sequences share its blocks from here on."""
        for child in self._pending_forks.pop(parent.request, []):
            assert parent.row is not None and child.row is not None
            step.output.forks.append(Fork(parent.row, child.row, child.index))
            self._tables.fork(parent, child)
            child.num_cached_tokens = parent.num_cached_tokens
            child.num_placeholders = 1
            child.first_scheduled = True
            child.status = RequestStatus.RUNNING
            insort(self.running, child, key=self._order)
            step.forked.append(child)

    def _resume_beams(self, step: Step, first: Sequence) -> None:
        """The other beams start from what the first one has computed of their common tokens."""
        assert first.request.beams is not None
        shared = first.request.beams.num_shared_tokens // self.config.block_size
        if first.num_computed_tokens >= shared * self.config.block_size:
            for child in self._pending_forks.pop(first.request, []):
                self._start(step, child, first.blocks[:shared])

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

    @property
    def _newest_step(self) -> int:
        """The newest launched step, which fences what is released, whoever is in it.

        Another owner of a shared block may be, even if the one that lets go is not.
        """
        return self._in_flight[-1].output.step if self._in_flight else 0

    def _release(self, seq: Sequence) -> None:
        """Takes a sequence off the device: its blocks (once no step uses them) and its row."""
        self._tables.release(seq, self._newest_step)
        if seq.row is not None:
            self._finished_rows.append(seq.row)
            self._free_rows.append(seq.row)
            seq.row = None

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
            extend_prompt_logprobs(step.scheduled[scored.place].request, scored)
        updates: list[SequenceUpdate] = []
        searches: dict[Request, list[SampledRow]] = {}  # a row per beam, in their order
        for seq, row in zip(sampled, result.sampled):
            seq.num_placeholders -= 1
            if seq.status is RequestStatus.FINISHED:
                continue
            if seq.request.beams is not None:
                searches.setdefault(seq.request, []).append(row)
                continue
            unusable = row.failed or row.nothing_allowed
            updates.append(self._fail(seq, row) if unusable else self._accept(seq, row))
            if seq.status is RequestStatus.RUNNING:
                newest = self._in_flight[-1] if self._in_flight else step
                newest.registered += self._tables.register_full(seq)
        for request, rows in searches.items():
            updates += self._advance_beams(request, rows)
        for seq in step.scored:
            if seq.status is not RequestStatus.FINISHED:
                self.finish(seq, FinishReason.LENGTH)
                updates.append(SequenceUpdate(seq, [], None))
        return updates

    def _advance_beams(self, request: Request, rows: list[SampledRow]) -> list[SequenceUpdate]:
        """Each beam takes its next token, and its parent's blocks; or the search ends."""
        search, beams = request.beams, request.sequences
        assert search is not None and len(rows) == len(beams)
        failed = next((row for row in rows if row.failed), None)
        if failed is not None:
            return [self._fail(beams[0], failed)]
        choices = search.advance(
            [beam.token_ids for beam in beams], [row.candidates or [] for row in rows]
        )
        if not choices:
            return self._end_search(request, rows[0])
        self._tables.rearrange(beams, [choice.parent for choice in choices], self._newest_step)
        for beam, choice in zip(beams, choices):
            beam.token_ids.append(choice.token_id)
            if beam.row is not None:  # else preempted meanwhile: it will be sent in full
                parent = beams[choice.parent].row
                assert parent is not None
                search.continuations.append(Continuation(beam.row, parent, choice.token_id))
        return []

    def _end_search(self, request: Request, row: SampledRow) -> list[SequenceUpdate]:
        """Ends all beams; the first n become the best hypotheses."""
        assert request.beams is not None
        best = request.beams.hypotheses[: request.params.n]
        if len(best) < request.params.n:
            return [self._fail(request.sequences[0], row)]
        updates = []
        for seq, found in zip(request.sequences, best):
            self.finish(seq, found.finish_reason, found.stop_reason)
            seq.token_ids = found.token_ids
            output = seq.token_ids[seq.num_prompt_tokens :]
            updates.append(SequenceUpdate(seq, output, None, found.logprob))
        for seq in request.sequences[len(best) :]:
            self.finish(seq, best[0].finish_reason)
        return updates

    def _accept(self, seq: Sequence, row: SampledRow) -> SequenceUpdate:
        accepted: list[int] = []
        for token_id in row.token_ids:
            seq.token_ids.append(token_id)
            accepted.append(token_id)
            reason, stop = reached_end(seq, token_id, self.config.eos_token_ids)
            if reason is not None:
                self.finish(seq, reason, stop)
                break
        logprobs = None if row.logprobs is None else row.logprobs[: len(accepted)]
        return SequenceUpdate(seq, accepted, logprobs)

    def _fail(self, leader: Sequence, row: SampledRow) -> SequenceUpdate:
        """Nothing could be sampled. After logits that were not finite nothing written stays cached."""
        for seq in group_of(leader):
            if row.failed:  # also what it wrote and then lost to a preemption
                self.pool.forget_hashes(seq.block_hashes)
            self.finish(seq, FinishReason.ERROR, None if row.failed else NOTHING_ALLOWED)
        return SequenceUpdate(leader, [], None)

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
