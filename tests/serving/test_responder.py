"""One final flag for every request, on every path; and nothing asked after it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.serving.fake_triton import Sender, ServerMetrics, texts
from tests.serving.outputs import make_output, token
from trident_llm.core.errors import ErrorCode, RequestError, invalid
from trident_llm.core.request import FinishReason
from trident_llm.core.sampling_params import SamplingParams
from trident_llm.engine.faults import CANCELLED
from trident_llm.engine.output import SequenceDelta
from trident_llm.serving.metrics import EngineState, Metrics
from trident_llm.serving.protocol import (
    MAX_RESPONSE_BYTES,
    RawRequest,
    ResponseBuilder,
    TokenText,
    parse_request,
)
from trident_llm.serving.responder import TIMED_OUT, RequestHandle, Responder

STATE = EngineState(1, 0, 5, 0, 0, 0, healthy=True)


@dataclass
class Watch:
    """The server leaves when told to; the question counts."""

    leaves: bool = False
    asked: int = 0

    def server_leaves(self) -> bool:
        self.asked += 1
        return self.leaves


@dataclass
class Setup:
    aborted: dict[str, RequestError] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)
    left: threading.Event = field(default_factory=threading.Event)
    metrics: Metrics | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.responder = Responder(self._abort, self.watch, self.left.set, self.metrics)  # type: ignore[arg-type]

    def _abort(self, request_id: str, error: RequestError) -> None:
        with self.changed:
            self.aborted[request_id] = error
            self.changed.notify_all()

    def wait_aborted(self, request_id: str) -> RequestError:
        with self.changed:
            assert self.changed.wait_for(lambda: request_id in self.aborted, 60)
        return self.aborted[request_id]

    def request(self, request_id: str, *, stream: bool = True, **inputs: Any) -> RequestHandle:
        tensors = {name: np.array([value]) for name, value in inputs.items()}
        tensors["text_input"] = np.array([b"p"], np.object_)
        tensors["stream"] = np.array([stream])
        parsed = parse_request(RawRequest(tensors, ""), SamplingParams())
        handle = RequestHandle(request_id, Sender(), stream=stream)
        handle.builder = ResponseBuilder(parsed, lambda token_id: TokenText(str(token_id)))
        self.responder.register(handle)
        return handle


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    yield made
    made.responder.stop()


def end(text: str) -> SequenceDelta:
    return token(text, end=FinishReason.STOP)


def finish(setup: Setup, *handles: RequestHandle) -> list[Sender]:
    """Starts sending and returns the senders, each with its one final flag."""
    senders = [handle.sender for handle in handles]
    setup.responder.start()
    assert setup.responder.wait_idle(60)
    assert [sender.finals for sender in senders] == [1] * len(senders)
    return senders


def test_the_last_token_carries_the_final_flag(setup: Setup) -> None:
    handle = setup.request("1")
    sender = handle.sender
    setup.responder.start()
    setup.responder.push([make_output("1", token("a"))])
    setup.responder.push([make_output("1", end("b"), finished=True)])
    assert setup.responder.wait_idle(60)
    assert "".join(text for response in sender.responses for text in texts(response)) == "ab"
    assert sender.finals == 1
    assert handle.sender is None


def test_what_nobody_has_sent_is_merged(setup: Setup) -> None:
    handle = setup.request("1")
    for text in "abc":
        setup.responder.push([make_output("1", token(text))])
    setup.responder.push([make_output("1", end("d"), finished=True)])
    (sender,) = finish(setup, handle)
    assert [texts(response) for response in sender.responses] == [["abcd"]]


def test_a_streams_responses_are_not_merged_beyond_the_cap(setup: Setup) -> None:
    handle = setup.request("1")
    pieces = [chr(ord("a") + number) * (MAX_RESPONSE_BYTES // 10) for number in range(5)]
    for piece in pieces[:-1]:
        setup.responder.push([make_output("1", token(piece))])
    setup.responder.push([make_output("1", end(pieces[-1]), finished=True)])
    (sender,) = finish(setup, handle)
    sent = [texts(response)[0] for response in sender.responses]
    assert len(sent) == 3
    assert "".join(sent) == "".join(pieces)
    assert max(map(len, sent)) <= MAX_RESPONSE_BYTES


def test_what_is_not_streamed_is_one_response_whatever_its_size(setup: Setup) -> None:
    handle = setup.request("1", stream=False)
    piece = "x" * (MAX_RESPONSE_BYTES // 3)
    setup.responder.push([make_output("1", token(piece))])
    setup.responder.push([make_output("1", token(piece))])
    setup.responder.push([make_output("1", end(piece), finished=True)])
    (sender,) = finish(setup, handle)
    assert [texts(response) for response in sender.responses] == [["p" + 3 * piece]]


@pytest.mark.parametrize("code", ErrorCode)
def test_an_error_ends_a_request_with_its_code_and_text(setup: Setup, code: ErrorCode) -> None:
    handle = setup.request("1")
    setup.responder.push([make_output("1", token("lost"))])
    setup.responder.push([make_output("1", error=RequestError(code, "field", "why"))])
    (sender,) = finish(setup, handle)
    (response,) = sender.responses
    assert response.error is not None
    assert response.error.message == f"{code.value} field: why"


def test_a_refusal_at_the_door_ends_a_request(setup: Setup) -> None:
    handle = setup.request("1")
    setup.responder.answer(handle, invalid("text_input", "is bad"))
    (sender,) = finish(setup, handle)
    assert sender.responses[0].error is not None


def test_a_failed_send_ends_the_request_with_a_bare_final_flag(setup: Setup) -> None:
    handle = setup.request("1")
    handle.sender.failing = 1
    setup.responder.push([make_output("1", token("a"))])
    (sender,) = finish(setup, handle)
    assert sender.responses == []
    assert "1" in setup.aborted
    assert not setup.responder.broken
    setup.responder.push([make_output("1", error=CANCELLED)])  # the engine's answer to the abort


def test_without_a_final_flag_the_model_is_pinned_and_says_so(setup: Setup) -> None:
    handle = setup.request("1")
    handle.sender.failing = 2
    setup.responder.push([make_output("1", end("a"), finished=True)])
    setup.responder.start()
    assert setup.responder.wait_idle(60)
    assert setup.responder.broken


def test_a_response_that_cannot_be_built_is_an_error_of_ours(setup: Setup) -> None:
    handle = setup.request("1", return_logprobs=True)
    assert handle.builder is not None
    handle.builder.tensors = lambda output: 1 / 0  # type: ignore[method-assign,assignment]
    setup.responder.push([make_output("1", token("a"))])
    (sender,) = finish(setup, handle)
    assert sender.responses[0].error is not None
    assert sender.responses[0].error.message.startswith("INTERNAL response: ")


def test_a_cancelled_request_is_aborted_once(setup: Setup) -> None:
    handle = setup.request("1")
    handle.sender.cancelled = True
    setup.responder.start()
    assert setup.wait_aborted("1") is CANCELLED
    assert handle.abort_error is CANCELLED
    polls = handle.sender.polls
    sender = handle.sender
    setup.responder.push([make_output("1", error=CANCELLED)])
    assert setup.responder.wait_idle(60)
    assert sender.polls == polls


def test_a_deadline_that_passed_aborts(setup: Setup) -> None:
    late, other = setup.request("late"), setup.request("other")
    late.deadline = late.arrival
    other.deadline = other.arrival + 3600
    setup.responder.start()
    error = setup.wait_aborted("late")
    assert error is TIMED_OUT
    assert str(error).startswith("UNAVAILABLE timeout: ")
    assert "other" not in setup.aborted
    setup.responder.push([make_output("late", error=error), make_output("other", error=error)])
    assert setup.responder.wait_idle(60)


def test_the_server_is_asked_only_while_requests_are_in_flight(setup: Setup) -> None:
    setup.watch.leaves = True
    handle = setup.request("1")
    setup.responder.start()
    assert setup.left.wait(60)
    setup.responder.push([make_output("1", end("a"), finished=True)])
    assert setup.responder.wait_idle(60)
    asked = setup.watch.asked
    assert asked == 1  # having said once that it leaves, it is not asked again
    assert handle.sender is None


def test_nothing_is_told_once_the_last_final_flag_is_out(server_metrics: ServerMetrics) -> None:
    metrics = Metrics({}, lambda: STATE, max_model_len=100, num_blocks=10, block_size=16)
    setup = Setup(metrics=metrics)
    handles = [setup.request(str(number)) for number in range(3)]
    told_at_final: list[float] = []

    def recording(send: Callable[..., None]) -> Callable[..., None]:
        def wrapped(response: Any = None, flags: int = 0) -> None:
            told_at_final.append(server_metrics["vllm:generation_tokens_total"].value)
            send(response, flags)

        return wrapped

    for handle in handles:
        handle.sender.send = recording(handle.sender.send)
    setup.responder.push([make_output(str(n), end("a"), finished=True) for n in range(2)])
    setup.responder.answer(handles[2], invalid("text_input", "is bad"))
    finish(setup, *handles)
    # The refusal and the first result were sent untold; the last final flag waited for everything.
    assert told_at_final == [0, 0, 2]
    assert server_metrics["vllm:num_requests_running"].value == 0
    errors = server_metrics.labelled("trident:request_errors_total", code="INVALID_ARG")
    assert errors.value == 1
    calls = server_metrics.num_calls
    setup.responder.stop()
    assert server_metrics.num_calls == calls
