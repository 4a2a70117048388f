"""Every example in a docstring of the client holds, run against the scripted server."""

from __future__ import annotations

import asyncio
import doctest
import importlib
import pkgutil

import pytest

import trident_client
from trident_client import AsyncClient, Client

from .fake_server import FakeServer

MODULES = ["trident_client"] + [
    f"trident_client.{module.name}" for module in pkgutil.iter_modules(trident_client.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, server: FakeServer, client: Client) -> None:
    module = importlib.import_module(name)
    given = {
        "url": server.url,
        "client": client,
        "asyncio": asyncio,
        "AsyncClient": AsyncClient,
        "Client": Client,
    }
    outcome = doctest.testmod(module, extraglobs=given)
    assert outcome.failed == 0


def test_the_public_methods_have_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in ("client", "aio"):
        module = importlib.import_module(f"trident_client.{name}")
        assert sum(bool(test.examples) for test in finder.find(module)) >= 3
