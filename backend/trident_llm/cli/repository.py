"""Makes a model repository for the engine: the shipped template with the user's settings.

The template is the folder ``model_repository`` at the top of the source tree; it is part of this
package through a link, so that it is found from a checkout and from an installed package alike.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trident_llm.cli.errors import CommandError
from trident_llm.core.config import EngineConfig

_TEMPLATES = Path(__file__).parent / "model_repository"


def write_repository(
    target: Path, model_name: str, settings: Mapping[str, Any], template: str = "llm"
) -> None:
    """Writes the model ``model_name`` with the engine's ``settings`` under the folder ``target``.

    ``template`` is the shipped model that it is a copy of: ``llm`` or ``embed``.
    """
    version = target / model_name / "1"
    version.mkdir(parents=True)
    config = (_TEMPLATES / template / "config.pbtxt").read_text(encoding="utf-8")
    config = re.sub(r'(?m)^name:\s*"[^"]*"', lambda _: f'name: "{model_name}"', config, count=1)
    (target / model_name / "config.pbtxt").write_text(config, encoding="utf-8")
    shutil.copyfile(_TEMPLATES / template / "1" / "model.py", version / "model.py")
    (version / "model.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def check_repository(folder: Path, model_name: str) -> Path:
    """The absolute path of a repository that holds ``model_name``."""
    path = folder.expanduser().absolute()
    if not (path / model_name).is_dir():
        raise CommandError(
            f"{path} holds no model named {model_name}; --model-repository names the folder above "
            "the model's, --model-name the model's"
        )
    return path


def drain_seconds(folder: Path, model_name: str) -> float:
    """How long the model in a repository lets requests finish; the default if it does not say."""
    value: object = None
    try:
        settings = json.loads((folder / model_name / "1" / "model.json").read_bytes())
        value = float(settings["drain_seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        value = EngineConfig().drain_seconds
    return value if math.isfinite(value) and value >= 0 else EngineConfig().drain_seconds
