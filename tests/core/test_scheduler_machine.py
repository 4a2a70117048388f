"""The shipped scheduler and pool under random operations, against sequences that run alone.

Small on purpose: three tokens of vocabulary and a dozen blocks make sharing, eviction, preemption and
full pools happen within a few steps.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from typing import Any, ClassVar

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.core.beam_reference import beam_search
from tests.core.fake_device import FakeDevice, candidates, digest, solo_ids
from trident_llm.core.block_pool import most_blocks_of_beams
from trident_llm.core.config import SchedulerConfig
from trident_llm.core.group import due_with
from trident_llm.core.messages import StepResult
from trident_llm.core.request import FinishReason, Request, RequestStatus, Sequence
from trident_llm.core.sampling_params import SamplingParams
from trident_llm.core.scheduler import MAX_OVERTAKEN, NOTHING_ALLOWED, Scheduler

VOCAB = 3
EOS = 2


class SchedulerMachine(RuleBasedStateMachine):
    depth = 0
    totals: ClassVar[Counter[str]] = Counter()  # of all machines, for the long run's report

    @initialize(
        block_size=st.integers(2, 4),
        num_blocks=st.integers(4, 12),
        budget=st.integers(4, 16),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
    )
    def start(
        self, block_size: int, num_blocks: int, budget: int, caching: bool, policy: str
    ) -> None:
        self.config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=(num_blocks - 1) * block_size,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            max_waiting=100,
            scheduling_policy=policy,  # type: ignore[arg-type]
            enable_prefix_caching=caching,
            eos_token_ids=frozenset({EOS}),
        )
        self.scheduler = Scheduler(self.config)
        self.device = FakeDevice(self.config, VOCAB)
        self.launched: deque[StepResult] = deque()
        self.requests: list[Request] = []
        self.emitted: dict[tuple[int, int], list[int]] = {}
        self.written: deque[set[int]] = deque()  # blocks that each launched step may write
        self.slots: deque[set[int]] = deque()  # the slots that it does write
        self.lost: set[Request] = set()  # ended with a failed row or step
        self.meanings: dict[bytes, tuple[str, tuple[int, ...]]] = {}  # salt and prefix of a hash
        self.overtaken: Counter[Sequence] = Counter()

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
        max_tokens=st.integers(0, 12),  # 0: the prompt is scored
        n=st.integers(1, 3),
        salt=st.sampled_from(["", "a"]),
        priority=st.integers(0, 2),
        seed=st.integers(0, 3),
        skip=st.booleans(),
        lockstep=st.booleans(),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        n: int,
        salt: str,
        priority: int,
        seed: int,
        skip: bool,
        lockstep: bool,
    ) -> None:
        if len(prompt) + max_tokens > self.config.max_model_len:
            return  # refused at the door
        params = SamplingParams(
            n=n if max_tokens else 1,
            max_tokens=max_tokens,
            seed=seed,
            priority=priority,
            skip_reading_prefix_cache=skip,
            ignore_eos=True,
        )
        request = Request(str(len(self.requests)), prompt, params, cache_salt=salt)
        request.in_lockstep = lockstep
        self.scheduler.add(request)
        self.requests.append(request)

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
        max_tokens=st.integers(1, 10),
        width=st.integers(2, 4),
        n=st.integers(1, 4),
        length_penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
        early_stopping=st.sampled_from([False, True, "never"]),
        stop_token=st.sampled_from([(), (0,)]),
        ignore_eos=st.booleans(),
        priority=st.integers(0, 2),
        skip=st.booleans(),
    )
    def add_beams(
        self,
        prompt: list[int],
        max_tokens: int,
        width: int,
        n: int,
        stop_token: tuple[int, ...],
        skip: bool,
        **params: Any,
    ) -> None:
        size, total = self.config.block_size, len(prompt) + max_tokens
        wanted = most_blocks_of_beams(len(prompt), max_tokens, width, size)
        if total > self.config.max_model_len or wanted >= self.config.num_blocks:
            return  # refused at the door
        sampling = SamplingParams(
            use_beam_search=True,
            beam_width=width,
            n=min(n, width),
            max_tokens=max_tokens,
            stop_token_ids=stop_token,
            seed=0,
            skip_reading_prefix_cache=skip,
            **params,
        )
        request = Request(str(len(self.requests)), prompt, sampling)
        self.scheduler.add(request)
        self.requests.append(request)

    def expected_beams(self, request: Request) -> list[list[int]]:
        params = request.params
        found = beam_search(
            request.prompt_token_ids,
            lambda token_ids: candidates(token_ids, VOCAB),
            width=params.num_sequences,
            max_tokens=request.max_tokens,
            ends=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {EOS}),
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        return [ids for ids, _ in found]

    def order(self, seq: Sequence) -> tuple[int, int, int]:
        """The place that a sequence is due, lower first."""
        by_priority = self.config.scheduling_policy == "priority"
        request = seq.request
        priority = request.params.priority if by_priority else 0
        return (priority, int(request.request_id), seq.index)

    def launch(self) -> bool:
        waited = list(self.scheduler.waiting)
        readable = [
            (seq, block) for seq in self.scheduler.running for block in seq.blocks
            if block.block_hash is not None
        ]  # fmt: skip
        ran = list(self.scheduler.running)
        decoding = [seq for seq in ran if due_with(seq)]
        output = self.scheduler.schedule()
        self.count_overtaken(waited)
        self.check_who_was_preempted(ran)
        self.note_meanings()
        if output is None:
            return False
        if self.depth == 0:  # else some may wait until blocks are out of use
            scheduled = {row.row for row in output.scheduled_rows}
            assert all(seq.row in scheduled for seq in decoding if seq.row is not None), "starves"
        sampling = [seq for seq in self.scheduler.running if seq.num_placeholders]
        assert all(seq.num_placeholders == 1 for seq in sampling if seq.request.in_lockstep)
        self.launched.append(self.device.launch(output))
        rows = [self.device.rows[scheduled.row] for scheduled in output.scheduled_rows]
        self.written.append({block_id for row in rows for block_id in row.table})
        self.slots.append(set(self.device.written))
        again = {slot // self.config.block_size for slot in self.device.written}
        for seq, block in readable:
            kept = block in seq.blocks and block.block_hash is not None
            assert not (kept and block.block_id in again), "what others may read is written"
        return True

    def check_who_was_preempted(self, ran: list[Sequence]) -> None:
        """Never the first in order, and nobody while one that is less urgent goes on."""
        preempted = [seq for seq in ran if seq.status is RequestStatus.WAITING]
        assert not preempted or ran[0].status is RequestStatus.RUNNING
        for seq in preempted:
            urgency = self.order(seq)[0]
            assert all(self.order(other)[0] <= urgency for other in self.scheduler.running)

    def count_overtaken(self, waited: list[Sequence]) -> None:
        admitted = [seq for seq in waited if seq.status is RequestStatus.RUNNING]
        for seq in waited:
            if seq.status is not RequestStatus.WAITING:
                del self.overtaken[seq]
                continue
            self.overtaken[seq] += sum(self.order(seq) < self.order(other) for other in admitted)
            assert self.overtaken[seq] <= MAX_OVERTAKEN + self.config.max_num_seqs, "starves"

    def note_meanings(self) -> None:
        """What each hash stands for; two prefixes must never have the same."""
        size = self.config.block_size
        for request in self.requests:
            for seq in request.sequences:
                if request.beams is not None and seq.status is RequestStatus.FINISHED:
                    continue  # its tokens are those of the best end now
                for number, key in enumerate(seq.block_hashes, start=1):
                    meaning = (request.cache_salt, tuple(seq.token_ids[: number * size]))
                    assert self.meanings.setdefault(key, meaning) == meaning, "equal hashes"

    def fail_a_row(self, number: int) -> None:
        """The oldest step's results become those of a device whose row gave NaN."""
        result = self.launched[0]
        sampled = self.scheduler._in_flight[0].sampled + self.scheduler._in_flight[0].forked
        if not sampled:
            return
        place = number % len(sampled)
        seq = sampled[place]
        if seq.status is not RequestStatus.FINISHED:
            self.lost.add(seq.request)
            for block in seq.blocks:
                if block.ref_count == 1:
                    self.spoil(block.block_id)
            for block in self.scheduler.pool.blocks:  # those it has lost to a preemption
                if block.ref_count == 0 and block.block_hash in seq.block_hashes:
                    self.spoil(block.block_id)
        rows = list(result.sampled)
        rows[place] = replace(rows[place], failed=True)
        self.launched[0] = replace(result, sampled=rows)

    def spoil(self, block_id: int) -> None:
        size = self.config.block_size
        for slot in range(block_id * size, block_id * size + size):
            self.device.kv[slot] = None

    def settle(self, stop: bool = False) -> None:
        self.written.popleft()
        self.slots.popleft()
        updates = self.scheduler.update(self.launched.popleft())
        self.note_meanings()
        for update in updates:
            seq = update.sequence
            number = int(seq.request.request_id)
            self.emitted.setdefault((number, seq.index), []).extend(update.token_ids)
            if stop and seq.status is not RequestStatus.FINISHED:
                self.scheduler.finish(seq, FinishReason.STOP, "a stop string")

    @rule(stop=st.booleans(), fail=st.sampled_from([None, *[None] * 6, 0, 1]))
    def step(self, stop: bool, fail: int | None) -> None:
        progressed = self.launch()
        if self.launched and (len(self.launched) > self.depth or not progressed):
            if fail is not None:
                self.fail_a_row(fail)
            self.settle(stop)
            progressed = True
        waiting = bool(self.scheduler.waiting or self.scheduler.running)
        assert progressed or not waiting, "there is work and room, and nothing is scheduled"

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.scheduler.abort(data.draw(st.sampled_from(self.requests)))

    @rule()
    def reset_cache(self) -> None:
        self.scheduler.pool.reset_prefix_cache()

    @precondition(lambda self: self.launched)
    @rule()
    def lose_steps(self) -> None:
        """The device loses all that it was given and had not answered."""
        for slot in set().union(*self.slots):
            self.device.kv[slot] = None
        touched = {
            seq.request
            for step in self.scheduler._in_flight
            for seq in step.scheduled + step.forked
            if not seq.request.finished
        }
        ended = self.scheduler.fail_in_flight()
        assert touched <= set(ended)
        assert all(request.finished for request in ended)
        self.lost |= touched
        self.launched.clear()
        self.written.clear()
        self.slots.clear()

    @invariant()
    def accounts_are_exact(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        assert self.scheduler.check_integrity() == []
        for seq in [*self.scheduler.running, *self.scheduler.waiting]:
            wanted = -(-seq.num_computed_tokens // self.config.block_size)
            assert len(seq.blocks) == wanted
            if seq.request.beams is not None and seq.num_output_tokens:
                for beam in seq.request.sequences:
                    assert beam.num_placeholders == seq.num_placeholders, "not together"
        assert len(self.scheduler.running) <= self.config.max_num_seqs

    @invariant()
    def every_sequence_is_in_one_queue_at_its_place(self) -> None:
        SchedulerMachine.totals["operations"] += 1
        if not hasattr(self, "scheduler"):
            return
        waiting, running = self.scheduler.waiting, self.scheduler.running
        assert len({*waiting, *running}) == len(waiting) + len(running)
        assert all(seq.status is RequestStatus.WAITING for seq in waiting)
        assert all(seq.status is RequestStatus.RUNNING for seq in running)
        assert waiting == sorted(waiting, key=self.order)
        assert running == sorted(running, key=self.order)
        for request in self.requests:
            for seq in request.sequences:
                if seq.status is RequestStatus.FINISHED:
                    assert seq.row is None and seq.blocks == []
                elif seq.status is RequestStatus.RUNNING:
                    assert seq in running and seq.row is not None
                    assert request.params.reads_prefix_cache or seq.num_cached_tokens == 0
                elif seq.index == 0 or (seq.first_scheduled and request.beams is None):
                    assert seq in waiting

    @invariant()
    def what_is_cached_is_what_its_hash_says(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        size = self.config.block_size
        self.note_meanings()
        for block in self.scheduler.pool.blocks:
            if block.block_hash is None:
                continue
            prefix = list(self.meanings[block.block_hash][1])
            for offset in range(size):
                length = len(prefix) - size + offset + 1
                stored = self.device.kv[block.block_id * size + offset]
                assert stored == digest(prefix[:length]), "other KV is cached than the hash says"

    @invariant()
    def blocks_of_steps_in_flight_are_not_free(self) -> None:
        for block_ids in getattr(self, "written", ()):
            for block_id in block_ids:
                assert not self.scheduler.pool.blocks[block_id].on_free_list

    @invariant()
    def blocks_are_shared_within_a_salt_only(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        salts: dict[int, str] = {}
        for seq in self.scheduler.running:
            for block in seq.blocks:
                salt = salts.setdefault(block.block_id, seq.request.cache_salt)
                assert salt == seq.request.cache_salt

    @invariant()
    def tokens_are_those_of_the_sequence_alone(self) -> None:
        for (number, index), ids in getattr(self, "emitted", {}).items():
            request = self.requests[number]
            if request.beams is not None:
                if request.sequences[index].finish_reason is not FinishReason.ERROR:
                    assert ids == self.expected_beams(request)[index]
                continue
            alone = solo_ids(request.prompt_token_ids, request.seed, index, len(ids), VOCAB)
            assert ids == alone

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            self.step(stop=False, fail=None)
        assert not self.scheduler.has_work, "a request never ends"
        for request in self.requests:
            for seq in request.sequences:
                assert seq.status is RequestStatus.FINISHED
                assert seq.row is None
                assert seq.blocks == []
                if seq.finish_reason is FinishReason.ERROR and request in self.lost:
                    continue
                if request.beams is not None:
                    if seq.finish_reason is FinishReason.ERROR:  # there are not n different ends
                        assert seq.stop_reason == NOTHING_ALLOWED
                        assert len(self.expected_beams(request)) < request.params.n
                    elif seq.finish_reason is not FinishReason.ABORT:
                        told = (int(request.request_id), seq.index) in self.emitted
                        assert told == (seq.index < request.params.n)
                elif seq.finish_reason is FinishReason.LENGTH:
                    ids = self.emitted[int(request.request_id), seq.index]
                    assert len(ids) == request.max_tokens
        assert self.scheduler.check_integrity() == []
        assert self.scheduler.pool.num_held == 0
        assert self.scheduler.pool.num_fenced == 0
        assert self.scheduler.pool.num_free == self.config.num_blocks - 1
        assert self.scheduler.num_in_flight == 0
        assert not self.scheduler._pending_forks
        assert sorted(self.scheduler._free_rows) == list(range(self.config.max_num_seqs))
        self.count_totals()

    def count_totals(self) -> None:
        stats = self.scheduler.stats
        SchedulerMachine.totals.update(
            machines=1,
            requests=len(self.requests),
            searches=sum(request.beams is not None for request in self.requests),
            steps=self.scheduler._next_step - 1,
            preemptions=stats.num_preemptions,
            prefix_hits=stats.prefix_hits,
            lost_requests=len(self.lost),
        )


def run_machine(
    depth: int, *, max_examples: int = 60, seed: int | None = None, shrink: bool = True
) -> None:
    """Random operations with ``depth`` steps ahead; always the same ones without a ``seed``."""
    machine = type(f"Depth{depth}Machine", (SchedulerMachine,), {"depth": depth})
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    chosen = settings(
        max_examples=max_examples,
        stateful_step_count=60,
        deadline=None,
        phases=phases,
        derandomize=seed is None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    if seed is not None:
        machine = hypothesis.seed(seed)(machine)
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_random_operations(depth: int) -> None:
    run_machine(depth)
