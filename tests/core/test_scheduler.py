from __future__ import annotations

from typing import Any

import pytest

from tests.core.beam_reference import beam_search
from tests.core.fake_device import FakeDevice, candidates, solo_ids
from trident_llm.core.config import SchedulerConfig
from trident_llm.core.messages import SampledRow, SchedulerOutput, StepResult
from trident_llm.core.request import FinishReason, Request, RequestStatus
from trident_llm.core.sampling_params import SamplingParams
from trident_llm.core.scheduler import MAX_OVERTAKEN, Scheduler


def make(**changes: Any) -> Scheduler:
    values: dict[str, Any] = {
        "num_blocks": 33,
        "block_size": 4,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "max_waiting": 100,
    }
    return Scheduler(SchedulerConfig(**{**values, **changes}))


def request(name: str, prompt: list[int], **params: Any) -> Request:
    values: dict[str, Any] = {"max_tokens": 4, "seed": 0, "ignore_eos": True, **params}
    salt = values.pop("salt", "")
    return Request(name, prompt, SamplingParams(**values), cache_salt=salt)


def answer(scheduler: Scheduler, output: SchedulerOutput, token: int = 7) -> None:
    rows = [SampledRow([token]) for _ in output.sampled_rows]
    scheduler.update(StepResult(output.step, rows))


def tokens_by_row(output: SchedulerOutput) -> dict[int, int]:
    return {scheduled.row: scheduled.num_tokens for scheduled in output.scheduled_rows}


def run(scheduler: Scheduler, device: FakeDevice) -> list[SchedulerOutput]:
    outputs = []
    while scheduler.has_work:
        output = scheduler.schedule()
        assert output is not None
        outputs.append(output)
        scheduler.update(device.launch(output))
    return outputs


def test_a_decode_token_and_a_prefill_chunk_share_a_step() -> None:
    scheduler = make()
    scheduler.add(request("a", [1, 2, 3]))
    output = scheduler.schedule()
    assert output is not None
    answer(scheduler, output)
    scheduler.add(request("b", list(range(40))))
    output = scheduler.schedule()
    assert output is not None
    assert sorted(tokens_by_row(output).values()) == [1, 15]


def test_decodes_come_first_and_a_long_prompt_leaves_a_share_to_others() -> None:
    scheduler = make()
    scheduler.add(request("long", list(range(100))))
    scheduler.add(request("short", [9, 8, 7]))
    output = scheduler.schedule()
    assert output is not None
    assert list(tokens_by_row(output).values()) == [8, 3]
    answer(scheduler, output)
    output = scheduler.schedule()
    assert output is not None
    # The short one decodes already: its token is set aside before the long one's next chunk.
    assert list(tokens_by_row(output).values()) == [15, 1]


def test_cached_tokens_are_not_computed_again() -> None:
    scheduler = make()
    device = FakeDevice(scheduler.config)
    prompt = [1, 2, 0, 1] * 4
    scheduler.add(request("a", prompt))
    run(scheduler, device)
    computed = device.computed_tokens
    again = request("b", [*prompt, 2])
    scheduler.add(again)
    run(scheduler, device)
    assert again.sequences[0].num_cached_tokens == 16
    assert device.computed_tokens - computed == 1 + 3  # the new token, and 3 fed back


def test_a_whole_prompt_in_the_cache_leaves_one_block_to_compute() -> None:
    scheduler = make()
    device = FakeDevice(scheduler.config)
    for name in ("a", "b"):
        last = request(name, [1, 2, 0, 1] * 2)
        scheduler.add(last)
        run(scheduler, device)
    assert last.sequences[0].num_cached_tokens == 4


def test_equal_prompts_of_one_step_share_blocks_while_they_are_written() -> None:
    scheduler = make(max_num_batched_tokens=64)
    device = FakeDevice(scheduler.config)
    prompt = [1, 2, 0, 1] * 4
    requests = [request(str(i), [*prompt, i % 3]) for i in range(3)]
    for item in requests:
        scheduler.add(item)
    output = scheduler.schedule()
    assert output is not None
    assert list(tokens_by_row(output).values()) == [17, 1, 1]
    scheduler.update(device.launch(output))


