"""Keeps control tokens out of a caller's text: stand-ins for the strings of special tokens.

Owns the way from values to values without special-token strings and back. It must not know
templates or how a text is encoded.

Invariant: in masked values no special-token string begins inside the caller's text, so every one
that is whole in a rendered text was begun by the template; `unmask` gives the text back exactly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken

from trident_llm.text.messages import ChatTemplateError

# Unicode's noncharacters: set aside for a program's own use, never for interchange.
NONCHARACTERS = "".join(map(chr, range(0xFDD0, 0xFDF0)))
_NONCHARACTER = re.compile(f"[{NONCHARACTERS}]")
# Values that templates compare with words of their own: only whole literals are masked in them.
_WORD_KEYS = frozenset({"role", "type"})


class ControlLiterals:
    """The strings of a tokenizer's special tokens, and where a text holds them.

    starts: every string that is a beginning of a literal but not all of it. longest: the length of
    the longest literal. occurrence: matches the first character of each literal in a text, also of
    those that overlap; None if there are no literals.
    """

    def __init__(self, tokens: Mapping[str, AddedToken]) -> None:
        self._tokens = dict(tokens)
        self.starts = frozenset(literal[:n] for literal in tokens for n in range(1, len(literal)))
        self.longest = max(map(len, tokens), default=0)
        tree = _tree_pattern(tokens)
        self.occurrence = re.compile(f"(?={tree}).", re.DOTALL) if tokens else None
        words = [literal for literal, token in tokens.items() if token.single_word]
        others = _tree_pattern(literal for literal in tokens if literal not in words)
        alone = rf"(?<!\w){_tree_pattern(words)}(?!\w)|" if words else ""
        self._split = re.compile(f"({alone}{others})", re.DOTALL)

    def split(self, text: str) -> list[str]:
        """Split a text as the tokenizer would: [text, token, text, token, ..., text].

        A text may be empty. Blanks that a token takes with it on a side are gone on that side.
        """
        parts = self._split.split(text)
        for i in range(1, len(parts), 2):
            token = self._tokens[parts[i]]
            if token.lstrip:
                parts[i - 1] = parts[i - 1].rstrip()
            if token.rstrip:
                parts[i + 1] = parts[i + 1].lstrip()
        return parts


class LiteralMask:
    """Puts a stand-in in place of the first character of each special-token string in values.

    The length of a text does not change, so templates that cut or trim strings still work. The end
    of a string is masked too where it could begin a special token's string together with what
    the template writes after it. Made for one chat.
    """

    def __init__(self, literals: ControlLiterals | None, *, reserved: str = "") -> None:
        """literals: None masks nothing. reserved: text whose characters are no stand-ins."""
        self._literals = literals
        self._free = [char for char in NONCHARACTERS if char not in reserved]
        self._stand_ins: dict[str, str] = {}

    @property
    def used(self) -> bool:
        """Whether any character was masked."""
        return bool(self._stand_ins)

    def mask(self, value: Any) -> Any:
        """Return a JSON value with its strings masked, the keys of objects too."""
        for text in _strings(value):
            if taken := _NONCHARACTER.findall(text):
                self._free = [char for char in self._free if char not in taken]
        return self._mask(value, is_word=False) if self._literals is not None else value

    def unmask(self, text: str) -> str:
        """Return a text with the stand-ins turned back."""
        return text.translate({ord(new): old for old, new in self._stand_ins.items()})

    def is_masked(self, text: str) -> bool:
        """Return whether a text holds a stand-in."""
        return any(stand_in in text for stand_in in self._stand_ins.values())

    def free_character(self) -> str:
        """Take a character that is in no masked value and in no reserved text.

        Raises ChatTemplateError if there is none left.
        """
        if not self._free:
            raise ChatTemplateError(
                "the chat holds too many Unicode noncharacters (U+FDD0 to U+FDEF); remove them"
            )
        return self._free.pop()

    def _mask(self, value: Any, *, is_word: bool) -> Any:
        if isinstance(value, str):
            return self._mask_string(value, ends=not is_word)
        if isinstance(value, list):
            return [self._mask(item, is_word=False) for item in value]
        if isinstance(value, dict):
            return {
                self._mask_string(key, ends=False): self._mask(item, is_word=key in _WORD_KEYS)
                for key, item in value.items()
            }
        return value

    def _mask_string(self, text: str, *, ends: bool) -> str:
        literals = self._literals
        assert literals is not None
        if literals.occurrence is not None:
            text = literals.occurrence.sub(lambda match: self._stand_in(match[0]), text)
        if not ends:
            return text
        # Templates trim strings, so what counts as the end is both with and without blanks.
        for end in {len(text), len(text.rstrip())}:
            for start in range(max(0, end - literals.longest), end):
                if text[start:end] in literals.starts:
                    text = text[:start] + self._stand_in(text[start]) + text[start + 1 :]
        return text

    def _stand_in(self, char: str) -> str:
        if char not in self._stand_ins:
            self._stand_ins[char] = self.free_character()
        return self._stand_ins[char]


def _tree_pattern(strings: Iterable[str]) -> str:
    """Return a pattern for the longest of some strings, as a prefix tree.

    A plain alternation would try hundreds of strings at each character of a hostile text.
    """
    strings = sorted(set(strings))
    if not strings:
        return "(?!)"
    # Sorted, so what the first and the last have in common all have in common.
    first, last = strings[0], strings[-1]
    shared = next((i for i, pair in enumerate(zip(first, last)) if pair[0] != pair[1]), len(first))
    prefix = first[:shared]
    rests: dict[str, list[str]] = {}
    for string in strings:
        if rest := string[len(prefix) :]:
            rests.setdefault(rest[0], []).append(rest)
    branches = "|".join(map(_tree_pattern, rests.values()))
    may_end = "?" if first == prefix else ""
    return re.escape(prefix) + (f"(?:{branches}){may_end}" if branches else "")


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
