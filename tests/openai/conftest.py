"""Fixtures: a scripted model server, a gateway in front of it, and OpenAI's client.

All tests share one of each, since a gateway takes its time to start; a test finds them as new.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.client.fake_server import TRIDENT_INPUTS, FakeServer, hello
from tests.openai.running import RunningGateway


@pytest.fixture(scope="session")
def shared_server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.stop()


@pytest.fixture(scope="session")
def gateway(shared_server: FakeServer) -> Iterator[RunningGateway]:
    with RunningGateway(shared_server.url, heartbeat=0.2) as running:
        yield running


@pytest.fixture(scope="session")
def client(gateway: RunningGateway) -> Iterator[OpenAI]:
    with gateway.openai() as client:
        yield client


@pytest.fixture
def server(shared_server: FakeServer) -> FakeServer:
    shared_server.script = hello
    shared_server.inputs = dict(TRIDENT_INPUTS)
    shared_server.requests = []
    shared_server.arrived = threading.Semaphore(0)
    return shared_server