def test_a_salt_keeps_prefixes_apart() -> None:
    scheduler = make()
    device = FakeDevice(scheduler.config)
    for salt, hit in (("", 0), ("x", 0), ("x", 8)):
        item = request(f"{salt}{hit}", [1, 2, 0, 1] * 2 + [1], salt=salt)
        scheduler.add(item)
        run(scheduler, device)
        assert item.sequences[0].num_cached_tokens == hit


def test_n_computes_the_prompt_once_and_holds_its_full_blocks_once() -> None:
    scheduler = make(max_num_batched_tokens=64)
    device = FakeDevice(scheduler.config)
    prompt = [1, 2, 0] * 6  # 18 tokens: 4 full blocks and a partial one
    item = request("a", prompt, n=6, seed=5, max_tokens=3)
    scheduler.add(item)
    output = scheduler.schedule()
    assert output is not None
    assert output.num_tokens == 18
    assert len(output.forks) == 5
    assert scheduler.pool.num_held == 5
    scheduler.update(device.launch(output))
    output = scheduler.schedule()
    assert output is not None
    assert len(output.block_copies) == 5  # the last owner writes in place
    assert scheduler.pool.num_held == 4 + 6
    scheduler.update(device.launch(output))
    run(scheduler, device)
    for seq in item.sequences:
        assert seq.token_ids[18:] == solo_ids(prompt, 5, seq.index, 3, device.vocab)
    assert scheduler.pool.num_held == 0


def test_blocks_run_out_and_every_sequence_still_gets_its_own_tokens() -> None:
    scheduler = make(num_blocks=8, max_model_len=28)
    device = FakeDevice(scheduler.config)
    requests = [request(str(i), [i % 3, 1, 2], max_tokens=20, seed=i) for i in range(4)]
    for item in requests:
        scheduler.add(item)
    run(scheduler, device)
    assert scheduler.stats.num_preemptions > 0
    assert scheduler.stats.recomputed_tokens > 0
    for i, item in enumerate(requests):
        ids = item.sequences[0].token_ids[3:]
        assert ids == solo_ids(item.prompt_token_ids, i, 0, 20, device.vocab)


def test_one_that_does_not_fit_is_overtaken_a_bounded_number_of_times() -> None:
    scheduler = make(num_blocks=17, max_model_len=64, enable_prefix_caching=False)
    scheduler.add(request("holder", [1] * 32, max_tokens=30))
    for _ in range(2):
        output = scheduler.schedule()
        assert output is not None
        answer(scheduler, output)
    big = request("big", [1] * 40, max_tokens=1)
    scheduler.add(big)
    overtaking = 0
    while big.sequences[0].status is RequestStatus.WAITING:
        scheduler.add(request(f"small {output.step}", [1], max_tokens=1))
        output = scheduler.schedule()
        assert output is not None
        if big.sequences[0].status is RequestStatus.WAITING:
            overtaking += len(output.new_rows)
        answer(scheduler, output)
    assert overtaking == MAX_OVERTAKEN


def test_ends_and_their_reasons() -> None:
    config = {"eos_token_ids": frozenset({2})}
    for params, token, reason, stop in (
        ({"ignore_eos": False}, 2, FinishReason.STOP, None),
        ({"ignore_eos": True, "max_tokens": 1}, 2, FinishReason.LENGTH, None),
        ({"stop_token_ids": (5,)}, 5, FinishReason.STOP, 5),
        ({"max_tokens": 1}, 3, FinishReason.LENGTH, None),
    ):
        scheduler = make(**config)
        item = request("a", [1], **params)
        scheduler.add(item)
        output = scheduler.schedule()
        assert output is not None
        answer(scheduler, output, token)
        seq = item.sequences[0]
        assert (seq.finish_reason, seq.stop_reason) == (reason, stop)
        assert scheduler.pool.num_held == 0


