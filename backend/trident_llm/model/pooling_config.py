"""How a model's hidden states become one vector per text, as its sentence-transformers files say.

It imports no torch. Invariant: a :class:`PoolingConfig` that exists is followed exactly; a module or
an option that is not supported was refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trident_llm.core.embedding import PoolingMethod
from trident_llm.model.config import ModelConfigError, read_json

# Flags of 1_Pooling/config.json; exactly one of all that it holds is set.
_FLAGS: dict[str, PoolingMethod] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_NAMES: dict[str, PoolingMethod] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}


@dataclass(frozen=True)
class PoolingConfig:
    """``mean`` of a text's tokens, or its first (``cls``) or ``last`` one."""

    method: PoolingMethod
    normalize: bool  # to length 1
    max_seq_length: int | None = None  # the longest text that the model is meant for, in tokens

    @classmethod
    def from_folder(cls, folder: Path, method: PoolingMethod | None = None) -> PoolingConfig:
        """Reads modules.json and what it names.

        ``method`` is what the operator says; without modules.json it must, and the vectors are
        normalised then. Raises :class:`ModelConfigError` naming the file and the key.
        """
        if not (folder / "modules.json").is_file():
            if method is None:
                raise ModelConfigError(
                    f"{folder} has no modules.json, which says how its hidden states are pooled; set "
                    '"pooling" to "mean", "cls" or "last"'
                )
            return cls(method, normalize=True)
        modules = _read_modules(folder / "modules.json")
        kinds = [kind for kind, _ in modules]
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            raise ModelConfigError(
                f"{folder / 'modules.json'}: modules {', '.join(kinds)} are not supported; supported "
                "are Transformer, Pooling and, after them, Normalize"
            )
        if modules[0][1] not in ("", "."):
            raise ModelConfigError(
                f"{folder / 'modules.json'}: the transformer must lie in the folder itself, not in "
                f"{modules[0][1]}"
            )
        _refuse_default_prompt(folder)
        return cls(
            method or _read_method(folder / modules[1][1] / "config.json"),
            normalize=len(kinds) == 3,
            max_seq_length=_read_max_length(folder),
        )


def _read_modules(file: Path) -> list[tuple[str, str]]:
    """Each module's kind and folder, in order."""
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))
        ordered = sorted(listed, key=lambda module: module["idx"])
        return [(str(m["type"]).rsplit(".", 1)[-1], str(m["path"])) for m in ordered]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelConfigError(f"{file}: is no list of modules ({error!r})") from None


def _read_method(file: Path) -> PoolingMethod:
    values = read_json(file)
    modes = values.get("pooling_mode")
    if modes is not None:
        names = modes if isinstance(modes, list) else [modes]
        method = _NAMES.get(str(names[0])) if len(names) == 1 else None
    else:
        names = [
            n for n, value in values.items() if n.startswith("pooling_mode_") and value is True
        ]
        method = _FLAGS.get(names[0]) if len(names) == 1 else None
    if method is None:
        raise ModelConfigError(
            f"{file}: pooling by {', '.join(map(str, names)) or 'nothing'} is not supported; "
            "supported is one of mean, cls and lasttoken"
        )
    return method


def _read_max_length(folder: Path) -> int | None:
    file = folder / "sentence_bert_config.json"
    if not file.is_file():
        return None
    values = read_json(file)
    if values.get("do_lower_case"):
        raise ModelConfigError(
            f"{file}: do_lower_case true is not supported; let the tokenizer's normalizer do it"
        )
    length: Any = values.get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise ModelConfigError(f"{file}: max_seq_length must be an integer of at least 1")
    return None if length is None else int(length)


def _refuse_default_prompt(folder: Path) -> None:
    file = folder / "config_sentence_transformers.json"
    values = read_json(file) if file.is_file() else {}
    name, prompts = values.get("default_prompt_name"), values.get("prompts")
    if name is not None and isinstance(prompts, dict) and prompts.get(name):
        raise ModelConfigError(
            f"{file}: default_prompt_name is not supported; set it to null, and send the prompt with "
            "each text"
        )
