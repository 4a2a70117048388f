"""Python literals as JSON, read and never evaluated.

>>> literal_to_json("{'a': [1, True, None], 'b': 'it\\\\'s'}")
'{"a": [1, true, null], "b": "it\\'s"}'
>>> literal_to_json("London")
'"London"'
"""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["literal_to_json"]

_MAX_DEPTH = 64
_WORDS: dict[str, Any] = {
    "True": True, "true": True, "False": False, "false": False, "None": None, "null": None,
}  # fmt: skip
_TOKEN = re.compile(
    r"""\s*(?:(?P<number>[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?![\w.])
    |(?P<word>[A-Za-z]+)\b
    |(?P<string>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")
    |(?P<mark>[\[\](){},:]))""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_SIMPLE = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": "",
}  # fmt: skip


def literal_to_json(text: str) -> str:
    """The JSON of a literal; of anything else, a JSON string with the text."""
    try:
        reader = _Reader(text)
        value = reader.value(0)
        if reader.rest().strip():
            raise ValueError
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(text.strip(), ensure_ascii=False)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rest(self) -> str:
        return self._text[self._at :]

    def value(self, depth: int) -> Any:
        kind, token = self._next()
        if kind == "string":
            return _ESCAPE.sub(_unescape, token[1:-1])
        if kind == "number":
            digits = token.replace("_", "")
            return int(digits) if re.fullmatch(r"[-+]?\d{1,300}", digits) else float(digits)
        if kind == "word" and token in _WORDS:
            return _WORDS[token]
        if depth < _MAX_DEPTH and token in ("[", "("):
            return self._items("]" if token == "[" else ")", depth)
        if depth < _MAX_DEPTH and token == "{":
            return self._entries(depth)
        raise ValueError

    def _items(self, end: str, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self._take(end):
            items.append(self.value(depth + 1))
            if not self._take(","):
                self._expect(end)
                break
        return items

    def _entries(self, depth: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        while not self._take("}"):
            key = self.value(depth + 1)
            self._expect(":")
            entries[key if isinstance(key, str) else json.dumps(key)] = self.value(depth + 1)
            if not self._take(","):
                self._expect("}")
                break
        return entries

    def _next(self) -> tuple[str, str]:
        match = _TOKEN.match(self._text, self._at)
        if match is None or match.lastgroup is None:
            raise ValueError
        self._at = match.end()
        return match.lastgroup, match[match.lastgroup]

    def _take(self, mark: str) -> bool:
        match = _TOKEN.match(self._text, self._at)
        taken = match is not None and match["mark"] == mark
        if taken and match is not None:
            self._at = match.end()
        return taken

    def _expect(self, mark: str) -> None:
        if not self._take(mark):
            raise ValueError


def _unescape(match: re.Match[str]) -> str:
    escape = match[1]
    if escape[0] in "xuU" and len(escape) > 1:
        number = int(escape[1:], 16)
        return chr(number) if number < 0x110000 else match[0]
    return _SIMPLE.get(escape, escape)
