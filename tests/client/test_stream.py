"""The state machine of a request, driven by hand with a clock of the test's."""

from __future__ import annotations

import grpc
import pytest

from trident_client._channel import RetryPolicy, Settings
from trident_client._stream import Exchange
from trident_client.errors import (
    Cancelled,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidArgument,
    ServerError,
    StreamInterrupted,
    TridentError,
    Unavailable,
)

from .fake_server import message

POLICY = RetryPolicy(limit=2, first_delay=1.0, max_delay=8.0)
TOKEN = message(text_output=["a"])
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def exchange(timeout: float | None = None, clock: Clock | None = None) -> Exchange:
    settings = Settings("localhost:1", "llm", retries=POLICY)
    return Exchange(settings, timeout, request_id="r", clock=clock or Clock())


def test_the_output_is_whole_only_with_the_final_mark() -> None:
    cut = exchange()
    with pytest.raises(StreamInterrupted, match="final mark"):
        cut.ended()
    cut = exchange()
    cut.feed(TOKEN)
    with pytest.raises(StreamInterrupted):
        cut.ended()
    whole = exchange()
    whole.feed(message(text_output=["a"], final=True))
    whole.ended()
    assert whole.final


def test_a_lone_final_mark_ends_the_output() -> None:
    call = exchange()
    call.feed(TOKEN)
    assert not call.final
    assert call.feed(message(final=True)).outputs == {}
    assert call.final


def test_retries_are_for_unavailable_only_and_limited() -> None:
    call = exchange()
    assert 0.5 <= call.retry_delay(Unavailable("busy")) <= 1.0
    assert 1.0 <= call.retry_delay(ConnectionFailed("gone")) <= 2.0
    with pytest.raises(Unavailable, match="busy"):
        call.retry_delay(Unavailable("busy"))
    for error in (InvalidArgument("no"), ServerError("no"), Cancelled("no"), StreamInterrupted("")):
        with pytest.raises(type(error)):
            exchange().retry_delay(error)


def test_no_retry_after_the_first_token() -> None:
    call = exchange()
    call.feed(TOKEN)
    with pytest.raises(Unavailable):
        call.retry_delay(Unavailable("busy"))


def test_no_retry_that_the_deadline_would_cut() -> None:
    clock = Clock()
    call = exchange(0.4, clock)
    with pytest.raises(Unavailable, match="busy"):
        call.retry_delay(Unavailable("busy"))


def test_the_deadline_counts_from_the_call_not_from_the_attempt() -> None:
    clock = Clock()
    call = exchange(3.0, clock)
    assert call.message({}).parameters["timeout"].int64_param == 3_000_000
    clock.now += 2.0
    assert call.message({}).parameters["timeout"].int64_param == 1_000_000
    assert call.remaining() == pytest.approx(1.0)
    clock.now += 1.0
    with pytest.raises(DeadlineExceeded, match="3 s") as caught:
        call.message({})
    assert caught.value.request_id == "r"
    assert exchange().remaining() is None


def test_a_lost_connection_means_something_else_before_and_after_the_first_token() -> None:
    lost = (UNAVAILABLE, "Socket closed")
    assert type(exchange().failed(*lost)) is ConnectionFailed
    assert "localhost:1" in str(exchange().failed(*lost))
    started = exchange()
    started.feed(TOKEN)
    assert type(started.failed(*lost)) is StreamInterrupted
    # The server's own refusal is no lost connection.
    assert type(started.failed(UNAVAILABLE, "UNAVAILABLE engine: down")) is Unavailable


def test_a_cancel_is_told_apart_by_who_asked_for_it() -> None:
    closed = (grpc.StatusCode.CANCELLED, "endpoint closing")
    assert type(exchange().failed(*closed)) is ConnectionFailed
    by_server = exchange().failed(grpc.StatusCode.CANCELLED, "CANCELLED request: by the operator")
    assert type(by_server) is Cancelled
    ours = exchange()
    assert ours.cancel()
    assert not ours.cancel()
    assert type(ours.failed(*closed)) is Cancelled
    with pytest.raises(Cancelled):
        ours.feed(TOKEN)
    with pytest.raises(Cancelled):
        ours.check_alive()


def test_a_cancel_after_the_end_changes_nothing() -> None:
    call = exchange()
    call.feed(message(text_output=["a"], final=True))
    assert not call.cancel()
    call.check_alive()


def test_an_error_stays_the_request_s_error() -> None:
    call = exchange()
    with pytest.raises(InvalidArgument) as caught:
        call.feed(message(error="INVALID_ARG n: too many"))
    assert (caught.value.field, caught.value.request_id) == ("n", "r")
    with pytest.raises(InvalidArgument):
        call.retry_delay(caught.value)
    with pytest.raises(TridentError, match="too many"):
        call.check_alive()


def test_request_ids_differ() -> None:
    settings = Settings("localhost:1", "llm")
    assert Exchange(settings, None).request_id != Exchange(settings, None).request_id


@pytest.mark.parametrize("status", [grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED])
def test_a_failure_at_the_deadline_is_the_timeout(status: grpc.StatusCode) -> None:
    clock = Clock()
    call = exchange(timeout=3.0, clock=clock)
    early = call.failed(status, "Internal error from Core")
    assert not isinstance(early, DeadlineExceeded)
    clock.now += 3.0
    assert isinstance(call.failed(status, "Internal error from Core"), DeadlineExceeded)
    lost = call.failed(UNAVAILABLE, "failed to connect")
    assert isinstance(lost, ConnectionFailed)
