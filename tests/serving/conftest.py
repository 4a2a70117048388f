"""Stands in for the module that Triton gives a model, which exists only inside its stub process."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest

from tests.serving import fake_triton

fake_triton.install(
    sys.modules.setdefault(
        "triton_python_backend_utils", types.ModuleType("triton_python_backend_utils")
    )
)


@pytest.fixture
def server_metrics() -> Iterator[fake_triton.ServerMetrics]:
    metrics = fake_triton.server_metrics
    metrics.metrics.clear()
    metrics.supported = True
    yield metrics
    metrics.metrics.clear()
    metrics.supported = True
