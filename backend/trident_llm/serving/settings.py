"""What a model's folder says: the engine's settings, and the tokenizer and chat template beside them.

Everything wrong here is a :class:`ConfigError` (or a tokenizer's or template's own error) with one
sentence that says what to change.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from trident_llm.core.config import (
    DEFAULT_EMBEDDING_MODEL,
    DEFAULT_MODEL,
    EngineConfig,
    parse_engine_config,
)
from trident_llm.core.embedding import EmbeddingConfig, parse_embedding_config
from trident_llm.core.errors import ConfigError
from trident_llm.serving.progress import Progress
from trident_llm.text.chat import ChatTemplate
from trident_llm.text.tokenizer import Tokenizer

logger = logging.getLogger("trident")


Settings = TypeVar("Settings", EngineConfig, EmbeddingConfig)


def read_settings(version_folder: Path, progress: Progress) -> tuple[EngineConfig, list[str]]:
    """The engine's settings from ``model.json`` in the version folder, and warnings.

    The default model, which the shipped file names, is fetched where it is not there yet.
    """
    return _read_settings(version_folder, progress, parse_engine_config, DEFAULT_MODEL)


def read_embedding_settings(
    version_folder: Path, progress: Progress
) -> tuple[EmbeddingConfig, list[str]]:
    """As :func:`read_settings`, for a model that embeds."""
    return _read_settings(version_folder, progress, parse_embedding_config, DEFAULT_EMBEDDING_MODEL)


def _read_settings(
    version_folder: Path,
    progress: Progress,
    parse: Callable[[Mapping[str, Any]], tuple[Settings, list[str]]],
    default: str,
) -> tuple[Settings, list[str]]:
    file = version_folder / "model.json"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{file} is missing; it must hold the engine's settings, at least "
            '{"model": "/path/to/model/folder"}'
        ) from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(settings, dict) or not isinstance(settings.get("model"), str):
        raise ConfigError(f'{file} must be a JSON object with "model": a model folder')
    model = version_folder / settings["model"]  # an absolute path stays as it is
    config, warnings = parse({**settings, "model": str(model)})
    if settings["model"] == default and not model.exists():
        return replace(config, model=str(_default_model(default, file, progress))), warnings
    if not settings["model"] or not model.exists():
        raise ConfigError(
            f"model: {model} does not exist; give the folder of a Hugging Face model or a .gguf "
            f"file on this machine, since only {default} is downloaded"
        )
    return config, warnings


def _default_model(name: str, file: Path, progress: Progress) -> Path:
    """The folder of the default model ``name``, which ``file`` names."""
    from trident_llm.model.default_model import DEFAULT_MODELS, default_home, fetch_model

    def count(what: str, done: int, total: int) -> None:
        if what == "download" and done == 0:
            title = DEFAULT_MODELS[name].title
            logger.info("fetching the default model, %s; done once", title)
        else:
            progress.count(done, total)

    home = default_home()
    progress.begin("model")
    try:
        return fetch_model(name, home, count)
    except (ConfigError, OSError) as error:
        raise ConfigError(
            f'{error}: set "model" in {file} to the folder of a model, or fetch the default one into '
            f"{home} beforehand, with python3 -m trident_llm.model.default_model"
        ) from None


def reports_metrics(model_config: Mapping[str, Any]) -> bool:
    """Whether config.pbtxt leaves metrics on, under the name that vllm_backend's users know."""
    parameter = model_config.get("parameters", {}).get("REPORT_CUSTOM_METRICS", {})
    return str(parameter.get("string_value", "true")).strip().lower() != "false"


def load_texts(config: EngineConfig | EmbeddingConfig) -> tuple[Tokenizer, ChatTemplate | None]:
    """The tokenizer and the chat template, which a GGUF file without a folder holds itself."""
    if config.tokenizer is not None:
        return _texts_of_folder(Path(config.tokenizer))
    path = Path(config.model)
    if path.is_dir() and any((path / name).is_file() for name in _TOKENIZER_FILES):
        return _texts_of_folder(path)
    # Imported here: only this needs numpy's and tokenizers' larger half.
    from trident_llm.model.gguf import GgufFile, find_gguf
    from trident_llm.model.gguf_tokenizer import write_tokenizer

    gguf = find_gguf(path)
    if gguf is None:
        return _texts_of_folder(path)
    with tempfile.TemporaryDirectory(prefix="trident-tokenizer-") as folder:
        write_tokenizer(GgufFile(gguf), Path(folder))
        return _texts_of_folder(Path(folder))


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def _texts_of_folder(folder: Path) -> tuple[Tokenizer, ChatTemplate | None]:
    return Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder)


def choose_device(args: Mapping[str, str]) -> None:
    """Lets this process see the device of its instance alone; must come before torch is imported.

    KIND_GPU computes on the device that Triton names, KIND_CPU on none. KIND_MODEL leaves the choice
    to the setting ``device``.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES names fewer devices than Triton counts.
    """
    kind = args.get("model_instance_kind")
    if kind == "CPU":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if kind != "GPU":
        return
    device = args.get("model_instance_device_id", "0")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        devices = [entry.strip() for entry in visible.split(",")]
        if int(device) >= len(devices):
            raise ConfigError(
                f"instance_group asks for GPU {device}, but CUDA_VISIBLE_DEVICES names only "
                f"{len(devices)} of them"
            )
        device = devices[int(device)]
    os.environ["CUDA_VISIBLE_DEVICES"] = device
