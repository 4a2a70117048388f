"""Real servers, started as users start them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.models import without_end
from tests.e2e.server import RunningServer


@pytest.fixture(scope="session")
def small_pool_server(
    tmp_path_factory: pytest.TempPathFactory, default_model: Path
) -> Iterator[RunningServer]:
    """The default model in float32, with so few blocks that requests preempt each other."""
    with RunningServer(
        tmp_path_factory.mktemp("small-pool"),
        "--dtype=float32", "--num-blocks=96", "--block-size=16", "--self-check",
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(scope="module")
def tiny_server(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[RunningServer]:
    """A tiny model, in explicit control mode, so that it can be unloaded and loaded."""
    with RunningServer(
        tmp_path_factory.mktemp("tiny"),
        f"--model={tiny_model}", "--dtype=float32", "--model-control-mode=explicit",
        "--no-self-check", "--max-num-seqs=8", "--num-blocks=400", "--max-waiting=16",
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(scope="session")
def endless_server(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[RunningServer]:
    """A tiny model whose requests last until they are cancelled, as far as a test can tell.

    For whatever must happen while a request runs: a fast machine ends a short one before the test looks.
    """
    folder = tmp_path_factory.mktemp("endless")
    with RunningServer(
        folder, f"--model={without_end(tiny_model, folder / 'model')}", "--dtype=float32",
        "--no-self-check", "--max-num-seqs=4", "--num-blocks=15001", "--max-waiting=64",
    ) as server:  # fmt: skip
        yield server
