"""Tokens per minute of a key, and the ids of requests on their way to the server."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.cli.command import wait_for
from tests.client.fake_server import FakeServer, forever
from tests.openai.running import RunningGateway
from trident_client.openai.limits import TokenBudgets

BODY = {"model": "llm", "prompt": "Hi"}  # answered with 3 tokens for a prompt of 5


def of(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_budget_refills_steadily_and_no_further() -> None:
    now = 0.0
    budgets = TokenBudgets(60, lambda: now)
    budgets.charge("a", 30)
    assert budgets.seconds_to_wait("a") == 0  # 30 are left
    budgets.charge("a", 50)
    assert budgets.seconds_to_wait("a") == 21  # until one is there
    assert budgets.seconds_to_wait("b") == 0
    now = 20.5
    assert budgets.seconds_to_wait("a") == 1
    now = 21.0
    assert budgets.seconds_to_wait("a") == 0
    now = 10_000.0
    budgets.charge("a", 60)
    assert budgets.seconds_to_wait("a") == 1


def test_no_limit_is_none() -> None:
    budgets = TokenBudgets(0)
    budgets.charge("a", 10**9)
    assert budgets.seconds_to_wait("a") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_key_that_has_used_its_tokens_waits(
    server: FakeServer, tmp_path: Path, stream: bool
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    with RunningGateway(
        server.url, api_key_file=str(keys), max_tokens_per_minute_per_key=6
    ) as gateway:
        body = {**BODY, "stream": stream}
        assert gateway.post("/v1/completions", body, headers=of("one")).status_code == 200
        refused = gateway.post("/v1/completions", body, headers=of("one"))
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert 20 <= int(refused.headers["retry-after"]) <= 30  # 2 too many, at 6 a minute
        assert gateway.get("/v1/models", headers=of("one")).status_code == 200
        assert gateway.post("/v1/completions", body, headers=of("two")).status_code == 200
        assert len(server.requests) == 2


def test_what_a_caller_took_before_it_left_counts(server: FakeServer) -> None:
    server.script = forever
    with RunningGateway(server.url, max_tokens_per_minute_per_key=1) as gateway:
        with httpx.stream(
            "POST", f"{gateway.url}/v1/completions", json={**BODY, "stream": True}, timeout=60
        ) as answer:
            for line in answer.iter_lines():
                if "first" in line:
                    break
        assert server.one().cancelled()
        wait_for(
            lambda: (
                gateway.post("/v1/completions", {**BODY, "max_tokens": "no"}).status_code == 429
            ),
            "its one token is counted",
        )


def test_the_server_knows_a_request_by_the_callers_id(
    server: FakeServer, gateway: RunningGateway
) -> None:
    answer = gateway.post("/v1/completions", BODY, headers={"x-request-id": "order-17"})
    assert answer.headers["x-request-id"] == "order-17"
    named = gateway.post("/v1/completions", BODY)
    odd = gateway.post("/v1/completions", BODY, headers={"x-request-id": "a b"})
    ids = [request.proto.id for request in server.requests]
    assert ids == ["order-17", named.headers["x-request-id"], odd.headers["x-request-id"]]
    assert len(set(ids)) == 3 and "a b" not in ids
