"""Fixtures: a scripted server for each test, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trident_client import Client, RetryPolicy

from .fake_server import FakeServer

QUICK = RetryPolicy(limit=2, first_delay=0.001, max_delay=0.002)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.stop()


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client(server.url, retries=QUICK) as client:
        yield client
