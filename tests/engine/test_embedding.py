"""The engine that embeds: order, budgets, ends and faults, with a model that is only numbers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trident_llm.core.embedding import EmbeddingRequest, PoolingParams
from trident_llm.core.errors import ErrorCode, RequestError
from trident_llm.engine.embedding import EmbeddingEngine
from trident_llm.engine.faults import EngineDeadError
from trident_llm.engine.loop import EngineLoop
from trident_llm.engine.output import RequestOutput

FAILS, NOT_FINITE = 666, 777  # first tokens of texts that the model cannot compute


class Numbers:
    """A text's vector is (its length, its first token, 0, 2); keeps what each step held."""

    normalizes = False

    def __init__(self) -> None:
        self.steps: list[list[int]] = []  # lengths

    def embed(self, texts: Sequence[Sequence[int]]) -> Any:
        self.steps.append([len(text) for text in texts])
        if any(text[0] == FAILS for text in texts):
            raise RuntimeError("the device is gone")
        rows = [[np.nan if text[0] == NOT_FINITE else len(text), text[0], 0, 2] for text in texts]
        return np.array(rows, np.float32)


def make(model: Numbers, max_num_seqs: int = 4, budget: int = 20) -> EmbeddingEngine:
    return EmbeddingEngine(model, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)


def add(engine: EmbeddingEngine, name: str, length: int, first: int = 1, **params: Any) -> None:
    ids = [first] + [0] * (length - 1)
    engine.add(EmbeddingRequest(name, ids, PoolingParams(**params)))


def run(engine: EmbeddingEngine) -> list[RequestOutput]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


@given(
    lengths=st.lists(st.integers(1, 30), max_size=30),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 40),
)
def test_first_come_first_served_within_the_budget(
    lengths: list[int], max_num_seqs: int, budget: int
) -> None:
    model = Numbers()
    engine = make(model, max_num_seqs, budget)
    for index, length in enumerate(lengths):
        add(engine, str(index), length, first=index)
    outputs = run(engine)
    assert [output.request_id for output in outputs] == [str(i) for i in range(len(lengths))]
    assert [length for step in model.steps for length in step] == lengths
    for step, after in zip(model.steps, [*model.steps[1:], None]):
        assert len(step) == 1 or (sum(step) <= budget and len(step) <= max_num_seqs)
        if after:  # it was full
            assert len(step) == max_num_seqs or sum(step) + after[0] > budget
    for index, output in enumerate(outputs):
        assert output.embedding is not None
        assert output.embedding.tolist() == [lengths[index], index, 0, 2]
        assert (output.num_prompt_tokens, output.finished) == (lengths[index], True)
        assert output.times.arrival <= output.times.first_scheduled <= output.times.finished


def test_vectors_are_cut_and_normalised() -> None:
    model = Numbers()
    engine = make(model)
    add(engine, "as it is", 3, first=4)
    add(engine, "cut", 3, first=4, dimensions=2)
    add(engine, "normalised", 3, first=4, dimensions=2, normalize=True)
    model.normalizes = True
    vectors = {output.request_id: output.embedding for output in run(engine)}
    model.normalizes = False
    add(engine, "plain", 3, first=4, dimensions=3)
    add(engine, "zero", 3, normalize=True)
    model.embed = lambda texts: np.array([[3, 4, 0], [0, 0, 0]], np.float32)  # type: ignore
    vectors |= {output.request_id: output.embedding for output in run(engine)}
    expected = np.array([3, 4, 0, 2]) / np.sqrt(29)
    np.testing.assert_allclose(vectors["as it is"], expected, rtol=1e-6)  # type: ignore[arg-type]
    for name in ("cut", "normalised"):
        np.testing.assert_allclose(vectors[name], [0.6, 0.8], rtol=1e-6)  # type: ignore[arg-type]
    assert vectors["plain"].tolist() == [3, 4, 0]  # type: ignore[union-attr]
    assert vectors["zero"].tolist() == [0, 0, 0]  # type: ignore[union-attr]