def test_an_end_token_before_min_tokens_does_not_end() -> None:
    scheduler = make(eos_token_ids=frozenset({2}))
    item = request("a", [1], ignore_eos=False, min_tokens=2, max_tokens=8)
    scheduler.add(item)
    for expected in (None, FinishReason.STOP):
        output = scheduler.schedule()
        assert output is not None
        answer(scheduler, output, 2)
        assert item.sequences[0].finish_reason is expected


def test_a_row_that_failed_ends_and_leaves_nothing_cached() -> None:
    scheduler = make()
    item = request("a", [1, 2, 0, 1] * 2 + [1])
    scheduler.add(item)
    output = scheduler.schedule()
    assert output is not None
    assert scheduler.pool.num_cached == 2
    scheduler.update(StepResult(output.step, [SampledRow([0], failed=True)]))
    assert item.sequences[0].finish_reason is FinishReason.ERROR
    assert scheduler.pool.num_cached == 0
    assert scheduler.pool.num_held == 0


def test_a_lost_step_ends_its_requests_and_forgets_its_blocks() -> None:
    scheduler = make()
    item = request("a", [1, 2, 0, 1] * 2 + [1])
    scheduler.add(item)
    scheduler.add(request("later", [5] * 40))
    scheduler.schedule()
    lost = scheduler.fail_in_flight()
    assert item in lost
    assert scheduler.pool.num_cached == 0
    assert scheduler.pool.num_held == 0
    assert scheduler.check_integrity() == []


def test_abort_in_every_state() -> None:
    scheduler = make(max_num_seqs=2)
    queued = request("queued", [1] * 4)
    chunked = request("chunked", [1] * 60)
    parent = request("parent", [2] * 6, n=2)
    for item in (chunked, parent, queued):
        scheduler.add(item)
    output = scheduler.schedule()
    assert output is not None
    for item in (queued, chunked, parent, chunked):
        scheduler.abort(item)
    answer(scheduler, output)
    assert all(item.finished for item in (queued, chunked, parent))
    assert not scheduler.has_work
    assert scheduler.check_integrity() == []
    assert scheduler.pool.num_held == 0


def test_priority_goes_before_arrival() -> None:
    scheduler = make(scheduling_policy="priority", max_num_seqs=1)
    low, high = request("low", [1], priority=5), request("high", [2], priority=-1)
    scheduler.add(low)
    scheduler.add(high)
    assert scheduler.schedule() is not None
    assert high.sequences[0].status is RequestStatus.RUNNING
    assert low.sequences[0].status is RequestStatus.WAITING


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
@pytest.mark.parametrize("num_prompt", range(9, 13))
def test_the_first_in_order_is_never_preempted(policy: str, num_prompt: int) -> None:
    # While its long prompt is computed bit by bit, the other one's output takes the last blocks.
    scheduler = make(
        scheduling_policy=policy, num_blocks=6, max_model_len=20, long_prefill_token_threshold=1
    )
    first = request("first", [1] * num_prompt, priority=0, max_tokens=4)
    second = request("second", [2], priority=1, max_tokens=12)
    device = FakeDevice(scheduler.config)
    if policy == "priority":
        scheduler.add(second)
        output = scheduler.schedule()
        assert output is not None
        scheduler.update(device.launch(output))
        scheduler.add(first)
    else:
        scheduler.add(first)
        scheduler.add(second)
    run(scheduler, device)
    assert scheduler.stats.num_preemptions > 0
    assert first.sequences[0].num_preemptions == 0
    assert [item.sequences[0].finish_reason for item in (first, second)] == [
        FinishReason.LENGTH
    ] * 2


