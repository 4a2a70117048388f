"""Who may come in when the engine's queue is full."""

from __future__ import annotations

import threading
from typing import Literal

import pytest

from tests.serving.fake_triton import Sender
from trident_llm.core.errors import RequestError
from trident_llm.engine.faults import CANCELLED
from trident_llm.engine.loop import LEAVING
from trident_llm.serving import admission
from trident_llm.serving.admission import Admission
from trident_llm.serving.responder import RequestHandle


class Door:
    """An admission whose queue holds what a test says."""

    def __init__(self, mode: Literal["reject", "block"], num_waiting: int) -> None:
        self.num_waiting = num_waiting
        self.looked = threading.Semaphore(0)
        self.leaving = threading.Event()
        self.admission = Admission(mode, 2, self._count, self.leaving)
        self.handle = RequestHandle("1", Sender())
        self.answers: list[RequestError | None] = []
        self.thread = threading.Thread(target=self._knock, daemon=True)

    def _count(self) -> int:
        self.looked.release()
        return self.num_waiting

    def _knock(self) -> None:
        self.answers.append(self.admission.refusal(self.handle))

    def knock(self) -> None:
        """Starts waiting, and has looked once when this returns."""
        self.thread.start()
        assert self.looked.acquire(timeout=60)

    def answer(self) -> RequestError | None:
        self.thread.join(10)
        (answer,) = self.answers
        return answer


@pytest.mark.parametrize("mode", ["reject", "block"])
def test_there_is_room(mode: Literal["reject", "block"]) -> None:
    door = Door(mode, num_waiting=1)
    door.knock()
    assert door.answer() is None


def test_a_full_queue_refuses() -> None:
    door = Door("reject", num_waiting=2)
    door.knock()
    assert str(door.answer()).startswith("UNAVAILABLE queue: is full: 2 requests wait already")


@pytest.mark.parametrize("mode", ["reject", "block"])
def test_a_control_operation_is_answered_when_the_queue_is_full(
    mode: Literal["reject", "block"],
) -> None:
    door = Door(mode, num_waiting=3)
    assert door.admission.refusal(door.handle, control=True) is None
    door.num_waiting = 4  # two of these must be control operations themselves
    assert "is full" in str(door.admission.refusal(door.handle, control=True))


def test_a_full_queue_blocks_until_a_step_makes_room() -> None:
    door = Door("block", num_waiting=2)
    door.knock()
    assert door.looked.acquire(timeout=60)
    assert door.thread.is_alive()
    assert door.admission.num_blocked == 1
    door.num_waiting = 1
    door.admission.stepped()
    assert door.answer() is None
    assert door.admission.num_blocked == 0


def test_the_one_at_the_door_may_be_cancelled() -> None:
    door = Door("block", num_waiting=2)
    door.knock()
    door.handle.abort_error = CANCELLED
    assert door.answer() is CANCELLED


def test_the_one_at_the_door_is_let_go_when_the_server_leaves() -> None:
    door = Door("block", num_waiting=2)
    door.knock()
    door.leaving.set()
    assert door.answer() is LEAVING


def test_without_shared_memory_nobody_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "free_shared_memory", lambda: 1000)
    handle = RequestHandle("1", Sender())
    refusal = Admission("block", 2, lambda: 0, threading.Event()).refusal(handle)
    assert str(refusal).startswith("UNAVAILABLE server: has too little shared memory left")
