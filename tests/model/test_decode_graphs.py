"""Recorded decode steps: padding, bounds and reuse. A recorder without a GPU runs the step again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import Harness, make_engine
from tests.engine.test_engine import VOCAB, prompts
from trident_llm.core.messages import NewRow, ScheduledRow, SchedulerOutput
from trident_llm.core.sampling_params import SamplingParams
from trident_llm.model.decode_graphs import Recorder, Run, graph_sizes
from trident_llm.model.runner import ModelRunner


def rerunning(replays: list[int]) -> Recorder:
    """As a graph: the result lies in one place, and is old until the replay."""

    def record(run: Run) -> Run:
        result = run().clone()

        def replay() -> torch.Tensor:
            replays.append(len(result))
            result.copy_(run())
            return result

        result.fill_(torch.nan)
        return replay

    return record


def runner_of(folder: Path, **settings: Any) -> ModelRunner:
    runner: ModelRunner = make_engine(folder, **settings)._executor.runner  # type: ignore[attr-defined]
    return runner


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 64, "max_num_seqs": 16},
        {"num_blocks": 20, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 8},
    ],
    ids=["roomy", "preempting"],
)
def test_ids_are_those_of_steps_run_one_by_one(
    tiny_model: Path, settings: dict[str, Any], depth: int
) -> None:
    replays: list[int] = []
    rng = random.Random(1)
    params = [
        {"temperature": rng.choice([0.0, 0.8]), "seed": i, "max_tokens": rng.randint(1, 20)}
        for i in range(12)
    ]
    ids = []
    for sizes in ([], [3, 8]):
        engine = make_engine(tiny_model, launch_depth=depth, **settings)
        engine._executor.runner.record_graphs(sizes, rerunning(replays))  # type: ignore[attr-defined]
        harness = Harness(engine)
        names = [
            harness.add(prompt, **values) for prompt, values in zip(prompts(12, longest=30), params)
        ]
        names.append(harness.add([3, 4, 5], n=3, temperature=1.0, seed=5, logprobs=2))
        harness.run()
        ids.append([harness.outcomes[name, 0].token_ids for name in names])
        ids[-1] += [harness.outcomes[names[-1], index].token_ids for index in (1, 2)]
        if settings["num_blocks"] == 20:
            assert harness.engine.scheduler.stats.num_preemptions > 0
    assert ids[0] == ids[1]
    assert set(replays) == {3, 8}


def test_a_padded_step_writes_block_0_and_its_own_slots(tiny_model: Path) -> None:
    runner = runner_of(tiny_model, num_blocks=16, block_size=4, max_num_seqs=8)
    replays: list[int] = []
    runner.record_graphs([4, 8], rerunning(replays))
    params = SamplingParams(temperature=0.0)
    # Five rows decode in a graph of eight, then two of them in a graph of four.
    new = [NewRow(row, [3, 4, 5], 3, 0, params, 0, 0) for row in range(5)]
    first = [ScheduledRow(row, 3, 0, [1 + row], True) for row in range(5)]
    runner.launch(SchedulerOutput(1, new_rows=new, scheduled_rows=first))
    pool = runner.kv_cache.data
    for step, rows, offset in ((2, [0, 1, 2, 3, 4], 3), (3, [0, 1], 0)):
        before = pool.clone()
        scheduled = [ScheduledRow(row, 1, 1, [] if offset else [7 + row], True) for row in rows]
        runner.launch(SchedulerOutput(step, scheduled_rows=scheduled))
        # [layers, k and v, blocks, heads, cells, D] -> [blocks, cells]
        changed = (pool != before).any(-1).any(3).any(1).any(0).nonzero().tolist()
        own = [[(1 if offset else 7) + row, offset] for row in rows]
        assert [cell for cell in changed if cell[0] != 0] == own
        assert all(cell == [0, 0] for cell in changed if cell[0] == 0)
    assert replays == [8, 4]


def test_warming_up_writes_block_0_alone(tiny_model: Path) -> None:
    runner = runner_of(tiny_model, num_blocks=16, block_size=4, max_num_seqs=8)
    runner.kv_cache.data.fill_(77.0)
    runner.warm_up(32)
    assert (runner.kv_cache.data[:, :, 1:] == 77.0).all()
    assert (runner.kv_cache.data[:, :, 0] != 77.0).any()


def test_steps_that_are_no_decode_are_not_replayed(tiny_model: Path) -> None:
    replays: list[int] = []
    engine = make_engine(tiny_model, num_blocks=64, max_num_seqs=4)
    engine._executor.runner.record_graphs([2], rerunning(replays))  # type: ignore[attr-defined]
    harness = Harness(engine)
    rng = random.Random(0)
    for _ in range(4):  # prompts, then four rows: more than any recorded size
        harness.add([rng.randrange(3, VOCAB) for _ in range(6)], max_tokens=3)
    for _ in range(2):
        harness.step()
    assert replays == []
    harness.run()
    harness.add([5, 6, 7], max_tokens=3, prompt_logprobs=1)
    harness.run()
    assert set(replays) == {2}


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_sizes_reach_up_to_the_most_sequences(most: int, sizes: list[int]) -> None:
    assert graph_sizes(most) == sizes
    assert max(graph_sizes(1000)) == 256