def test_blocks_that_an_urgent_one_waits_for_are_not_taken_by_others() -> None:
    scheduler = make(
        scheduling_policy="priority",
        num_blocks=12,
        max_model_len=40,
        long_prefill_token_threshold=8,
    )
    device = FakeDevice(scheduler.config)
    lax = [request(str(n), [n] * n, priority=1, max_tokens=9) for n in (2, 1)]
    gone = request("gone", [0], priority=1, max_tokens=9)
    urgent = request("urgent", [0] * 32, priority=0)
    for items in ([*lax, gone], [urgent], []):
        for item in items:
            scheduler.add(item)
        output = scheduler.schedule()
        assert output is not None
        scheduler.update(device.launch(output))
    launched = scheduler.schedule()
    assert launched is not None
    scheduler.abort(gone)  # its block comes back when the step has completed
    assert (scheduler.pool.num_free, scheduler.pool.num_fenced) == (1, 1)
    output = scheduler.schedule()  # the urgent one wants two blocks, one of the others the free one
    assert output is not None
    assert list(tokens_by_row(output).values()) == [1]
    scheduler.update(device.launch(launched))
    scheduler.update(device.launch(output))
    output = scheduler.schedule()
    assert output is not None
    assert next(iter(tokens_by_row(output).values())) == 8


def test_the_least_urgent_is_preempted_even_if_it_costs_more() -> None:
    scheduler = make(scheduling_policy="priority", num_blocks=9, max_model_len=32)
    device = FakeDevice(scheduler.config)
    items = [
        request("urgent", [0] * 8, priority=0, max_tokens=20),
        request("usual", [1] * 4, priority=1, max_tokens=8),
        request("lax", [2] * 8, priority=2, max_tokens=8),
    ]
    for item in items:
        scheduler.add(item)
    run(scheduler, device)
    assert [item.sequences[0].num_preemptions > 0 for item in items] == [False, False, True]


def test_of_equals_the_one_that_costs_least_to_redo_is_preempted() -> None:
    scheduler = make(num_blocks=10, max_model_len=36)
    device = FakeDevice(scheduler.config)
    items = [
        request(name, [number] * length, max_tokens=16)
        for number, (name, length) in enumerate([("first", 8), ("short", 4), ("long", 12)])
    ]
    for item in items:
        scheduler.add(item)
    while not scheduler.stats.num_preemptions:
        output = scheduler.schedule()
        assert output is not None
        scheduler.update(device.launch(output))
    assert [item.sequences[0].num_preemptions for item in items] == [0, 1, 0]
    run(scheduler, device)


def test_a_prompt_with_nothing_to_generate_ends_when_it_is_computed() -> None:
    scheduler = make(max_model_len=40)
    device = FakeDevice(scheduler.config)
    item = request("a", [1, 2, 0, 1] * 10, max_tokens=0)
    neighbour = request("b", [1] * 4)
    scheduler.add(item)
    scheduler.add(neighbour)
    updates = []
    while not item.finished:
        output = scheduler.schedule()
        assert output is not None
        updates += scheduler.update(device.launch(output))
    mine = [update for update in updates if update.sequence.request is item]
    assert [update.token_ids for update in mine] == [[]]
    assert item.sequences[0].finish_reason is FinishReason.LENGTH
    assert scheduler.stats.prompt_tokens_scheduled == 44
    run(scheduler, device)
    assert len(neighbour.sequences[0].token_ids) == 8
    assert scheduler.pool.num_held == 0


def test_a_sequence_that_forked_in_this_step_is_not_preempted_in_it() -> None:
    scheduler = make(
        num_blocks=9, long_prefill_token_threshold=3, enable_prefix_caching=False, max_model_len=32
    )
    device = FakeDevice(scheduler.config)
    parent = request("parent", [1] * 13, n=2)
    for item in (parent, request("b", [2] * 5), request("c", [0] * 7)):
        scheduler.add(item)
    while scheduler.has_work:
        output = scheduler.schedule()
        assert output is not None
        assert not {fork.child_row for fork in output.forks} & set(output.finished_rows)
        scheduler.update(device.launch(output))
    assert scheduler.stats.num_preemptions > 0


def beam_request(name: str, prompt: list[int], width: int, **params: Any) -> Request:
    return request(name, prompt, use_beam_search=True, beam_width=width, **params)


