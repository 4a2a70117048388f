"""The shipped scheduler and pool under random operations, against sequences that run alone.

Small on purpose: three tokens of vocabulary and a dozen blocks make sharing, eviction, preemption and
full pools happen within a few steps.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.core.beam_reference import beam_search
from tests.core.fake_device import FakeDevice, candidates, solo_ids
from trident_llm.core.block_pool import most_blocks_of_beams
from trident_llm.core.config import SchedulerConfig
from trident_llm.core.messages import StepResult
from trident_llm.core.request import FinishReason, Request, RequestStatus
from trident_llm.core.sampling_params import SamplingParams
from trident_llm.core.scheduler import NOTHING_ALLOWED, Scheduler

VOCAB = 3
EOS = 2


class SchedulerMachine(RuleBasedStateMachine):
    depth = 0

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

    def launch(self) -> bool:
        output = self.scheduler.schedule()
        if output is None:
            return False
        sampling = [seq for seq in self.scheduler.running if seq.num_placeholders]
        assert all(seq.num_placeholders == 1 for seq in sampling if seq.request.in_lockstep)
        self.launched.append(self.device.launch(output))
        rows = [self.device.rows[scheduled.row] for scheduled in output.scheduled_rows]
        self.written.append({block_id for row in rows for block_id in row.table})
        return True

    def settle(self, stop: bool = False) -> None:
        self.written.popleft()
        for update in self.scheduler.update(self.launched.popleft()):
            seq = update.sequence
            number = int(seq.request.request_id)
            self.emitted.setdefault((number, seq.index), []).extend(update.token_ids)
            if stop and seq.status is not RequestStatus.FINISHED:
                self.scheduler.finish(seq, FinishReason.STOP, "a stop string")

    @rule(stop=st.booleans())
    def step(self, stop: bool) -> None:
        progressed = self.launch()
        if self.launched and (len(self.launched) > self.depth or not progressed):
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
            self.step(stop=False)
        assert not self.scheduler.has_work, "a request never ends"
        for request in self.requests:
            for seq in request.sequences:
                assert seq.status is RequestStatus.FINISHED
                assert seq.row is None
                assert seq.blocks == []
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


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_random_operations(depth: int) -> None:
    machine = type(f"Depth{depth}Machine", (SchedulerMachine,), {"depth": depth})
    case = machine.TestCase()
    case.settings = settings(
        max_examples=60,
        stateful_step_count=60,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    case.runTest()
