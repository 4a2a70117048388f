"""Settings: what is refused, and what gRPC is told."""

from __future__ import annotations

import pytest

from trident_client import TLS, InvalidArgument, Keepalive, RetryPolicy
from trident_client._channel import Settings


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"url": ""}, "url"),
        ({"url": "http://localhost:8001"}, "url"),
        ({"model": ""}, "model"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"timeout": float("inf")}, "timeout"),
        ({"retries": -1}, "retries"),
        ({"concurrency": 0}, "concurrency"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Settings(**({"url": "localhost:1", "model": "llm"} | arguments))  # type: ignore[arg-type]
    assert caught.value.field == field


def test_the_default_keepalive_is_one_that_servers_accept() -> None:
    options = dict(Settings("localhost:1", "llm").options())
    # gRPC servers answer pings that come more often than every 300 s with GOAWAY.
    assert int(options["grpc.keepalive_time_ms"]) > 300_000
    assert options["grpc.keepalive_permit_without_calls"] == 0
    chosen = Settings("localhost:1", "llm", keepalive=Keepalive(interval=10, without_calls=True))
    assert dict(chosen.options())["grpc.keepalive_time_ms"] == 10_000
    assert dict(chosen.options())["grpc.keepalive_permit_without_calls"] == 1


def test_messages_of_any_size_pass() -> None:
    options = dict(Settings("localhost:1", "llm").options())
    assert options["grpc.max_receive_message_length"] == -1


def test_tls_is_off_unless_asked_for() -> None:
    assert Settings("localhost:1", "llm").credentials() is None
    assert Settings("localhost:1", "llm", ssl=True).credentials() is not None
    named = Settings("localhost:1", "llm", ssl=TLS(server_name="llm.example"))
    assert dict(named.options())["grpc.ssl_target_name_override"] == "llm.example"


def test_a_call_s_own_timeout_wins() -> None:
    settings = Settings("localhost:1", "llm", timeout=5)
    assert settings.deadline(None) == 5
    assert settings.deadline(2) == 2


def test_delays_double_up_to_a_cap_and_spread() -> None:
    policy = RetryPolicy(limit=9, first_delay=0.1, max_delay=0.5)
    assert [policy.longest_delay(attempt) for attempt in range(4)] == [0.1, 0.2, 0.4, 0.5]
    assert policy.longest_delay(10_000) == 0.5
    delays = {policy.delay(3) for _ in range(20)}
    assert len(delays) > 1
    assert all(0.25 <= delay <= 0.5 for delay in delays)
