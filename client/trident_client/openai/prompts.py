"""The four forms in which OpenAI's clients send texts: one or several, as strings or token ids."""

from __future__ import annotations

from typing import Any

__all__ = ["Prompt", "checked_prompts", "split_prompts"]

Prompt = str | list[int]


def checked_prompts(value: Any) -> Any:
    """`value`, if it has one of the forms; else ValueError, as a model's validator raises it."""
    items = value if isinstance(value, list) and not _are_ids(value) else [value]
    kinds = {str if isinstance(item, str) else list if _are_ids(item) else None for item in items}
    if not items or kinds not in ({str}, {list}):
        raise ValueError(
            "must be a string, a list of token ids, or a list of strings or of such lists"
        )
    return value


def split_prompts(value: Any) -> list[Prompt]:
    """Each text of a checked value. One list of ids is one text."""
    several = isinstance(value, list) and not _are_ids(value)
    return value if several else [value]


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    )
