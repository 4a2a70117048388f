"""Chat templates: messages to the text or the ids that a model was trained on.

Owns the choice of a template, the form of contents it takes, and the rule that a caller's text
never becomes a control token. It must not know requests or sampling.

Invariant: in the ids of a chat, every control token was written by the template; an error never
repeats a message's text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trident_llm.text.literals import LiteralMask
from trident_llm.text.messages import (
    ChatTemplateError,
    check_messages,
    check_tools,
    copy_json,
    with_joined_parts,
    with_wrapped_strings,
)
from trident_llm.text.sandbox import Template
from trident_llm.text.tokenizer import (
    Tokenizer,
    TokenizerError,
    read_json_object,
    read_special_token_names,
)

__all__ = ["DEFAULT_MAX_CHARS", "ChatTemplate", "ChatTemplateError"]

DEFAULT_MAX_CHARS = 16 * 1024 * 1024
_ARGUMENTS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
_PROBE = "probe"


@dataclass(frozen=True)
class _Chat:
    """The arguments of one rendering, not checked yet."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool
    continue_final_message: bool
    max_chars: int


class ChatTemplate:
    """A model's chat template or templates; see the module's invariant. Safe for many threads."""

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ) -> None:
        """templates: name to Jinja source; "tool_use" serves chats with tools, "default" the rest.

        special_tokens: what templates may write, as "bos_token" to its string.

        Raises ChatTemplateError if there is no default template or one has a syntax error.
        """
        if len(templates) == 1:
            templates = {"default": next(iter(templates.values()))}
        if "default" not in templates:
            raise ChatTemplateError("one of the model's chat templates must be named default")
        self._special_tokens = dict(special_tokens or {})
        self._templates = {
            name: _ContentTemplate(Template(name, source), self._special_tokens)
            for name, source in templates.items()
        }
        self._sources = "".join((*templates.values(), *self._special_tokens.values()))

    @classmethod
    def from_folder(cls, path: str | Path) -> ChatTemplate | None:
        """Read the chat template of a model folder; None if it has none.

        chat_template.jinja (with additional_chat_templates/*.jinja) comes before
        tokenizer_config.json, and that before chat_template.json.

        Raises ChatTemplateError, naming the file, if one is broken.
        """
        folder = Path(path)
        try:
            templates = _read_templates(folder)
            if not templates:
                return None
            return cls(templates, read_special_token_names(folder).named)
        except TokenizerError as error:
            raise ChatTemplateError(str(error)) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        max_chars: int = DEFAULT_MAX_CHARS,
    ) -> str:
        """Return the text of a chat, equal to what transformers' apply_chat_template gives.

        messages, tools: see `check_messages` and `check_tools`. continue_final_message: end inside
        the last message, which the model goes on with (add_generation_prompt must then be false).
        template_kwargs: further JSON values for the template. max_chars: the longest text allowed.

        Raises ChatTemplateError.
        """
        chat = _Chat(
            messages,
            tools,
            template_kwargs,
            add_generation_prompt,
            continue_final_message,
            max_chars,
        )
        return self._render(chat, LiteralMask(None, reserved=self._sources))

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        max_chars: int = DEFAULT_MAX_CHARS,
    ) -> list[int]:
        """Return the ids of a chat; arguments as for `render`.

        The string of a special token means that token where the template writes it, and is ordinary
        text in messages, tools and template_kwargs. Nothing is added around the text: the template
        has written BOS if the model wants one. Tokens that a tokenizer adds without calling them
        special (often `<think>`) are tokens everywhere.

        Raises ChatTemplateError, and TokenizerError for text that is not valid Unicode.
        """
        chat = _Chat(
            messages,
            tools,
            template_kwargs,
            add_generation_prompt,
            continue_final_message,
            max_chars,
        )
        mask = LiteralMask(tokenizer.control_literals, reserved=self._sources)
        text = self._render(chat, mask)
        if not mask.used:
            return tokenizer.encode(text, add_special_tokens=False)
        return _encode_masked(tokenizer, text, mask)

    def _render(self, chat: _Chat, mask: LiteralMask) -> str:
        """Render a chat whose strings are masked; the text still holds the stand-ins."""
        messages = check_messages(chat.messages)
        tools = check_tools(chat.tools)
        kwargs = self._check_kwargs(chat.template_kwargs)
        if chat.continue_final_message and chat.add_generation_prompt:
            raise ChatTemplateError(
                "continue_final_message and add_generation_prompt exclude each other; "
                "set one of them to false"
            )
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates[name]
        messages = template.with_fitting_contents(messages)
        masked = mask.mask({"messages": messages, "tools": tools, "kwargs": kwargs})
        end = _mark_end(masked["messages"], mask) if chat.continue_final_message else None
        text = template.render(
            {
                **self._special_tokens,
                **masked["kwargs"],
                "messages": masked["messages"],
                "tools": masked["tools"],
                "add_generation_prompt": chat.add_generation_prompt,
            },
            chat.max_chars,
        )
        return text if end is None else _cut_at(text, end)

    def _check_kwargs(self, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
        if kwargs is None:
            return {}
        copied = copy_json(dict(kwargs), "chat_template_kwargs")
        for name in sorted(_ARGUMENTS | self._special_tokens.keys()):
            if name in copied:
                raise ChatTemplateError(f"chat_template_kwargs must not set {name}")
        assert isinstance(copied, dict)
        return copied


class _ContentTemplate:
    """A template, and the forms of message contents that it can show.

    Found out by rendering one message in both forms, because a template does not say: some print a
    list as Python writes it, some can only show lists.
    """

    def __init__(self, template: Template, special_tokens: Mapping[str, str]) -> None:
        self._template = template
        self.render = template.render
        self._takes_strings = self._shows(_PROBE, special_tokens)
        self._takes_parts = self._shows([{"type": "text", "text": _PROBE}], special_tokens)

    def with_fitting_contents(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not self._takes_parts:
            return with_joined_parts(messages)
        return messages if self._takes_strings else with_wrapped_strings(messages)

    def _shows(self, content: Any, special_tokens: Mapping[str, str]) -> bool:
        variables = {
            **special_tokens,
            "messages": [{"role": "user", "content": content}],
            "tools": None,
            "add_generation_prompt": False,
        }
        try:
            text = self._template.render(variables, DEFAULT_MAX_CHARS)
        except ChatTemplateError:
            return False
        return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text


def _mark_end(messages: list[dict[str, Any]], mask: LiteralMask) -> str:
    """Mark the end of the last message's text; return the marking character.

    A blank follows the mark: if it is gone from the rendered text, the template trims contents.
    """
    mark = mask.free_character()
    content = messages[-1].get("content")
    if isinstance(content, str):
        messages[-1]["content"] = f"{content}{mark} "
    elif content:
        content[-1]["text"] += f"{mark} "
    else:
        raise ChatTemplateError("continue_final_message needs text in the last message's content")
    return mark


def _cut_at(text: str, mark: str) -> str:
    end = text.rfind(mark)
    if end < 0:
        raise ChatTemplateError(
            "continue_final_message does not work with this chat: "
            "the model's chat template leaves out the last message's text"
        )
    return text[:end] if text[end + 1 : end + 2] == " " else text[:end].rstrip()


def _encode_masked(tokenizer: Tokenizer, text: str, mask: LiteralMask) -> list[int]:
    """Return ids of a rendered text; stretches of it that hold stand-ins are encoded as plain."""
    ids: list[int] = []
    ordinary = ""
    for i, part in enumerate(tokenizer.control_literals.split(text)):
        is_control = i % 2 == 1
        if is_control or not mask.is_masked(part):
            ordinary += part
            continue
        ids += tokenizer.encode(ordinary, add_special_tokens=False)
        ids += tokenizer.encode_plain(mask.unmask(part), at_start=i == 0)
        ordinary = ""
    return ids + tokenizer.encode(ordinary, add_special_tokens=False)


def _read_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates of a folder by name, {} if it has none."""
    files = {"default": folder / "chat_template.jinja"} | {
        file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    templates = {name: _read_text(file) for name, file in files.items() if file.is_file()}
    if templates:
        return templates
    for name in ("tokenizer_config.json", "chat_template.json"):
        file = folder / name
        if templates := _named_templates(read_json_object(file).get("chat_template"), file):
            return templates
    return {}


def _named_templates(value: object, file: Path) -> dict[str, str]:
    """Return the templates in a configuration's value: a string, a list of {name, template}, {}."""
    if not value:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        value = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
    if isinstance(value, dict) and all(
        isinstance(text, str) for item in value.items() for text in item
    ):
        return value
    raise ChatTemplateError(f"{file}: chat_template must be a string or a list of named templates")


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ChatTemplateError(f"{file} cannot be read: {error}") from error
