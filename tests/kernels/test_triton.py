"""The Triton kernels, and the engine on them, in Triton's interpreter and on a GPU if there is one.

Triton decides at import whether it interprets, so each run is a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

from trident_kernels.triton import aot, configs, tune
from trident_kernels.triton.runtime import Device, recording

ROOT = Path(__file__).parents[2]
CHECKS = "tests/kernels/triton_checks.py"
ENGINE = "tests/kernels/triton_engine_checks.py"
STEPS = "tests/kernels/triton_step_checks.py"
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


def test_the_host_never_waits_within_a_step() -> None:
    run_pytest(STEPS, TRIDENT_KERNELS="triton", CUDA_VISIBLE_DEVICES="")


def test_kernels_compile_for_gpus_without_one() -> None:
    """The short form of `make kernels-aot`."""
    command = [sys.executable, "-m", "trident_kernels.triton.aot"]
    done = subprocess.run(
        [*command, "--shape", "smollm2-135m", "--dtype", "bfloat16"],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert "27 kernels compiled, 0 with a problem" in done.stdout
    for arch in ("sm_80", "sm_90", "sm_100"):
        assert done.stdout.count(f" {arch} ") == 9


def test_a_kernel_that_spills_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = configs.AttentionConfig(block_m=128, tile=64, num_warps=4, num_stages=2)
    monkeypatch.setattr(configs, "attention_config", lambda *args: wide)
    shape = next(shape for shape in aot.SHAPES if shape.head_dim == 256)
    recorded = list(aot.record(shape, torch.bfloat16, 80))
    launch = next(each for step, each in recorded if step == "prompt")
    report = aot.compile_launch("too much", launch, 80)
    assert report.problem.startswith("spills")
    assert "shared memory" in replace(report, spilled=0, shared=200_000).problem
    assert replace(report, spilled=0, shared=100_000).problem == ""


def test_what_is_compiled_is_what_would_run() -> None:
    """Types, constants and divisibility as Triton's own launcher finds them."""
    jit = pytest.importorskip("triton.runtime.jit")
    if not hasattr(jit, "create_function_from_signature"):
        pytest.skip("this Triton has another launcher")
    backend = make_backend(GPUTarget("cuda", 90, 32))
    for _, each in aot.record(aot.SHAPES[0], torch.bfloat16, 90):
        kernel, options = each.kernel, {**each.constants, "enable_fp_fusion": True}
        bind = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        args = [
            torch.empty(1, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
            for value in each.args
        ]
        bound, specialized, _ = bind(*args, **options)
        packed = kernel._pack_args(backend, dict(options), bound, specialized, None)
        source = aot.source_of(each)
        assert packed[1] == source.signature
        assert packed[2] == source.constants
        assert {path: value for path, value in packed[3].items() if value} == source.attrs


def test_every_configuration_is_compiled() -> None:
    used = set()
    for shape in aot.SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            for arch in aot.ARCHS:
                for _, each in aot.record(shape, dtype, arch):
                    if "TILE" in each.constants and "GROUP" in each.constants:
                        sizes = (each.constants["BLOCK_M"], each.constants["TILE"])
                        used.add((*sizes, each.num_warps, each.num_stages))
    for arch, _, _, config in (*configs.DECODE, *configs.PREFILL):
        sizes = (config.block_m, config.tile, config.num_warps, config.num_stages)
        assert sizes in used or arch not in aot.ARCHS


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_tuning_says_that_it_needs_a_gpu() -> None:
    command = [sys.executable, "-m", "trident_kernels.triton.tune"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "on a GPU, and torch sees none" in done.stderr


def test_tuning_leaves_out_what_spills() -> None:
    case = tune.make_case(aot.SHAPES[-1], torch.bfloat16, "prompt", "meta")
    with recording(lambda launch: None, Device(80, 108)):
        assert tune.spills(case, configs.AttentionConfig(128, 64, 4, 2))
        assert not tune.spills(case, configs.AttentionConfig(64, 32, 8, 2))


def test_shapes_that_no_configuration_serves_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim"):
        configs.attention_config(Device(90, 132), 2, 257, 1, False)
    with pytest.raises(ValueError, match="compute capability"):
        configs.attention_config(Device(75, 40), 2, 64, 1, False)


@pytest.mark.gpu
@needs_gpu
def test_kernels_on_a_gpu() -> None:
    run_pytest(CHECKS, **ON_GPU)


@pytest.mark.gpu
@needs_gpu
def test_the_engine_on_a_gpu() -> None:
    run_pytest(ENGINE, **ON_GPU)


@pytest.mark.gpu
@needs_gpu
def test_the_host_never_waits_within_a_step_on_a_gpu() -> None:
    run_pytest(STEPS)
