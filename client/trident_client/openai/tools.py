"""The tools of a request: their choice, and the grammar that makes a call's arguments valid.

Owns what is sent to the model server on behalf of tools; how calls look in a text is `output`'s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trident_client.openai.errors import bad_request

__all__ = ["Function", "Tool", "ToolUse", "read_tool_choice"]

_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
_MAX_CALLS = 32
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


class Function(BaseModel):
    """What may be called."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: Function


@dataclass(frozen=True)
class ToolUse:
    """What tools mean for one request.

    tools: for the template. parser: how calls are found in the output. named: the tool whose
    arguments the output is. sampling: the grammar, as a sampling parameter.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    names: Sequence[str] = ()
    parser: str = "off"
    named: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_forced(self) -> bool:
        """Whether the output is calls and nothing else."""
        return self.named is not None or self.parser == "array"

    @property
    def constrains_or_parses(self) -> bool:
        """Whether the output may hold calls."""
        return self.is_forced or self.parser != "off"


def read_tool_choice(
    tools: Sequence[Tool], choice: Any, *, tool_parser: str, parallel: bool
) -> ToolUse:
    """What `choice` makes of `tools`. Raises `ApiError`."""
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad_request("tools", "must have different names")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice", "needs tools")
        return ToolUse()
    if choice == "none":
        return ToolUse()  # neither shown to the model nor looked for
    shown = [tool.model_dump(exclude_none=True) for tool in tools]
    if choice in (None, "auto"):
        if tool_parser == "off":
            raise bad_request("tools", "are not read here: the gateway has --tool-parser off")
        return _auto(tools, shown, names, tool_parser)
    if choice == "required":
        schema = _calls_schema(tools, parallel)
        return ToolUse(shown, names, "array", None, {"structured_outputs": {"json": schema}})
    named = _chosen_name(choice)
    if named not in names:
        raise bad_request("tool_choice", "must name one of tools")
    schema = dict(tools[names.index(named)].function.parameters or _NO_ARGUMENTS)
    return ToolUse(shown, names, "off", named, {"structured_outputs": {"json": schema}})


def _chosen_name(choice: Any) -> str:
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function", choice)  # the other API has the name beside the type
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return str(function["name"])
    raise bad_request(
        "tool_choice",
        'must be "none", "auto", "required" or {"type": "function", "function": {"name"}}',
    )


def _auto(
    tools: Sequence[Tool], shown: list[dict[str, Any]], names: list[str], tool_parser: str
) -> ToolUse:
    if not any(tool.function.strict for tool in tools):
        return ToolUse(shown, names, tool_parser)
    if tool_parser not in ("auto", "hermes"):
        raise bad_request(
            "tools",
            f"cannot be strict with --tool-parser {tool_parser} unless tool_choice is required",
        )
    # Valid arguments can be promised only of calls in the one form that the grammar knows.
    return ToolUse(shown, names, "hermes", None, {"structured_outputs": _strict_tags(tools)})


def _strict_tags(tools: Sequence[Tool]) -> dict[str, Any]:
    """Free text, in which ``<tool_call>`` begins a call that follows its tool's schema."""
    tags = [
        {
            "type": "tag",
            "begin": f'<tool_call>\n{{"name": "{tool.function.name}", "arguments": ',
            "content": {
                "type": "json_schema",
                "json_schema": dict(tool.function.parameters or _NO_ARGUMENTS)
                if tool.function.strict
                else {"type": "object"},
            },
            "end": "}\n</tool_call>",
        }
        for tool in tools
    ]
    form = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags}
    return {"structural_tag": {"type": "structural_tag", "format": form}}


def _calls_schema(tools: Sequence[Tool], parallel: bool) -> dict[str, Any]:
    """A list of calls, each an object with a tool's name and arguments."""
    definitions: dict[str, Any] = {}
    kinds = []
    for number, tool in enumerate(tools):
        parameters: Any = dict(tool.function.parameters or _NO_ARGUMENTS)
        if "$ref" in repr(parameters):
            # What its references mean is counted from the schema's own root.
            place = f"#/$defs/tool{number}"
            definitions[f"tool{number}"] = _moved(parameters, place)
            parameters = {"$ref": place}
        kinds.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.function.name},
                    "parameters": parameters,
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema = {
        "type": "array",
        "items": kinds[0] if len(kinds) == 1 else {"anyOf": kinds},
        "minItems": 1,
        "maxItems": _MAX_CALLS if parallel else 1,
    }
    return {**schema, "$defs": definitions} if definitions else schema


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references are right again at `place`."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: re.sub("^#", place, item)
        if key == "$ref" and isinstance(item, str)
        else _moved(item, place)
        for key, item in schema.items()
    }