def test_beams_share_the_prompt_and_copy_what_they_write() -> None:
    scheduler = make(max_num_batched_tokens=64)
    device = FakeDevice(scheduler.config, vocab=6)
    item = beam_request("a", [1, 2, 0] * 6, 4, max_tokens=12, n=4)  # 4 full blocks, a partial one
    scheduler.add(item)
    output = scheduler.schedule()
    assert output is not None
    assert (output.num_tokens, len(output.forks), scheduler.pool.num_held) == (18, 3, 5)
    scheduler.update(device.launch(output))
    output = scheduler.schedule()
    assert output is not None
    assert len(output.continuations) == 4
    assert len(output.block_copies) == 3  # the last owner writes in place
    assert scheduler.pool.num_held == 4 + 4
    scheduler.update(device.launch(output))
    run(scheduler, device)
    assert scheduler.stats.prompt_tokens_scheduled == 18
    expected = beam_search(
        item.prompt_token_ids, lambda ids: candidates(ids, 6), width=4, max_tokens=12,
        ends=frozenset(), length_penalty=1.0, early_stopping=False,
    )  # fmt: skip
    assert [seq.token_ids[18:] for seq in item.sequences] == [ids for ids, _ in expected]


def test_a_request_may_ask_that_the_cache_is_not_read() -> None:
    scheduler = make()
    device = FakeDevice(scheduler.config)
    prompt = [1] * 12
    scheduler.add(request("first", prompt))
    run(scheduler, device)
    for asks, hits in (
        ({"skip_reading_prefix_cache": True}, 0),
        ({"prompt_logprobs": 0}, 0),
        ({}, 8),
    ):
        item = request("later", prompt, **asks)
        scheduler.add(item)
        run(scheduler, device)
        assert item.sequences[0].num_cached_tokens == hits


def test_a_resumed_sequence_is_protected_until_it_gains_a_block() -> None:
    """What it computes again, also in chunks, is no gain."""
    scheduler = make(num_blocks=13, max_model_len=48, max_num_batched_tokens=12)
    device = FakeDevice(scheduler.config)
    for name in "abc":
        scheduler.add(request(name, [ord(name)] * 12, max_tokens=30))
    known: dict[str, int] = {}
    checked = 0
    while scheduler.has_work:
        for seq in scheduler.waiting:
            known[seq.request.request_id] = len(seq.token_ids)
        output = scheduler.schedule()
        assert output is not None
        for seq in scheduler.running:
            if seq.num_preemptions:
                gained = len(seq.blocks) > -(-known[seq.request.request_id] // 4)
                assert seq.protected is not gained
                checked += 1
        scheduler.update(device.launch(output))
    assert checked > 10


def test_beams_wait_for_their_last_tokens_while_others_go_on() -> None:
    scheduler = make(max_num_batched_tokens=64)
    item, other = beam_request("a", [1] * 4, 2), request("b", [2] * 4)
    scheduler.add(item)
    scheduler.add(other)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert first is not None and second is not None
    assert [row.num_tokens for row in second.scheduled_rows] == [1]
    scheduler.abort(other)
    assert scheduler.schedule() is None


def test_a_search_is_preempted_whole_and_comes_back_whole() -> None:
    scheduler = make(num_blocks=15, max_model_len=56, max_num_batched_tokens=64)
    device = FakeDevice(scheduler.config)
    first = request("first", [1] * 16, max_tokens=24)
    item = beam_request("beams", [2] * 8, 3, max_tokens=12)
    scheduler.add(first)
    scheduler.add(item)
    seen = set()
    while scheduler.has_work:
        output = scheduler.schedule()
        assert output is not None
        rows = sum(seq.row is not None for seq in item.sequences)
        seen.add(rows)
        assert rows in (0, 3)
        assert len({seq.status for seq in item.sequences if seq.blocks}) <= 1
        scheduler.update(device.launch(output))
    assert scheduler.stats.num_preemptions > 0
    assert seen == {0, 3}
    expected = beam_search(
        [2] * 8, lambda ids: candidates(ids, 3), width=3, max_tokens=12, ends=frozenset(),
        length_penalty=1.0, early_stopping=False,
    )  # fmt: skip
    assert item.sequences[0].token_ids[8:] == expected[0][0]
