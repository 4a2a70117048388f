"""How models write tool calls: one generator per form, fed one character at a time.

A generator receives the next character from ``yield`` and ``""`` at the end of the text, and writes
what it finds to a `CallWriter`. It returns the first character that is not its own ("" if there is
none), and raises `NotACall` when the text turns out to be something else. Arguments are passed on as
they come, unchecked: they are the model's own JSON. Nothing here ever evaluates code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator

from trident_client.openai.output.literals import literal_to_json
from trident_client.openai.output.pieces import Arguments, CallStart, Piece

__all__ = [
    "CallWriter", "NotACall", "Syntax", "array", "hermes", "llama3_json", "mistral", "pythonic",
]  # fmt: skip

Syntax = Generator[None, str, str]

_CLOSE = "</tool_call>"
_PYTHON_END = "<|python_end|>"
_SPACE = " \t\r\n"
_MAX_NAME = 256
# Keys beside which an object without a mark may still be a call.
_CALL_KEYS = ("name", "arguments", "parameters", "type", "id")


class NotACall(Exception):
    """The text is no tool call after all."""


class CallWriter:
    """Where a syntax writes. `names`: tools that may be called; None: any name is one.

    Texts without a mark are taken for calls only if they name a tool of the request.
    """

    def __init__(
        self, first_index: int, names: Collection[str] | None, *, short_ids: bool = False
    ) -> None:
        self.pieces: list[Piece] = []
        self.index = first_index - 1
        self.is_marked = names is None
        self._names = names
        self._short_ids = short_ids

    def check(self, name: str) -> str:
        """The name of a tool. Raises `NotACall`."""
        if (
            not name
            or len(name) > _MAX_NAME
            or (self._names is not None and name not in self._names)
        ):
            raise NotACall
        return name

    def start(self, name: str) -> None:
        """A call of `name` begins."""
        self.index += 1
        self.pieces.append(CallStart(self.index, name, self._short_ids))

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        self.pieces.append(Arguments(self.index, text))


def hermes(writer: CallWriter) -> Syntax:
    """After ``<tool_call>``: an object or a list of objects, up to ``</tool_call>``."""
    char = yield from _space((yield))
    if char == "[":
        yield from _array_rest(writer)
    elif char == "{":
        yield from _object(writer)
    else:
        raise NotACall
    return (yield from _closing_mark(_CLOSE))


def llama3_json(writer: CallWriter) -> Syntax:
    """From ``{`` on: objects with semicolons between them."""
    char = yield from _space((yield))
    while char == "{":
        yield from _object(writer)
        char = yield from _space((yield))
        if char == ";":
            char = yield from _space((yield))
    if not writer.pieces:
        raise NotACall
    return char


def mistral(writer: CallWriter) -> Syntax:
    """After ``[TOOL_CALLS]``: a list of objects, or a name and its arguments."""
    char = yield from _space((yield))
    if char == "[":
        yield from _array_rest(writer)
        return (yield)
    name = ""
    while char and char not in "{[" and len(name) <= _MAX_NAME:
        name += char
        char = yield
    while char == "[":  # [CALL_ID]..., [ARGS]
        while char and char != "{":
            char = yield
    if char != "{":
        raise NotACall
    writer.start(writer.check(name.strip()))
    yield from _nested(char, writer.arguments)
    return (yield)


def array(writer: CallWriter) -> Syntax:
    """From ``[`` on: a list of objects that is the whole text."""
    if (yield from _space((yield))) != "[":
        raise NotACall
    yield from _array_rest(writer)
    return (yield)


def _array_rest(writer: CallWriter) -> Syntax:
    """After ``[``: objects, up to ``]``. Returns ""."""
    char = yield from _space((yield))
    while char == "{":
        yield from _object(writer)
        char = yield from _space((yield))
        if char == ",":
            char = yield from _space((yield))
    if char not in ("]", "") or not writer.pieces:
        raise NotACall
    return ""


def pythonic(writer: CallWriter) -> Syntax:
    """From ``[`` on: calls as Python writes them, up to ``]``."""
    char = yield from _space((yield))
    if char != "[":
        raise NotACall
    char = ","
    while char == ",":
        char = yield from _space((yield))
        if char == "]":  # after a last comma
            break
        char = yield from _python_call(char, writer)
    if char not in ("]", "") or not writer.pieces:
        raise NotACall
    return (yield from _closing_mark(_PYTHON_END))


def _python_call(char: str, writer: CallWriter) -> Syntax:
    name, char = yield from _identifier(char)
    writer.check(name)
    if (yield from _space(char)) != "(":
        raise NotACall
    started = False
    char = yield from _space((yield))
    while char not in (")", ""):
        key, char = yield from _identifier(char)
        if not key or (yield from _space(char)) != "=":
            raise NotACall
        if not started:
            writer.start(name)
        writer.arguments(("," if started else "{") + json.dumps(key) + ": ")
        started = True
        value: list[str] = []
        char = yield from _python_value(value.append)
        if char:
            writer.arguments(literal_to_json("".join(value)))
        if char == ",":
            char = yield from _space((yield))
    if char:
        if not started:
            writer.start(name)
        writer.arguments("}" if started else "{}")
        char = yield from _space((yield))
    return char


def _identifier(char: str) -> Generator[None, str, tuple[str, str]]:
    name = ""
    while char and (char.isalnum() or char in "_.-") and len(name) <= _MAX_NAME:
        name += char
        char = yield
    return name, char


def _python_value(write: Callable[[str], object]) -> Syntax:
    """Up to the comma or parenthesis after a value, which is returned."""
    depth, quote, escaped = 0, "", False
    while char := (yield):
        if quote:
            quote = "" if char == quote and not escaped else quote
            escaped = char == "\\" and not escaped
        elif char in "'\"":
            quote = char
        elif depth == 0 and char in ",)":
            return char
        else:
            depth += (char in "([{") - (char in ")]}")
        write(char)
    return ""


def _object(writer: CallWriter) -> Syntax:
    """After ``{``: a call's name and arguments in any order, up to ``}``. Returns ""."""
    name: str | None = None
    early: list[str] = []  # arguments that came before the name
    started = False
    while (char := (yield from _space((yield)))) not in ("}", ""):
        if char == ",":
            continue
        if char != '"':
            raise NotACall
        key, char = (yield from _string()), (yield from _space((yield)))
        if char != ":" or not (writer.is_marked or key in _CALL_KEYS):
            raise NotACall
        char = yield from _space((yield))
        if key == "name" and name is None and char == '"':
            name = writer.check((yield from _string()))
        elif key in ("arguments", "parameters") and not started and not early:
            write: Callable[[str], object] = early.append
            if name is not None:
                writer.start(name)
                started, write = True, writer.arguments
            char = yield from _arguments(char, write)
        else:
            char = yield from _value(char, lambda text: None)
        if char == "}":
            break
    if name is None or (char == "" and not started):
        raise NotACall
    if not started:
        writer.start(name)
        writer.arguments("".join(early) or "{}")
    return ""


def _arguments(char: str, write: Callable[[str], object]) -> Syntax:
    """The value of a call's arguments; a text that holds JSON is given as what it holds."""
    if char == '"':
        write((yield from _string()))
        return ""
    if char in "{[":
        return (yield from _nested(char, write))
    value: list[str] = []
    char = yield from _value(char, value.append)
    text = "".join(value)
    write("{}" if text == "null" else text)
    return char


def _value(char: str, write: Callable[[str], object]) -> Syntax:
    """Any JSON value that begins with `char`; returns what ended it, if that is not its own."""
    if char == '"':
        write(json.dumps((yield from _string())))
        return ""
    if char in "{[":
        return (yield from _nested(char, write))
    while char and char not in ",}]" + _SPACE:
        write(char)
        char = yield
    return char


def _nested(char: str, write: Callable[[str], object]) -> Syntax:
    """An object or list that begins with `char`, as it is written, up to its end. Returns ""."""
    depth, in_string, escaped = 1, False, False
    write(char)
    while depth and (char := (yield)):
        write(char)
        if in_string:
            in_string = char != '"' or escaped
            escaped = char == "\\" and not escaped
        elif char == '"':
            in_string = True
        else:
            depth += (char in "{[") - (char in "}]")
    return ""


def _string() -> Syntax:
    """After ``"``: what a JSON string holds; as it is written, if it is cut or broken."""
    raw, escaped = "", False
    while (char := (yield)) and (char != '"' or escaped):
        escaped = char == "\\" and not escaped
        raw += char
    try:
        return str(json.loads(f'"{raw}"', strict=False))
    except ValueError:
        return raw


def _space(char: str) -> Syntax:
    """The first character, from `char` on, that is no whitespace."""
    while char and char in _SPACE:
        char = yield
    return char


def _closing_mark(mark: str) -> Syntax:
    """Whitespace and `mark`. Another character is returned; a broken mark is dropped."""
    char = yield from _space((yield))
    if char != mark[0]:
        return char
    for expected in mark[1:]:
        char = yield
        if char != expected:
            return char
    return (yield)
