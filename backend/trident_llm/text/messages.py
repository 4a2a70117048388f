"""Chat messages and tools as a template may see them: checked, and made of plain JSON values.

Owns what a valid chat is. It must not know templates or tokenizers.

Invariant: what comes out shares no object with what went in, holds only JSON values, and no error
repeats any of the caller's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_MAX_DEPTH = 64
_SHORT_NAME = re.compile(r"[a-z_]{1,32}")
# Names a message's reasoning is passed under; templates read one or another of them.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplateError(Exception):
    """A chat that cannot be rendered; the sentence says what to change."""


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of the messages, ready for a template.

    Each is a dict with `role` (string) and `content`: a string, a list of
    `{"type": "text", "text": ...}` parts, or null beside `tool_calls`. Keys that are null are left
    out (templates test whether a key is there), the reasoning of an assistant is given under every
    name that templates use, and the JSON text of a call's arguments is parsed, because templates
    write it out again.

    Raises ChatTemplateError naming the place, as in `messages[1].content[0].type`.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ChatTemplateError("messages must be a list of at least one message")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return a copy of the tools, ready for a template; None for none, also for an empty list.

    Raises ChatTemplateError naming the place, as in `tools[0]`.
    """
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        raise ChatTemplateError("tools must be a list of objects")
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise ChatTemplateError(f"tools[{i}] must be an object")
    return [copy_json(tool, f"tools[{i}]") for i, tool in enumerate(tools)] or None


def copy_json(value: Any, place: str, depth: int = 0) -> Any:
    """Return a deep copy of a JSON value.

    Raises ChatTemplateError naming the place if it holds anything else or is nested too deep.
    """
    if depth > _MAX_DEPTH:
        raise ChatTemplateError(f"{place} must not be nested deeper than {_MAX_DEPTH} levels")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if type(value) in (list, tuple):
        return [copy_json(item, place, depth + 1) for item in value]
    if type(value) is dict:
        if not all(type(key) is str for key in value):
            raise ChatTemplateError(f"{place} must have only strings as keys")
        return {key: copy_json(item, place, depth + 1) for key, item in value.items()}
    raise ChatTemplateError(f"{place} must hold only JSON values")


def with_joined_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the text parts of each content joined by line breaks."""
    return [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def with_wrapped_strings(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with each content string as a list of one text part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _check_message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ChatTemplateError(f"{place} must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ChatTemplateError(f"{place}.role must be a string that is not empty")
    tool_calls = message.get("tool_calls")
    if tool_calls is not None:
        _check_tool_calls(tool_calls, f"{place}.tool_calls")
    content = message.get("content")
    if isinstance(content, list | tuple):
        for i, part in enumerate(content):
            _check_part(part, f"{place}.content[{i}]")
    elif content is None:
        if not tool_calls:
            raise ChatTemplateError(f"{place}.content must be given (only tool_calls replace it)")
    elif not isinstance(content, str):
        raise ChatTemplateError(f"{place}.content must be a string or a list of text parts")
    given = {key: value for key, value in message.items() if value is not None}
    copied: dict[str, Any] = copy_json(given, place)
    for call in copied.get("tool_calls", ()):
        _parse_arguments(call)
    return _with_reasoning_names(copied)


def _check_part(part: Any, place: str) -> None:
    if not isinstance(part, dict):
        raise ChatTemplateError(f"{place} must be an object with type and text")
    kind = part.get("type")
    if kind != "text":
        # The name of a kind ("image_url") helps; anything else is the caller's text.
        named = f" ({kind})" if isinstance(kind, str) and _SHORT_NAME.fullmatch(kind) else ""
        raise ChatTemplateError(f"{place}.type{named} is not supported; send only text parts")
    if not isinstance(part.get("text"), str):
        raise ChatTemplateError(f"{place}.text must be a string")


def _check_tool_calls(tool_calls: Any, place: str) -> None:
    if not isinstance(tool_calls, list | tuple):
        raise ChatTemplateError(f"{place} must be a list of objects")
    for i, call in enumerate(tool_calls):
        if not isinstance(call, dict):
            raise ChatTemplateError(f"{place}[{i}] must be an object")


def _parse_arguments(call: dict[str, Any]) -> None:
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return
    try:
        arguments = json.loads(function["arguments"] or "{}")
        if isinstance(arguments, dict):
            function["arguments"] = copy_json(arguments, "arguments")
    except (ValueError, RecursionError, ChatTemplateError):
        return  # a model may have written broken JSON: the template shows it as it is


def _with_reasoning_names(message: dict[str, Any]) -> dict[str, Any]:
    for key in _REASONING_KEYS:
        if (reasoning := message.get(key)) is not None:
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message
