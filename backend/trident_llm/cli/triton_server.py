"""Finds a tritonserver and works out how it has to be started.

There are two kinds. One is installed whole, as in NVIDIA's containers: found on PATH, with backends
of its own. The other is the one inside the Python package nvidia-pytriton, whose Python backend has to
be put together: the backend expects the stub (the process that runs a Python model) beside itself, in
the build for the running Python. Invariant: what is returned starts; a library, stub or Python version
that is missing is a :class:`CommandError`, not a server that dies with a line in its log.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trident_llm.cli.errors import CommandError

_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_STUB = "triton_python_backend_stub"
_SHARED_FILES = ("libtriton_python.so", "triton_python_backend_utils.py")
_SYSTEM_BACKENDS = Path("/opt/tritonserver/backends")


@dataclass(frozen=True)
class TritonServer:
    """A tritonserver and what its processes need to find."""

    binary: Path
    backend_directory: Path | None  # None: the server knows its own
    environment: Mapping[str, str]  # the whole environment of the server


def find_tritonserver(explicit: Path | None) -> Path:
    """The binary: the given one, the one on PATH, or the one of the package nvidia-pytriton."""
    if explicit is not None:
        if not os.access(explicit, os.X_OK) or explicit.is_dir():
            raise CommandError(
                f"{explicit} is not a program; --tritonserver names the binary itself"
            )
        return explicit.absolute()
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return Path(on_path).absolute()
    package = importlib.util.find_spec("pytriton")
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        binary = Path(folder) / "tritonserver" / "bin" / "tritonserver"
        if binary.is_file():
            return binary
    raise CommandError(
        "no tritonserver was found on PATH or in Python's packages; run this in a Triton server "
        "container, or install one with: pip install --no-deps nvidia-pytriton==0.7.0"
    )


def prepare_server(binary: Path, run_directory: Path) -> TritonServer:
    """Lays out a backend directory under ``run_directory`` where needed and checks every library."""
    root = binary.resolve().parent.parent
    stubs = root / "python_backend_stubs"
    environment = _environment(root)
    if stubs.is_dir():
        backends = run_directory / "backends"
        stub = _lay_out_backend(root / "backends" / "python", stubs, backends / "python")
    else:
        backends = None
        stub = _installed_stub(root)
    _check_libraries(binary, environment)
    _check_libraries(stub, environment)
    _check_numpy(stub)
    return TritonServer(binary, backends, environment)


def _own_packages() -> list[Path]:
    """The folders of the packages that the model imports."""
    specs = [importlib.util.find_spec(name) for name in ("trident_llm", "trident_kernels")]
    return [
        Path(folder).resolve()
        for spec in specs
        if spec is not None
        for folder in spec.submodule_search_locations or []
    ]


def _is_installed() -> bool:
    """Whether every Python of this environment finds our packages by itself."""
    # Asked of the folders, since in a checkout the metadata that lies around there comes first.
    folders = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    return any(True for folder in folders for _ in folder.glob("trident_llm-*.dist-info"))


def _environment(root: Path) -> dict[str, str]:
    """Our environment, with the paths by which server and stub find libraries and packages.

    The stub embeds a Python, which takes its prefix, and with it the virtual environment and what is
    installed there, from the first python3 on PATH. Stubs for Python 3.11 and later ignore PYTHONPATH.
    """
    environment = dict(os.environ)
    libraries = [str(folder) for folder in root.parent.parent.glob("nvidia_pytriton.libs")]
    # Some Python builds report a folder of the machine they were built on, hence the second guess.
    for library in (sysconfig.get_config_var("LIBDIR"), os.path.join(sys.base_prefix, "lib")):
        if library and Path(library).is_dir():
            libraries.append(library)
    libraries += filter(None, environment.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(dict.fromkeys(libraries))
    packages = [str(folder.parent) for folder in _own_packages()]
    packages += filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(packages))
    scripts = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join([scripts, environment.get("PATH", os.defpath)])
    environment.pop("PYTHONHOME", None)
    if "OMP_WAIT_POLICY" not in environment:
        # OpenMP threads that wait go to sleep soon. Spinning as long as libgomp does by default takes
        # the cores from the server's own threads: on a busy machine it makes a step ten times slower.
        environment.setdefault("GOMP_SPINCOUNT", "1000")
    return environment


def _lay_out_backend(shared: Path, stubs: Path, target: Path) -> Path:
    """Links the Python backend and the stub of the running Python into ``target``."""
    stub = stubs / _PYTHON / _STUB
    if not stub.is_file():
        known = sorted(
            (folder.name for folder in stubs.iterdir() if (folder / _STUB).is_file()),
            key=lambda version: [int(part) for part in version.split(".")],
        )
        raise CommandError(
            f"this tritonserver has no stub for Python {_PYTHON}, only for {', '.join(known)}; "
            "make the virtual environment with one of these"
        )
    target.mkdir(parents=True)
    # The stub searches this folder too, so our packages are found even if they are not installed.
    packages = [] if _is_installed() else _own_packages()
    for source in (*(shared / name for name in _SHARED_FILES), stub, *packages):
        (target / source.name).symlink_to(source)
    return target / _STUB


def _installed_stub(root: Path) -> Path:
    """The stub of a server that is installed whole; it must be built for the running Python."""
    candidates = [base / "python" / _STUB for base in (root / "backends", _SYSTEM_BACKENDS)]
    stub = next((path for path in candidates if path.is_file()), None)
    if stub is None:
        raise CommandError(
            f"the server in {root} has no Python backend ({candidates[0]} is missing); use an image "
            "or a build of Triton server that includes it"
        )
    linked = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    if linked is not None and linked[1].decode() != _PYTHON:
        raise CommandError(
            f"the Python backend of this tritonserver runs Python {linked[1].decode()}, but this is "
            f"Python {_PYTHON}; install Trident with Python {linked[1].decode()}"
        )
    return stub


def _check_numpy(stub: Path) -> None:
    """Stubs built before numpy 2 misread its arrays: they die of the first string they receive."""
    version = importlib.metadata.version("numpy")
    # The module by which code that knows numpy 2 finds it.
    if int(version.split(".")[0]) >= 2 and b"numpy._core" not in stub.read_bytes():
        raise CommandError(
            f"the Python backend of this tritonserver works with numpy 1 only, and numpy {version} is "
            "installed; run: pip install 'numpy<2'"
        )


def _check_libraries(program: Path, environment: Mapping[str, str]) -> None:
    """Asks the dynamic linker what it would load, without running the program."""
    try:
        traced = subprocess.run(
            [str(program)],
            env={**environment, "LD_TRACE_LOADED_OBJECTS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise CommandError(f"{program} cannot be run: {error.strerror}") from None
    problem = library_problem(program.name, traced.stdout, traced.returncode)
    if problem is not None:
        raise CommandError(problem)


def library_problem(name: str, trace: str, status: int) -> str | None:
    """What keeps the program ``name`` from starting, by the dynamic linker's answer; None if nothing."""
    missing = re.findall(r"^\s*(\S+) => not found", trace, re.MULTILINE)
    glibc = re.search(r"version `(GLIBC[\w.]*)' not found", trace)
    if glibc is not None:
        return f"{name} needs a newer system: {glibc[1]} or later"
    if any(library.startswith("libpython") for library in missing):
        return (
            f"{name} needs libpython{_PYTHON}.so.1.0, which this Python does not bring; install it "
            f"(on Debian and Ubuntu: apt-get install libpython{_PYTHON}) or use a Python built with "
            "--enable-shared"
        )
    if missing or status:
        what = ", ".join(missing) or trace.strip()[-200:]
        return f"{name} cannot start, a library is missing: {what}"
    return None
