"""Clients that give up after a few milliseconds, hundreds of them, while others are served."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import wait_for
from tests.e2e.metrics import Scrape
from tests.e2e.server import RunningServer
from tests.e2e.test_requests import prompt
from trident_client import DeadlineExceeded, TridentError, Unavailable

pytestmark = pytest.mark.e2e

NUM_IMPATIENT = 400
AT_ONCE = 14  # with the two that stay as many as the server lets in
NUM_STAYING = 8
SAMPLING = {"max_tokens": 100, "ignore_eos": True, "temperature": 0.8}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[RunningServer]:
    """One that may have to be stopped by force.

    The gRPC front end of Triton 24.10 keeps a request whose cancel, as which a deadline counts, meets its
    last response. The engine has ended it by then, and all that is asked here holds.
    """
    with RunningServer(
        tmp_path_factory.mktemp("timeouts"), f"--model={tiny_model}", "--dtype=float32",
        "--no-self-check", "--max-num-seqs=8", "--num-blocks=400", "--max-waiting=16",
        "--drain-seconds=1", orderly=False,
    ) as running:  # fmt: skip
        yield running


def test_timeouts_of_one_to_ten_milliseconds(server: RunningServer) -> None:
    """The deadline is gRPC's own and is sent along, so either side may be the first to see it."""
    with server.client() as client:
        alone = [
            client.generate(prompt(n), seed=n, **SAMPLING).token_ids for n in range(NUM_STAYING)
        ]
    before = server.idle_stats()
    errors: list[TridentError] = []
    texts: dict[int, object] = {}
    numbers = iter(range(NUM_IMPATIENT))
    lock = threading.Lock()

    def hurry() -> None:
        with server.client(retries=0) as client:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                patience = random.Random(number).uniform(0.001, 0.010)
                try:
                    if number % 2:
                        client.generate(prompt(number), timeout=patience, **SAMPLING)
                    else:
                        client.stream(prompt(number), timeout=patience, **SAMPLING).result()
                except TridentError as error:
                    errors.append(error)

    def stay(worker: int) -> None:
        with server.client(retries=100) as client:
            for n in range(worker, NUM_STAYING, 2):
                texts[n] = client.stream(prompt(n), seed=n, **SAMPLING).result().token_ids

    threads = [threading.Thread(target=hurry) for _ in range(AT_ONCE)]
    threads += [threading.Thread(target=stay, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == NUM_IMPATIENT
    unexpected = [e for e in errors if not isinstance(e, (DeadlineExceeded, Unavailable))]
    assert unexpected == []
    assert [texts[n] for n in range(NUM_STAYING)] == alone
    after = server.idle_stats()  # each that came in is counted by one outcome
    assert after["num_free_blocks"] == after["num_blocks"]
    assert after["num_accepted_requests"] - before["num_accepted_requests"] > NUM_STAYING
    wait_for(
        lambda: (
            Scrape(server.metrics_port).total("vllm:num_requests_running") == 0
            and Scrape(server.metrics_port).total("vllm:num_requests_waiting") == 0
        ),
        "the gauges are back",
    )
