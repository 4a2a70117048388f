"""The body of ``POST /v1/responses``, read as the chat that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trident_client.openai.chat_request import ChatRequest
from trident_client.openai.errors import bad_request
from trident_client.openai.fields import Generation, parse_body

__all__ = ["ResponsesRequest"]

_TEXT_PARTS = ("input_text", "output_text", "text")


class _Reasoning(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    effort: str | None = None


class _Text(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class _FunctionTool(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Generation):
    """The body. Nothing is stored, so each request brings the whole conversation."""

    input: Any = Field()
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: _Text | None = None
    reasoning: _Reasoning | None = None
    tools: list[_FunctionTool] | None = Field(default=None, max_length=128)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None

    def as_chat(self) -> ChatRequest:
        """The same, asked of the other endpoint. Raises `ApiError`."""
        for name in ("n", "best_of"):
            if getattr(self, name) not in (None, 1):
                raise bad_request(name, "must be 1 here")
        body: dict[str, Any] = {
            **self.given(),
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "tools": self._tools(),
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
            "cache_salt": self.cache_salt,
        }
        if self.text is not None and self.text.format is not None:
            body["response_format"] = _response_format(self.text.format)
        return parse_body(ChatRequest, body)

    def _tools(self) -> list[dict[str, Any]] | None:
        if self.tools is None:
            return None
        return [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in self.tools
        ]

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        if not isinstance(self.input, list) or not self.input:
            raise bad_request("input", "must be a string or a list of items")
        thought = ""  # reasoning that belongs to the assistant's next message
        for number, item in enumerate(self.input):
            place = f"input[{number}]"
            if not isinstance(item, dict):
                raise bad_request(place, "must be an object")
            kind = item.get("type", "message")
            if kind == "reasoning":
                thought += _reasoning_of(item)
                continue
            if kind == "message":
                message = {"role": item.get("role"), "content": _content(item, "content", place)}
            elif kind == "function_call":
                message = _call_message(item, place)
            elif kind == "function_call_output":
                message = {
                    "role": "tool",
                    "tool_call_id": item.get("call_id"),
                    "content": _content(item, "output", place),
                }
            else:
                raise bad_request(f"{place}.type", "is not supported", "unsupported_parameter")
            if thought and message["role"] == "assistant":
                message["reasoning_content"], thought = thought, ""
            _append(messages, message)
        return messages


def _append(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Calls belong to the assistant's message before them."""
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and "tool_calls" in message:
        last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
    else:
        messages.append(message)


def _content(item: Mapping[str, Any], name: str, place: str) -> str:
    content = item.get(name)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{place}.{name}", "must be a string or a list of text parts")
    texts: list[str] = []
    for number, part in enumerate(content):
        known = isinstance(part, dict) and part.get("type") in _TEXT_PARTS
        if not known or not isinstance(part.get("text"), str):
            raise bad_request(f"{place}.{name}[{number}]", "must be a part with text")
        texts.append(part["text"])
    return "\n".join(texts)


def _call_message(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    for name in ("call_id", "name", "arguments"):
        if not isinstance(item.get(name), str):
            raise bad_request(f"{place}.{name}", "must be a string")
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _reasoning_of(item: Mapping[str, Any]) -> str:
    parts = item.get("content")
    return "".join(
        part["text"]
        for part in (parts if isinstance(parts, list) else ())
        if isinstance(part, dict) and isinstance(part.get("text"), str)
    )


def _response_format(form: Mapping[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return dict(form)
    inner = {name: value for name, value in form.items() if name != "type"}
    return {"type": "json_schema", "json_schema": inner}
