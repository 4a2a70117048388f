"""Model folders with small tokenizers, see tokenizer_builders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from .tokenizer_builders import (
    BYTE_LEVEL_CONFIG,
    SENTENCEPIECE_CONFIG,
    WORDPIECE_CONFIG,
    Save,
    make_byte_level,
    make_sentencepiece,
    make_wordpiece,
)


@pytest.fixture(scope="session")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Write a tokenizer and its tokenizer_config.json as a new folder."""

    def write(tokenizer: Tokenizer, config: Mapping[str, Any]) -> Path:
        folder = tmp_path_factory.mktemp("model")
        tokenizer.save(str(folder / "tokenizer.json"))
        full = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(full), encoding="utf-8")
        return folder

    return write


@pytest.fixture(scope="session")
def byte_level_folder(save: Save) -> Path:
    return save(make_byte_level(), BYTE_LEVEL_CONFIG)


@pytest.fixture(scope="session")
def sentencepiece_folder(save: Save) -> Path:
    return save(make_sentencepiece(), SENTENCEPIECE_CONFIG)


@pytest.fixture(scope="session")
def wordpiece_folder(save: Save) -> Path:
    return save(make_wordpiece(), WORDPIECE_CONFIG)
