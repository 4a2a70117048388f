"""The Triton kernels, and the engine on them, in Triton's interpreter and on a GPU if there is one.

Triton decides at import whether it interprets, so each run is a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
CHECKS = "tests/kernels/triton_checks.py"
ENGINE = "tests/kernels/triton_engine_checks.py"
INTERPRETED = {"TRIDENT_KERNELS": "triton", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
ON_GPU = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # the checks ask torch for determinism
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def run_pytest(path: str, *arguments: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]


def test_kernels_in_the_interpreter() -> None:
    run_pytest(CHECKS, **INTERPRETED)


def test_the_engine_in_the_interpreter() -> None:
    run_pytest(ENGINE, **INTERPRETED)


@pytest.mark.gpu
@needs_gpu
def test_kernels_on_a_gpu() -> None:
    run_pytest(CHECKS, **ON_GPU)


@pytest.mark.gpu
@needs_gpu
def test_the_engine_on_a_gpu() -> None:
    run_pytest(ENGINE, **ON_GPU)
