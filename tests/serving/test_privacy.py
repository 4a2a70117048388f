"""What users write is in no log line and in no error, whatever becomes of their requests."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.cli.command import wait_for
from tests.serving.bad_requests import MARK
from tests.serving.test_model import Request, Setup, setup

__all__ = ["setup"]


def test_prompts_are_not_logged(
    setup: Setup, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("trident")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.DEBUG, logger="trident")
    prompt = f"hello {MARK}"
    assert setup.answer(prompt, {"max_tokens": 4}).error is None
    messages = []

    def refused(text: str, sampling: dict[str, Any]) -> None:
        messages.append(setup.answer(text, sampling).error.message)

    refused(prompt * 100, {"max_tokens": 4})
    refused(prompt, {"stop": [MARK, 5]})
    refused(prompt, {MARK: 5})
    refused(prompt, {"max_tokens": MARK})
    refused(prompt, {"structured_outputs": {"regex": f"({MARK}"}})
    refused(prompt, {"structured_outputs": {"json": {"type": MARK}}})
    refused(prompt, {"structured_outputs": {"grammar": f"root ::= {MARK}"}})

    executor = setup.model._engine._executor
    launch = executor.launch

    def fail(*args: Any) -> Any:
        raise RuntimeError("the device is gone")

    executor.launch = fail  # type: ignore[method-assign]
    refused(prompt, {"max_tokens": 4})
    executor.launch = launch  # type: ignore[method-assign]

    cancelled = Request(prompt, {"max_tokens": 50, "ignore_eos": True})
    cancelled.sender.cancelled = True
    unsendable = Request(prompt, {"max_tokens": 4})
    unsendable.sender.failing = 2
    unsendable.caller_id = f"id with {MARK}"  # not of an id's form
    setup.model.execute([cancelled, unsendable])
    wait_for(lambda: cancelled.sender.finals, "the cancelled one ends")
    wait_for(lambda: not setup.model.is_ready(), "the other one has failed")
    assert len(messages) == 8
    assert [message for message in messages if MARK in message] == []
    logged = caplog.text
    assert "a step failed" in logged and "could not be sent" in logged
    assert MARK not in logged
    assert MARK not in "".join(capfd.readouterr())
    assert MARK not in setup.progress.read_text()
