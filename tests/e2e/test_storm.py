"""Hundreds of clients that leave at any moment: nothing stays behind, and nobody else notices."""

from __future__ import annotations

import random
import threading

import pytest

from tests.cli.command import wait_for
from tests.e2e.metrics import Scrape
from tests.e2e.server import RunningServer
from tests.e2e.test_requests import prompt
from trident_client import TridentError, Unavailable

pytestmark = pytest.mark.e2e

NUM_LEAVING = 200
NUM_STAYING = 12
AT_ONCE = 14  # with the two that stay as many as the server lets in
SAMPLING = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.8}
SECONDS = 30.0  # until all is as it was; two on a machine that is not crowded


def test_a_storm_of_disconnects(tiny_server: RunningServer) -> None:
    with tiny_server.client() as client:
        alone = [
            client.generate(prompt(n), seed=n, **SAMPLING).token_ids for n in range(NUM_STAYING)
        ]
    before = tiny_server.idle_stats()
    assert before["num_free_blocks"] == before["num_blocks"]
    left: list[int] = []
    unexpected: list[BaseException] = []
    numbers = iter(range(1000, 1000 + NUM_LEAVING))
    lock = threading.Lock()

    def leave() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            moment = random.Random(number)
            # A connection of its own, which goes with the request in whatever state it is.
            with tiny_server.client(retries=0) as client:
                try:
                    stream = client.stream(prompt(number), seed=number, n=1, **SAMPLING)
                    reads = moment.choice([0, 0, 1, 2, 5, 20])
                    for _ in range(reads):
                        next(stream)
                    if moment.random() < 0.5:
                        stream.cancel()
                    left.append(number)
                except (Unavailable, StopIteration):
                    left.append(number)
                except TridentError as error:
                    unexpected.append(error)

    texts: dict[int, list[int]] = {}

    def stay(worker: int) -> None:
        with tiny_server.client(retries=100) as client:
            for n in range(worker, NUM_STAYING, 2):
                texts[n] = client.stream(prompt(n), seed=n, **SAMPLING).result().token_ids

    threads = [threading.Thread(target=leave) for _ in range(AT_ONCE)]
    threads += [threading.Thread(target=stay, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with tiny_server.client() as client:
        wait_for(lambda: client.stats()["num_requests"] == 0, "all requests end", seconds=SECONDS)
        stats = client.stats()
        assert stats["num_free_blocks"] == stats["num_blocks"]
        assert stats["num_open_requests"] == 1  # the one that asks
        wait_for(
            lambda: (
                Scrape(tiny_server.metrics_port).total("vllm:num_requests_running") == 0
                and Scrape(tiny_server.metrics_port).total("vllm:num_requests_waiting") == 0
            ),
            "the gauges are back",
            seconds=SECONDS,
        )
    assert unexpected == []
    assert len(left) == NUM_LEAVING
    assert [texts[n] for n in range(NUM_STAYING)] == alone
    tiny_server.idle_stats()
