"""Each request leaves one line in the log when it ends, and nothing of what its user wrote is in it."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from tests.cli.command import wait_for
from tests.serving.bad_requests import MARK
from tests.serving.test_model import Request, Setup, setup

__all__ = ["setup"]

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"
SAMPLING = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}


class TracedRequest(Request):
    def __init__(self, *, own: Any = None, parameters: str = "") -> None:
        super().__init__("hello", SAMPLING)
        self.own = own
        self._parameters = parameters

    def parameters(self) -> str:
        return self._parameters

    def trace(self) -> TracedRequest:
        return self

    def get_context(self) -> Any:
        return self.own


class Log:
    """The lines about requests, as they come."""

    def __init__(self, setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
        self._model, self._caplog = setup.model, caplog

    def after(self, *requests: Request) -> list[dict[str, Any]]:
        """The lines that the given requests leave."""
        before = len(self._lines())
        self._model.execute(list(requests))
        wait_for(lambda: all(request.sender.finals for request in requests), "they end")
        return self._lines()[before:]

    def _lines(self) -> list[dict[str, Any]]:
        messages = [record.getMessage() for record in self._caplog.records]
        return [json.loads(text[8:]) for text in messages if text.startswith("request {")]


@pytest.fixture
def log(setup: Setup, caplog: pytest.LogCaptureFixture) -> Log:
    logger = logging.getLogger("trident")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger="trident")
    return Log(setup, caplog)


def test_a_result_with_its_tokens_and_times(log: Log) -> None:
    prompt = "one two three four five six seven eight nine ten"
    first, again = Request(prompt, SAMPLING), Request(prompt, SAMPLING, stream=True)
    first.caller_id = "abc-7:1"
    (line,) = log.after(first)
    assert (line["id"], line["outcome"]) == ("abc-7:1", "length")
    assert (line["output_tokens"], line["cached_tokens"]) == (6, 0)
    assert line["prompt_tokens"] > 16
    parts = [line[name] for name in ("queue_s", "prefill_s", "decode_s")]
    assert min(parts) >= 0
    assert sum(parts) <= line["total_s"] + 0.001
    (line,) = log.after(again)
    assert line["cached_tokens"] >= 16
    assert line["output_tokens"] == 6


def test_one_line_however_a_request_ends(log: Log) -> None:
    cancelled = Request("hello", {**SAMPLING, "max_tokens": 50})
    cancelled.sender.cancelled = True
    requests = [
        Request("hello", {**SAMPLING, "stop": ["never"]}),
        Request("hello", {"max_tokens": -1}),
        Request("hello", {"max_tokens": "many"}),
        cancelled,
    ]
    outcomes = sorted(line["outcome"] for line in log.after(*requests))
    assert outcomes in (
        ["CANCELLED", "INVALID_ARG", "INVALID_ARG", "length"],
        ["INVALID_ARG", "INVALID_ARG", "length", "length"],  # it was done before it was asked
    )
    unsendable = Request("hello", SAMPLING)
    unsendable.sender.failing = 1
    assert len(log.after(unsendable)) == 1


def test_only_ids_that_do_no_harm(log: Log) -> None:
    for written in (MARK, f"a {MARK}", f"a\n{MARK}", "x" * 65, "é", ""):
        request = Request("hello", SAMPLING)
        request.caller_id = written
        (line,) = log.after(request)
        assert line["id"] == (MARK if written == MARK else request_number(line))


def request_number(line: dict[str, Any]) -> str:
    assert line["id"].isdecimal()
    return str(line["id"])


@pytest.mark.parametrize(
    ("own", "parameters", "expected"),
    [
        (None, "", None),
        (None, json.dumps({"traceparent": TRACEPARENT}), TRACE),
        (json.dumps({"traceparent": TRACEPARENT}), "", TRACE),
        (
            json.dumps({"traceparent": TRACEPARENT}),
            json.dumps({"traceparent": TRACEPARENT.replace("a", "b")}),
            TRACE,
        ),
        (None, json.dumps({"traceparent": MARK}), None),
        (None, json.dumps({"traceparent": 5}), None),
        ('"traceparent', "", None),
    ],
)
def test_the_id_of_a_trace(log: Log, own: Any, parameters: str, expected: str | None) -> None:
    (line,) = log.after(TracedRequest(own=own, parameters=parameters))
    assert line.get("trace_id") == expected


def test_it_can_be_left_out(setup: Setup, log: Log) -> None:
    setup.model._responder._log_requests = False
    assert log.after(Request("hello", SAMPLING)) == []
