"""The sandbox that a chat template runs in: what it may call, and how much it may write.

Owns the Jinja environment. It must not know chats or tokenizers.

Invariant: a template reaches no Python object but the JSON values it is given, and a rendered text
is never longer than its limit, also while it is being made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from trident_llm.text.literals import NONCHARACTERS
from trident_llm.text.messages import ChatTemplateError

# Noncharacters stand for other characters while a chat is rendered, so they are never escaped.
_ESCAPED = re.compile(f"[^\x00-\x7f{NONCHARACTERS}]")
_MAX_REPEATED = 1_000_000
_MAX_EXPONENT = 64


class TooLongError(ChatTemplateError):
    """A rendered text that exceeds its limit."""


class Template:
    """One compiled template. Safe for many threads."""

    def __init__(self, name: str, source: str) -> None:
        """Raises ChatTemplateError if the source is no valid template."""
        environment = _Environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"chat template {name!r} has a syntax error in line {error.lineno}: {error.message}"
            ) from error
        except RecursionError as error:
            raise ChatTemplateError(f"chat template {name!r} is nested too deep") from error
        self._sentences = {
            node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)
        }

    def render(self, variables: Mapping[str, Any], max_chars: int) -> str:
        """Return the text for variables (JSON values), of at most max_chars characters.

        Raises TooLongError as soon as the text exceeds the limit, and ChatTemplateError for
        whatever else the template does not like. An error has the template's own words only if
        they are written in it whole, so a message's text can never be among them.
        """
        chunks: list[str] = []
        length = 0
        try:
            for chunk in self._template.generate(variables):
                length += len(chunk)
                if length > max_chars:
                    raise TooLongError(
                        f"the rendered chat exceeds {max_chars} characters; send a shorter chat"
                    )
                chunks.append(chunk)
        except TooLongError:
            raise
        except Exception as error:
            raise ChatTemplateError(self._explain(error)) from None
        return "".join(chunks)

    def _explain(self, error: Exception) -> str:
        if isinstance(error, SecurityError):
            return "the model's chat template was stopped: it does what a template may not do"
        if isinstance(error, jinja2.TemplateError) and str(error) in self._sentences:
            return f"the model's chat template refuses this chat: {error}"
        return (
            "the model's chat template cannot render this chat "
            f"({type(error).__name__}); check the roles, their order and the fields of each message"
        )


class _Generation(Extension):
    """The block `{% generation %}`: it marks text for training and changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _TemplateNamespace(Namespace):
    """Jinja's namespace without names that Python gives a meaning."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


class _Environment(ImmutableSandboxedEnvironment):
    """What Hugging Face's templates expect to find, and no more."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _TemplateNamespace
        self.globals["dict"] = _make_dict

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Bound the two operators that make huge values out of small ones."""
        if operator == "**" and abs(right) > _MAX_EXPONENT:
            raise SecurityError("exponent too large")
        if operator == "*" and _repeated_length(left, right) > _MAX_REPEATED:
            raise SecurityError("repetition too long")
        return super().call_binop(context, operator, left, right)


def _repeated_length(left: Any, right: Any) -> int:
    """Return the length of a product that repeats a string or a list; 0 for one of numbers."""
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            return len(sequence) * times
    return 0


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without escaping HTML, unlike Jinja's own filter."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if ensure_ascii:
        text = _ESCAPED.sub(lambda match: json.dumps(match[0])[1:-1], text)
    return text


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a namespace has no names that begin with an underscore")
