r"""Regular expressions that a grammar can hold: read, bounded, and written out plainly again.

Owns the dialect: the part of ECMAScript's syntax that a finite automaton matches. It must not know
schemas, requests or the library that compiles grammars. A pattern always describes a whole text,
as if it stood between ``^`` and ``$``; a text that matches whole also matches by search, so an
output is never outside what the pattern asks.

Where ECMAScript and Python disagree (which letters, digits and blanks of other scripts ``\w``,
``\d`` and ``\s`` mean), a class holds only what it holds in both.

Invariant: what `write` returns uses only characters, classes, groups, ``|`` and ``{m,n}``, so no
construct is left that a compiler could silently read in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_PATTERN_CHARS = 4096
MAX_REPEAT = 5000  # of one quantifier
MAX_STATES = 20_000  # characters of the pattern with every bounded repetition written out
MAX_GROUPS = 64  # nested

Ranges = tuple[tuple[int, int], ...]  # inclusive code points, sorted, disjoint

_LAST = 0x10FFFF
# All but the surrogates, which no UTF-8 text holds.
_UTF8_WIDTHS: tuple[Ranges, ...] = (((0x00, 0x7FF),), ((0x800, 0xFFFF),), ((0x10000, _LAST),))
_SCALARS: Ranges = ((0x00, 0xD7FF), (0xE000, _LAST))
_DIGIT: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
_ASCII: Ranges = ((0x00, 0x7F),)
# Everything that ECMAScript or Python takes for a blank.
_BLANKS: Ranges = (
    (0x09, 0x0D), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
    (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_NEWLINES: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_HEX = "0123456789abcdefABCDEF"
_CONTROL_ESCAPES = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}
# Characters that a JSON string must escape and has a short escape for.
_JSON_ESCAPES = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
_JSON_PLAIN: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, _LAST))


class PatternError(ValueError):
    """A pattern that cannot be used; the text says why, with a position, and what to do."""


@dataclass(frozen=True)
class Chars:
    """One character out of ``ranges``."""

    ranges: Ranges


@dataclass(frozen=True)
class Concat:
    """Its items, one after the other."""

    items: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    """One of its branches."""

    branches: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """``node`` from ``low`` to ``high`` times; ``high`` None: without end."""

    node: Node
    low: int
    high: int | None


Node = Chars | Concat | Choice | Repeat


def parse(pattern: str) -> Node:
    """Read a pattern.

    Raises:
        PatternError: it is malformed, too large, or needs more than a finite automaton.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise PatternError(f"must have at most {MAX_PATTERN_CHARS} characters")
    node = _Parser(pattern).parse()
    if _count_states(node) > MAX_STATES:
        raise PatternError(
            f"is too large: written out it has more than {MAX_STATES} characters; "
            "lower its repetition counts"
        )
    return node


def write(node: Node) -> str:
    """Return the pattern in the plain form that the module's invariant describes."""
    return _write(node, _class_text)


def write_in_json(node: Node) -> str:
    """Return a pattern for the same texts as they stand between the quotes of a JSON string.

    A class that holds characters which need no escape holds no others: so ``.`` and ``[^a]`` leave
    out quotes, backslashes and control characters.

    Raises:
        PatternError: some place in the pattern allows no character at all.
    """
    return _write(node, _json_class_text)


def is_any_char(node: Node) -> bool:
    """Whether a node is one character and leaves out at most line breaks."""
    return isinstance(node, Chars) and not _invert(_normalize([*node.ranges, *_NEWLINES]))


def literal(text: str) -> Node:
    """Return the node that matches ``text`` alone."""
    return Concat(tuple(Chars(((ord(char), ord(char)),)) for char in text))


def _count_states(node: Node) -> int:
    if isinstance(node, Chars):
        return 1
    if isinstance(node, Repeat):
        times = node.low if node.high is None else node.high
        return min(MAX_STATES + 1, max(times, 1) * _count_states(node.node))
    parts = node.items if isinstance(node, Concat) else node.branches
    return sum(map(_count_states, parts))


def _write(node: Node, write_class: Callable[[Ranges], str]) -> str:
    if isinstance(node, Chars):
        return write_class(node.ranges)
    if isinstance(node, Repeat):
        inner = _write(node.node, write_class)
        high = "" if node.high is None else str(node.high)
        return f"(?:{inner}){{{node.low},{high}}}" if inner else ""
    if isinstance(node, Choice):
        return "(?:" + "|".join(_write(branch, write_class) for branch in node.branches) + ")"
    return "".join(_write(item, write_class) for item in node.items)


