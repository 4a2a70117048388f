from __future__ import annotations

import os
import signal
import time

import pytest

from trident_llm.cli.stop_signals import StopRequested, StopSignals


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_noted_and_raises_where_asked(number: int) -> None:
    before = signal.getsignal(number)
    with StopSignals() as stop:
        stop.check()
        send(number)
        assert stop.received == number
        with pytest.raises(StopRequested):
            stop.check()
        with pytest.raises(StopRequested):
            stop.sleep(60)
    assert signal.getsignal(number) is before


def test_a_signal_cuts_into_interruptible_work_once() -> None:
    steps = []

    def work() -> None:
        try:
            send(signal.SIGINT)
            time.sleep(60)
        finally:
            send(signal.SIGINT)  # does not cut the cleaning
            steps.append("cleaned")

    with StopSignals() as stop:
        with pytest.raises(StopRequested), stop.interruptible():
            work()
        assert steps == ["cleaned"]
        with pytest.raises(StopRequested), stop.interruptible():
            steps.append("begun")
        assert steps == ["cleaned"]


def test_outside_a_signal_only_sets_a_flag() -> None:
    with StopSignals() as stop:
        with stop.interruptible():
            pass
        send(signal.SIGTERM)
        assert stop.received == signal.SIGTERM


def test_later_signals_say_that_it_is_stopping(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals() as stop:
        send(signal.SIGINT)
        assert capfd.readouterr().err == ""
        send(signal.SIGTERM)
        assert "already stopping" in capfd.readouterr().err
        assert stop.received == signal.SIGINT


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            send(signal.SIGHUP)
            assert stop.received is None
    finally:
        signal.signal(signal.SIGHUP, before)
