"""Which implementation runs, and that missing pieces degrade instead of failing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trident_kernels as ops
from trident_kernels import reference

KERNELS = Path(ops.__file__).parents[1]

PROGRAM = """
import torch, trident_kernels as ops
from trident_kernels import reference
x, w = torch.randn(3, 64), torch.randn(64)
assert torch.allclose(ops.rms_norm(x, w, 1e-5), reference.rms_norm(x, w, 1e-5), atol=1e-6)
print(ops.HAS_CPU_KERNELS)
"""


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(KERNELS), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_numba_the_reference_runs() -> None:
    assert run("import sys; sys.modules['numba'] = None\n" + PROGRAM) == "False"


def test_without_triton_a_cuda_build_still_imports() -> None:
    absent = "import sys, torch; sys.modules['triton'] = None; torch.version.cuda = '13.0'\n"
    assert run(absent + PROGRAM + "print(ops.HAS_TRITON_KERNELS)").endswith("False")


def test_triton_kernels_are_not_loaded_for_a_cpu() -> None:
    if torch.version.cuda is None:
        loaded = "print('trident_kernels.triton' in sys.modules)"
        assert run("import sys\n" + PROGRAM + loaded).endswith("False")


def test_with_compilation_disabled_the_reference_runs() -> None:
    assert run(PROGRAM, NUMBA_DISABLE_JIT="1") == "False"


def test_without_a_writable_cache_kernels_still_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jit = pytest.importorskip("trident_kernels.cpu.jit")
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(jit.settings, "CACHE_DIR", str(blocked))
    monkeypatch.setattr(jit, "__file__", str(blocked / "cpu" / "jit.py"))
    assert jit._choose_cache_folder() is None
    monkeypatch.setattr(jit, "CACHE_FOLDER", None)

    @jit.kernel(parallel_from=1)  # type: ignore[untyped-decorator]
    def touch(mode: int, threads: int, value: int) -> None:
        pass

    touch(0, 0, 7)


def test_cache_folder_follows_numba_cache_dir(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jit = pytest.importorskip("trident_kernels.cpu.jit")
    monkeypatch.setattr(jit.settings, "CACHE_DIR", str(tmp_path))
    assert jit._choose_cache_folder().parent == tmp_path


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_take_the_reference(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 64).to(dtype), torch.ones(64, dtype=dtype)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert ops.silu_and_mul(x).dtype is dtype


def test_full_disk_while_storing_code_is_survived() -> None:
    jit = pytest.importorskip("trident_kernels.cpu.jit")
    calls = []

    def compiled(*args: float) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise OSError("no space left on device")

    jit.Kernel(compiled, compiled, parallel_from=1)(0, 0, 5)
    assert calls == [(0, 1, 5), (0, 1, 5)]


def test_compile_loads_everything() -> None:
    ops.compile_cpu_kernels()
    if ops.HAS_CPU_KERNELS:
        from trident_kernels.cpu.compile import KERNELS as kernels

        for each in kernels:
            assert len(each.serial.signatures) == len(each.parallel.signatures) == 1


def test_starting_the_kernels_threads_changes_no_setting_of_torch() -> None:
    """Numba and torch may share one OpenMP, whose number of threads Numba sets when it starts."""
    program = (
        "import torch; torch.set_num_threads(1); import trident_kernels as ops;"
        "ops.rms_norm(torch.ones(9000, 64), torch.ones(64), 1e-5); print(torch.get_num_threads())"
    )
    assert run(program, NUMBA_NUM_THREADS="2") == "1"