def _char_text(code: int) -> str:
    char = chr(code)
    if char.isascii() and char.isalnum():
        return char
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\u{{{code:x}}}"


def _class_text(ranges: Ranges) -> str:
    ranges = _intersect(ranges, _SCALARS)
    if not ranges:
        raise PatternError("holds a class of characters that matches nothing")
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _char_text(ranges[0][0])
    # Compilers are quick with an open class only where it is written as what it excludes.
    is_open = ranges[-1][1] == _LAST and ranges[0][0] < 0x80
    parts = [
        _char_text(low) if low == high else f"{_char_text(low)}-{_char_text(high)}"
        for low, high in (_invert(ranges) if is_open else ranges)
    ]
    return f"[{'^' if is_open else ''}{''.join(parts)}]"


def _json_class_text(ranges: Ranges) -> str:
    if plain := _intersect(_intersect(ranges, _JSON_PLAIN), _SCALARS):
        # The compiler lets overlong UTF-8 into a class whose ranges cross a change of length.
        parts = [part for width in _UTF8_WIDTHS if (part := _intersect(plain, width))]
        texts = [_class_text(part) for part in parts]
        return texts[0] if len(texts) == 1 else f"(?:{'|'.join(texts)})"
    # Repeated alternatives are slow to match, so escapes are written only where they must be.
    escaped = [char for code, char in _JSON_ESCAPES.items() if _contains(ranges, code)]
    if escaped:
        return "\\u005c" + _class_text(_normalize([(ord(char), ord(char)) for char in escaped]))
    codes = [code for code in range(0x20) if _contains(ranges, code)]
    if not codes:
        raise PatternError("holds a class of characters that no JSON string can hold")
    return "\\u005cu00" + "(?:" + "|".join(f"{code:02x}" for code in codes) + ")"