def test_a_request_that_waits_can_be_ended() -> None:
    model = Numbers()
    engine = make(model, max_num_seqs=1)
    for name in "abc":
        add(engine, name, 2)
    engine.abort("b")
    engine.abort("unknown")
    outputs = {output.request_id: output for output in run(engine)}
    engine.abort("a")
    assert not engine.has_work
    assert outputs["b"].error is not None and outputs["b"].error.code is ErrorCode.CANCELLED
    assert outputs["b"].embedding is None
    assert outputs["a"].error is outputs["c"].error is None
    assert model.steps == [[2], [2]]


def test_what_is_not_finite_ends_alone() -> None:
    engine = make(Numbers())
    add(engine, "bad", 2, first=NOT_FINITE)
    add(engine, "good", 2)
    bad, good = run(engine)
    assert bad.error is not None and bad.error.code is ErrorCode.INTERNAL
    assert good.embedding is not None


def test_a_failed_step_takes_no_later_request_with_it() -> None:
    model = Numbers()
    engine = make(model, max_num_seqs=2)
    add(engine, "with it", 2)
    add(engine, "bad", 2, first=FAILS)
    add(engine, "later", 2)
    outputs = {output.request_id: output for output in run(engine)}
    for name in ("with it", "bad"):
        error = outputs[name].error
        assert error is not None and str(error).startswith("INTERNAL engine: a step failed")
    assert outputs["later"].embedding is not None
    assert engine.num_requests == engine.num_running == 0


def test_three_failures_in_a_row_are_the_end() -> None:
    engine = make(Numbers(), max_num_seqs=1)
    for name in "abcd":
        add(engine, name, 2, first=FAILS)
    ended = [*engine.step(), *engine.step()]
    with pytest.raises(EngineDeadError):
        engine.step()
    ended += engine.take_ended()
    assert [output.request_id for output in ended] == ["a", "b", "c", "d"]
    assert all(output.error is not None for output in ended)
    assert not engine.has_work


class Running:
    """An engine in its loop, and its outputs as they come."""

    def __init__(self, model: Numbers) -> None:
        self.outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        self.dead = threading.Event()
        self.loop = EngineLoop(
            lambda: make(model),
            lambda outputs: [self.outputs.put(output) for output in outputs] and None,
            self.dead.set,
        )
        self.loop.start()
        self.loop.wait_ready()

    def add(self, name: str, first: int = 1) -> None:
        request = EmbeddingRequest(name, [first, 2], PoolingParams())
        self.loop.add(name, lambda engine: engine.add(request))

    def error(self) -> RequestError:
        error = self.outputs.get(timeout=30).error
        assert error is not None
        return error


def test_the_loop_ends_what_comes_after_the_engines_death() -> None:
    running = Running(Numbers())
    running.add("good")
    assert running.outputs.get(timeout=30).embedding is not None
    for name in "abc":
        running.add(name, first=FAILS)
        assert running.error().code is ErrorCode.INTERNAL
    assert running.dead.wait(30)
    running.add("later")
    assert str(running.error()).startswith("UNAVAILABLE engine: has failed")
    running.loop.stop()


def test_what_waits_when_the_loop_stops_is_told() -> None:
    holds, goes_on = threading.Event(), threading.Event()

    class Slow(Numbers):
        def embed(self, texts: Sequence[Sequence[int]]) -> Any:
            holds.set()
            assert goes_on.wait(30)
            return super().embed(texts)

    running = Running(Slow())
    running.add("first")
    assert holds.wait(30)
    running.add("second")
    stopping = threading.Thread(target=running.loop.stop)
    stopping.start()
    goes_on.set()
    stopping.join(30)
    assert running.outputs.get(timeout=30).embedding is not None
    assert str(running.error()).startswith("UNAVAILABLE server: is shutting down")
