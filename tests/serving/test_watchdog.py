"""An engine that hangs is noticed from outside: who waits gets an error, and it is told."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.cli.command import wait_for
from tests.serving.fake_triton import ServerMetrics, TritonModelException, texts
from tests.serving.test_model import Request, Setup, setup

__all__ = ["setup"]

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def patient(setup: Setup) -> Setup:
    """A model whose watchdog bites soon."""
    setup.model._watchdog._seconds = 0.3
    return setup


def faults(setup: Setup) -> list[str]:
    return [event["text"] for event in setup.events() if event["event"] == "error"]


def test_a_step_that_hangs(patient: Setup, server_metrics: ServerMetrics) -> None:
    model = patient.model
    expected = texts(patient.answer("hello", {"max_tokens": 4}))
    hangs, goes_on = threading.Event(), threading.Event()
    executor = model._engine._executor
    collect = executor.collect

    def hang(launched: Any) -> Any:
        hangs.set()
        assert goes_on.wait(60)
        return collect(launched)

    executor.collect = hang  # type: ignore[method-assign]
    requests = [Request("hello", {**GREEDY, "max_tokens": 4}) for _ in range(3)]
    model.execute(list(requests))
    assert hangs.wait(30)
    assert model.is_ready()
    wait_for(lambda: all(request.sender.finals for request in requests), "all are answered")
    for request in requests:
        (response,) = request.sender.responses
        assert response.error is not None
        assert response.error.message.startswith("INTERNAL engine: made no progress")
    assert not model.is_ready()
    assert server_metrics["trident:engine_healthy"].value == 0.0
    later = patient.answer("hello", {"max_tokens": 4}).error
    assert later.message.startswith("UNAVAILABLE engine: makes no progress")
    wait_for(lambda: faults(patient), "the fault is told")
    assert faults(patient) == ["the engine has made no progress for 120 s"]

    # Should the device come back, nothing of the old requests is left.
    executor.collect = collect  # type: ignore[method-assign]
    goes_on.set()
    wait_for(model.is_ready, "it is ready again")
    assert texts(patient.answer("hello", {"max_tokens": 4})) == expected
    wait_for(lambda: model._engine.num_requests == 0, "all have ended")
    assert model._engine.scheduler.check_integrity() == []
    assert model._engine.scheduler.pool.num_held == 0


def test_an_engine_that_has_work_and_never_begins_it(patient: Setup) -> None:
    schedule = patient.model._engine.scheduler.schedule
    patient.model._engine.scheduler.schedule = lambda: None  # type: ignore[method-assign]
    error = patient.answer("hello", {"max_tokens": 4}).error
    assert error.message.startswith("INTERNAL engine: made no progress")
    patient.model._engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    wait_for(patient.model.is_ready, "it is ready again")


def test_a_model_that_hangs_is_unloaded_all_the_same(
    tmp_path: Any, tiny_model: Any, monkeypatch: pytest.MonkeyPatch, server_metrics: ServerMetrics
) -> None:
    monkeypatch.setenv("TRIDENT_PROGRESS", str(tmp_path / "progress"))
    made = Setup(tmp_path, tiny_model)
    made.model._watchdog._seconds = 0.3
    goes_on = threading.Event()
    collect = made.model._engine._executor.collect

    def hang(launched: Any) -> Any:
        assert goes_on.wait(60)
        return collect(launched)

    made.model._engine._executor.collect = hang  # type: ignore[method-assign]
    assert made.answer("hello", {"max_tokens": 4}).error.message.startswith("INTERNAL")
    made.model.finalize()
    goes_on.set()
    made.model._loop._thread.join(30)
    assert not made.model._loop._thread.is_alive()


def test_an_idle_engine_is_not_stuck(patient: Setup) -> None:
    patient.model._watchdog._seconds = 3.0  # an idle one looks up every second
    looked = patient.model._loop._last_progress
    wait_for(lambda: patient.model._loop._last_progress > looked + 1.5, "it was idle for a while")
    assert patient.model.is_ready()


def test_a_request_that_cannot_be_ended_is_a_fault(
    setup: Setup, server_metrics: ServerMetrics
) -> None:
    model = setup.model
    request = Request("hello", {**GREEDY, "max_tokens": 2})
    request.sender.failing = 2  # the response, and the bare final flag after it
    model.execute([request])
    wait_for(lambda: not model.is_ready(), "the fault is noticed")
    assert TritonModelException.__name__ not in "".join(faults(setup))
    later = setup.answer("hello", {"max_tokens": 2}).error
    assert later.message.startswith("UNAVAILABLE server: could not end")
    assert server_metrics["trident:engine_healthy"].value == 0.0
    wait_for(lambda: faults(setup), "the fault is told")
    assert faults(setup) == ["the end of a request could not be told to the server"]


def test_one_bad_step_and_one_bad_row_take_only_their_own(setup: Setup) -> None:
    expected = texts(setup.answer("hello", {"max_tokens": 4}))
    executor = setup.model._engine._executor
    launch, collect = executor.launch, executor.collect

    def fail_once(*args: Any) -> Any:
        executor.launch = launch  # type: ignore[method-assign]
        raise RuntimeError("one bad step")

    executor.launch = fail_once  # type: ignore[method-assign]
    error = setup.answer("hello", {"max_tokens": 4}).error
    assert error.message.startswith("INTERNAL engine: a step failed")
    assert texts(setup.answer("hello", {"max_tokens": 4})) == expected

    def spoil_first_row(launched: Any) -> Any:
        from dataclasses import replace

        result = collect(launched)
        first, *others = result.sampled
        return replace(result, sampled=[replace(first, failed=True), *others])

    executor.collect = spoil_first_row  # type: ignore[method-assign]
    error = setup.answer("hello", {"max_tokens": 4}).error
    assert error.message.startswith("INTERNAL engine: the model's output for this request was not")
    executor.collect = collect  # type: ignore[method-assign]
    assert texts(setup.answer("hello", {"max_tokens": 4})) == expected
    assert setup.model.is_ready()
    assert faults(setup) == []