def _normalize(ranges: Sequence[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def _invert(ranges: Ranges) -> Ranges:
    start, result = 0, []
    for low, high in ranges:
        if start < low:
            result.append((start, low - 1))
        start = high + 1
    if start <= _LAST:
        result.append((start, _LAST))
    return tuple(result)


def _intersect(a: Ranges, b: Ranges) -> Ranges:
    return _invert(_normalize([*_invert(a), *_invert(b)]))


def _contains(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


class _Parser:
    """A recursive-descent reader; ``at`` is the place of the next character."""

    def __init__(self, pattern: str) -> None:
        self.text = pattern
        self.at = 0
        self.groups = 0

    def parse(self) -> Node:
        node = self._choice(top=True)
        if self.at < len(self.text):
            raise self._error("has a ) without its (")
        return node

    def _error(self, reason: str) -> PatternError:
        return PatternError(f"{reason} (at character {self.at + 1})")

    def _peek(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def _take(self, text: str) -> bool:
        if not self._peek(text):
            return False
        self.at += len(text)
        return True

    def _choice(self, *, top: bool) -> Node:
        branches = [self._sequence(top=top)]
        while self._take("|"):
            branches.append(self._sequence(top=top))
        return branches[0] if len(branches) == 1 else Choice(tuple(branches))

    def _sequence(self, *, top: bool) -> Node:
        if top:
            self._take("^")
        items: list[Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            if self._peek("$"):
                self.at += 1
                if top and (self.at == len(self.text) or self._peek("|")):
                    break
                self.at -= 1
                raise self._error("may hold $ only at its end")
            items.append(self._quantified(self._atom()))
        return items[0] if len(items) == 1 else Concat(tuple(items))

    def _atom(self) -> Node:
        char = self.text[self.at]
        if char == "(":
            return self._group()
        if char == "[":
            return Chars(self._class())
        if char == "\\":
            return Chars(self._escape())
        if char == "^":
            raise self._error("may hold ^ only at its start")
        if char in "*+?":
            raise self._error("has a quantifier with nothing before it")
        if char == "{":
            raise self._error(r"has a { that begins no quantifier; write \{ for the character")
        self.at += 1
        if char == ".":
            return Chars(_invert(_NEWLINES))
        return Chars(self._char(ord(char)))

    def _group(self) -> Node:
        self.at += 1
        if self._take("?") and not self._take(":"):
            self._take("P")
            end = self.text.find(">", self.at)
            named = self._peek("<") and not self._peek("<=") and not self._peek("<!") and end > 0
            if not named:
                raise self._error(
                    "holds a lookaround or a flag; only (...) and (?:...) groups work"
                )
            self.at = end + 1
        self.groups += 1
        if self.groups > MAX_GROUPS:
            raise self._error(f"nests more than {MAX_GROUPS} groups")
        node = self._choice(top=False)
        self.groups -= 1
        if not self._take(")"):
            raise self._error("has a ( without its )")
        return node

    def _quantified(self, node: Node) -> Node:
        if self._take("*"):
            bounds: tuple[int, int | None] = (0, None)
        elif self._take("+"):
            bounds = (1, None)
        elif self._take("?"):
            bounds = (0, 1)
        elif self._take("{"):
            bounds = self._bounds()
        else:
            return node
        self._take("?")  # a lazy quantifier matches the same whole texts
        if self.at < len(self.text) and self.text[self.at] in "*+?{":
            raise self._error("has two quantifiers in a row; put the first in a group")
        return Repeat(node, *bounds)

    def _bounds(self) -> tuple[int, int | None]:
        end = self.text.find("}", self.at)
        low, comma, high = self.text[self.at : max(end, self.at)].partition(",")
        if end < 0 or not _is_number(low) or (high and not _is_number(high)):
            raise self._error(r"has a { that begins no quantifier; write \{ for the character")
        counts = [int(text) for text in (low, high) if text]
        if max(counts) > MAX_REPEAT:
            raise self._error(f"repeats more than {MAX_REPEAT} times")
        if counts != sorted(counts):
            raise self._error("has a quantifier whose end is below its start")
        self.at = end + 1
        if not comma:
            return counts[0], counts[0]
        return counts[0], counts[1] if high else None

    def _class(self) -> Ranges:
        self.at += 1
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        start = self.at
        while not self._take("]"):
            low = self._class_item()
            single = len(low) == 1 and low[0][0] == low[0][1]
            if single and self._peek("-") and not self._peek("-]"):
                self.at += 1
                high = self._class_item()
                if len(high) != 1 or high[0][0] != high[0][1] or high[0][0] < low[0][0]:
                    raise self._error("holds a range that ends before it starts")
                low = ((low[0][0], high[0][0]),)
            ranges.extend(low)
        merged = _normalize(ranges)
        if not merged and not negated:
            raise self._error("holds an empty class []")
        if not negated:
            return merged
        if any(f"\\{char}" in self.text[start : self.at] for char in "dw"):
            return _intersect(_invert(merged), _ASCII)
        if "\\s" in self.text[start : self.at]:
            merged = _normalize([*merged, *_BLANKS])
        return _invert(merged)

    def _class_item(self) -> Ranges:
        if self.at >= len(self.text):
            raise self._error("has a [ without its ]")
        if self._peek("\\"):
            return self._escape()
        self.at += 1
        return self._char(ord(self.text[self.at - 1]))

    def _char(self, code: int) -> Ranges:
        if 0xD800 <= code <= 0xDFFF:
            raise self._error("holds half a character (a lone surrogate)")
        return ((code, code),)

    def _escape(self) -> Ranges:
        self.at += 1
        if self.at >= len(self.text):
            raise self._error("ends in a single backslash")
        char = self.text[self.at]
        classes = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
        if char.lower() in classes:
            self.at += 1
            if char == "S":
                return _invert(_BLANKS)
            ranges = classes[char.lower()]
            return ranges if char.islower() else _intersect(_invert(ranges), _ASCII)
        if char in "xu":
            code = self._hex_escape()
        elif char in _CONTROL_ESCAPES:
            code = _CONTROL_ESCAPES[char]
            self.at += 1
        elif char.isascii() and char.isalnum():
            raise self._error(f"holds \\{char}, which is not supported")
        else:
            code = ord(char)
            self.at += 1
        return self._char(code)

    def _hex_escape(self) -> int:
        if self._take("u{"):
            start, end = self.at, self.text.find("}", self.at)
            after = end + 1
            well_formed = 0 < end - start <= 6
        else:
            size = 2 if self.text[self.at] == "x" else 4
            start = self.at + 1
            end = after = start + size
            well_formed = end <= len(self.text)
        digits = self.text[start:end]
        if not well_formed or not all(digit in _HEX for digit in digits):
            raise self._error("holds a broken \\x or \\u escape")
        if int(digits, 16) > _LAST:
            raise self._error("holds a \\u escape beyond Unicode")
        self.at = after
        return self._join_surrogates(int(digits, 16))

    def _join_surrogates(self, code: int) -> int:
        """Return the character that two \\u escapes of a surrogate pair stand for."""
        if 0xD800 <= code <= 0xDBFF and self._peek("\\u"):
            digits = self.text[self.at + 2 : self.at + 6]
            low = int(digits, 16) if all(digit in _HEX for digit in digits) and digits else 0
            if 0xDC00 <= low <= 0xDFFF:
                self.at += 6
                return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        return code


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18
