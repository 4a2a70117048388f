"""An engine that hangs is noticed from outside: who waits gets an error, and it is told."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.cli.command import wait_for
from tests.serving.fake_triton import ServerMetrics, TritonModelException, texts
from tests.serving.test_model import Request, Setup, setup
from trident_llm.serving import watchdog

__all__ = ["setup"]

GREEDY = {"temperature": 0, "ignore_eos": True}


SOON = 0.3
LATE = 120.0  # whatever the machine does meanwhile


def faults(setup: Setup) -> list[str]:
    return [event["text"] for event in setup.events() if event["event"] == "error"]


def test_a_step_that_hangs(setup: Setup, server_metrics: ServerMetrics) -> None:
    model = setup.model
    expected = texts(setup.answer("hello", {"max_tokens": 4}))
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
    model._watchdog._seconds = SOON
    wait_for(lambda: all(request.sender.finals for request in requests), "all are answered")
    for request in requests:
        (response,) = request.sender.responses
        assert response.error is not None
        assert response.error.message.startswith("INTERNAL engine: made no progress")
    assert not model.is_ready()
    assert server_metrics["trident:engine_healthy"].value == 0.0
    later = setup.answer("hello", {"max_tokens": 4}).error
    assert later.message.startswith("UNAVAILABLE engine: makes no progress")
    wait_for(lambda: faults(setup), "the fault is told")
    assert faults(setup) == ["the engine has made no progress for 120 s"]  # as configured

    # Should the device come back, nothing of the old requests is left.
    executor.collect = collect  # type: ignore[method-assign]
    model._watchdog._seconds = LATE
    goes_on.set()
    wait_for(model.is_ready, "it is ready again")
    assert texts(setup.answer("hello", {"max_tokens": 4})) == expected
    wait_for(lambda: model._engine.num_requests == 0, "all have ended")
    assert model._engine.scheduler.check_integrity() == []
    assert model._engine.scheduler.pool.num_held == 0


def test_an_engine_that_has_work_and_never_begins_it(setup: Setup) -> None:
    setup.model._watchdog._seconds = SOON
    schedule = setup.model._engine.scheduler.schedule
    setup.model._engine.scheduler.schedule = lambda: None  # type: ignore[method-assign]
    error = setup.answer("hello", {"max_tokens": 4}).error
    assert error.message.startswith("INTERNAL engine: made no progress")
    setup.model._engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    wait_for(setup.model.is_ready, "it is ready again")


def test_a_model_that_hangs_is_unloaded_all_the_same(
    tmp_path: Any, tiny_model: Any, monkeypatch: pytest.MonkeyPatch, server_metrics: ServerMetrics
) -> None:
    monkeypatch.setenv("TRIDENT_PROGRESS", str(tmp_path / "progress"))
    made = Setup(tmp_path, tiny_model)
    made.model._watchdog._seconds = SOON
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


def test_an_idle_engine_is_not_stuck(setup: Setup) -> None:
    loop = setup.model._loop
    wait_for(lambda: loop._idle, "it waits for requests")
    loop._last_progress -= 1000
    assert loop.seconds_without_progress == 0.0


class Stalled:
    """An engine's loop with work that never gets on; what the watchdog asks of it."""

    seconds_without_progress = 1e6


def test_time_in_which_nothing_ran_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slept an hour between two looks gives the engine its time all the same."""
    told = threading.Event()
    dog = watchdog.Watchdog(Stalled(), 4.0, told.set)  # type: ignore[arg-type]
    clock = 0.0
    looks: list[bool] = []

    def wait(period: float) -> bool:
        nonlocal clock
        looks.append(told.is_set())
        clock += 3600 if len(looks) == 1 else period
        return told.is_set()

    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock)
    monkeypatch.setattr(dog._stop, "wait", wait)
    dog._run()
    assert looks == [False, False, False, False, True]  # an hour as two seconds, then one each


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
