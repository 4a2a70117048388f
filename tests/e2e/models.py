"""Variants of models that tests need."""

from __future__ import annotations

import json
import shutil
from pathlib import Path


def without_end(model: Path, folder: Path) -> Path:
    """A copy of a model with a context so long that a request lasts until it is cancelled."""
    shutil.copytree(model, folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 60_000}))
    return folder
