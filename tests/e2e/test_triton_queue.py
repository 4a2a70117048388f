"""``admission: block``: requests stay in Triton's own queue, whose policy then works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import wait_for
from tests.e2e.metrics import Scrape
from tests.e2e.models import without_end
from tests.e2e.server import RunningServer
from tests.e2e.stock_client import Stream, make_inputs
from trident_llm.cli.repository import write_repository

pytestmark = pytest.mark.e2e

# Each level has a queue of its own of this size. A request's own timeout counts only against a default.
QUEUE = """
dynamic_batching {
  priority_levels: 2
  default_priority_level: 2
  default_queue_policy {
    max_queue_size: 3
    default_timeout_microseconds: 600000000
    allow_timeout_override: true
  }
}
"""
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("queue")
    settings = {
        "model": str(without_end(tiny_model, folder / "endless")), "dtype": "float32",
        "num_blocks": 3300, "admission": "block", "max_waiting": 1, "max_num_seqs": 1,
    }  # fmt: skip
    write_repository(folder / "models", "llm", settings)
    with (folder / "models" / "llm" / "config.pbtxt").open("a") as file:
        file.write(QUEUE)
    with RunningServer(
        folder, f"--model-repository={folder / 'models'}", "--no-self-check"
    ) as running:
        yield running


def inputs(max_tokens: int) -> list[Any]:
    return make_inputs("hello", {**GREEDY, "max_tokens": max_tokens}, stream=True)


def num_queued(server: RunningServer) -> float:
    """Requests in Triton's own queue."""
    return Scrape(server.metrics_port).total("nv_inference_pending_request_count", model="llm")


def num_waiting(server: RunningServer) -> float:
    """Requests in the engine's queue and at its door, as told every half second."""
    return Scrape(server.metrics_port).total("vllm:num_requests_waiting", model="llm")


@contextmanager
def held_up(server: RunningServer) -> Iterator[None]:
    """While inside, one request is computed, one waits in the engine, one at its door, and one queues.

    They come one by one, each once the one before is where it shall be; the first three are cancelled
    at the end. Each has a stream of its own: to cancel several at once is more than the front end of
    older servers bears, which then keeps one of them.
    """
    with ExitStack() as streams:
        first, second, third, last = (
            streams.enter_context(Stream(server.grpc_port)) for _ in range(4)
        )
        first.send("llm", inputs(50_000))
        wait_for(lambda: first.results, "the first one is computed")
        second.send("llm", inputs(50_000))
        wait_for(lambda: num_waiting(server) == 1, "the second one waits in the engine")
        third.send("llm", inputs(50_000))
        wait_for(lambda: num_waiting(server) == 2, "the third one waits at its door")
        last.send("llm", inputs(1))
        wait_for(lambda: num_queued(server) == 1, "the last one is in Triton's queue")
        yield
        for stream in (third, second, first):
            stream.cancel()


def test_it_refuses_beyond_its_size_and_knows_priorities(server: RunningServer) -> None:
    with Stream(server.grpc_port) as stream:
        with held_up(server):
            for number, (name, level) in enumerate((("low", 2), ("last", 2), ("high", 1)), start=2):
                stream.send("llm", inputs(1), request_id=name, priority=level)
                wait_for(lambda: num_queued(server) == number, f"{name} is queued")  # noqa: B023
            stream.send("llm", inputs(1), request_id="refused", priority=2)
            ((_, error),) = stream.wait_for(1)
            assert "Exceeds maximum queue size" in str(error)
        results = stream.wait_for(4)
    order = [result.get_response().id for result, _ in results if result is not None]
    assert order == ["high", "low", "last"]


def test_a_timeout_in_the_queue_once_its_head_was_cancelled(server: RunningServer) -> None:
    with Stream(server.grpc_port) as stream:
        with held_up(server):
            stream.send("llm", inputs(1), request_id="late", timeout=1)
            wait_for(lambda: num_queued(server) == 2, "the late one is queued")
        # The one at the door has left, so the next one is looked at, whose time has passed.
        ((_, error),) = stream.wait_for(1)
    assert "Request timeout expired" in str(error)  # Triton says so; we would say more
