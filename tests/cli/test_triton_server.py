from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from pathlib import Path

import pytest

from trident_llm.cli import triton_server
from trident_llm.cli.errors import CommandError
from trident_llm.cli.triton_server import find_tritonserver, library_problem, prepare_server

_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_NEW_NUMPY = b"numpy._core"


@pytest.fixture(autouse=True)
def _numpy_2(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"numpy": "2.4.1"}
    known = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: versions.get(name) or known(name)
    )


def program(path: Path, marker: bytes = _NEW_NUMPY) -> Path:
    """Something that runs and whose bytes say what they should."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy("/bin/true", path)
    with path.open("ab") as file:
        file.write(marker)
    return path


def wheel_server(root: Path, stub: bytes = _NEW_NUMPY, python: str = _PYTHON) -> Path:
    """The layout of a server inside a Python package."""
    server = root / "site-packages" / "pytriton" / "tritonserver"
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        file = server / "backends" / "python" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    (root / "site-packages" / "nvidia_pytriton.libs").mkdir()
    program(server / "python_backend_stubs" / python / "triton_python_backend_stub", stub)
    return program(server / "bin" / "tritonserver")


def installed_server(root: Path, stub: bytes) -> Path:
    """The layout of a server that is installed whole."""
    program(root / "backends" / "python" / "triton_python_backend_stub", stub)
    return program(root / "bin" / "tritonserver")


def test_the_given_server_then_path_then_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path = program(tmp_path / "path" / "tritonserver")
    monkeypatch.setenv("PATH", str(on_path.parent))
    other = program(tmp_path / "other" / "server")
    assert find_tritonserver(other) == other
    assert find_tritonserver(None) == on_path

    in_package = wheel_server(tmp_path)
    (tmp_path / "site-packages" / "pytriton" / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])
    assert find_tritonserver(None) == in_package
    in_package.unlink()
    with pytest.raises(CommandError, match="pip install --no-deps nvidia-pytriton"):
        find_tritonserver(None)


def test_a_given_server_must_be_a_program(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no program")
    for path in (tmp_path / "absent", tmp_path, text):
        with pytest.raises(CommandError, match="--tritonserver names the binary"):
            find_tritonserver(path)


def test_the_package_s_backend_is_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/given")
    monkeypatch.setenv("PYTHONPATH", "/modules")
    server = prepare_server(wheel_server(tmp_path), tmp_path / "run")
    assert server.backend_directory == tmp_path / "run" / "backends"
    backend = server.backend_directory / "python"
    assert (backend / "libtriton_python.so").read_text() == "libtriton_python.so"
    assert (backend / "triton_python_backend_utils.py").is_file()
    assert os.access(backend / "triton_python_backend_stub", os.X_OK)

    libraries = server.environment["LD_LIBRARY_PATH"].split(":")
    assert libraries[0] == str(tmp_path / "site-packages" / "nvidia_pytriton.libs")
    assert libraries[-1] == "/given"
    assert server.environment["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    packages = server.environment["PYTHONPATH"].split(":")
    assert (Path(packages[0]) / "trident_llm" / "cli").is_dir()
    assert packages[-1] == "/modules"


@pytest.mark.parametrize("installed", [True, False])
def test_packages_that_are_not_installed_are_put_beside_the_stub(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_server, "_is_installed", lambda: installed)
    server = prepare_server(wheel_server(tmp_path), tmp_path / "run")
    assert server.backend_directory is not None
    package = server.backend_directory / "python" / "trident_llm" / "cli"
    assert package.is_dir() != installed


def test_a_python_without_a_stub_is_told_which_have_one(tmp_path: Path) -> None:
    binary = wheel_server(tmp_path, python="3.9")
    program(binary.parents[1] / "python_backend_stubs" / "3.8" / "triton_python_backend_stub")
    with pytest.raises(CommandError, match=rf"no stub for Python {_PYTHON}, only for 3\.8, 3\.9"):
        prepare_server(binary, tmp_path / "run")


def test_an_installed_server_uses_its_own_backends(tmp_path: Path) -> None:
    stub = f"libpython{_PYTHON}.so.1.0".encode() + _NEW_NUMPY
    server = prepare_server(installed_server(tmp_path, stub), tmp_path / "run")
    assert server.backend_directory is None
    assert not (tmp_path / "run").exists()


def test_an_installed_server_for_another_python_is_refused(tmp_path: Path) -> None:
    binary = installed_server(tmp_path, b"libpython3.4.so.1.0")
    with pytest.raises(CommandError, match=r"runs Python 3\.4, .*install Trident with Python 3\.4"):
        prepare_server(binary, tmp_path / "run")


def test_a_server_without_python_backend_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="has no Python backend"):
        prepare_server(program(tmp_path / "bin" / "tritonserver"), tmp_path / "run")


def test_a_stub_older_than_numpy_2_needs_numpy_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = wheel_server(tmp_path, stub=b"numpy.core")
    with pytest.raises(CommandError, match=r"numpy 2\.4\.1 is installed; .*'numpy<2'"):
        prepare_server(binary, tmp_path / "run")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.26.4")
    prepare_server(binary, tmp_path / "run2")


@pytest.mark.parametrize(
    ("trace", "sentence"),
    [
        (
            "\tlibb64.so.0d => not found\n\tlibc.so.6 => /lib/libc.so.6 (0x0)",
            "missing: libb64.so.0d",
        ),
        ("\tlibpython3.11.so.1.0 => not found", "apt-get install libpython"),
        ("version `GLIBC_2.35' not found (required by x)", "newer system: GLIBC_2.35"),
    ],
)
def test_missing_libraries_are_named(trace: str, sentence: str) -> None:
    assert sentence in (library_problem("stub", trace, 1) or "")


def test_libraries_are_looked_up_without_running_the_program(tmp_path: Path) -> None:
    assert library_problem("stub", "\tlibc.so.6 => /lib/libc.so.6 (0x0)", 0) is None
    binary = wheel_server(tmp_path)
    binary.write_text("neither a program nor a script")
    with pytest.raises(CommandError, match=r"tritonserver cannot be run: Exec format error"):
        prepare_server(binary, tmp_path / "run")
