"""Tool calls in a model's text: where they begin, and what is left as content.

Owns the marks of the forms that `call_syntax` reads. Whitespace before the first call and after any
belongs to no one; a text that only looked like a call becomes content, whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

from trident_client.openai.output.call_syntax import (
    CallWriter,
    NotACall,
    Syntax,
    array,
    hermes,
    llama3_json,
    mistral,
    pythonic,
)
from trident_client.openai.output.pieces import Arguments, CallStart, Piece, Text
from trident_client.openai.output.reasoning import held_back

__all__ = ["FORMS", "CallParser", "NamedCall"]

_Start = Callable[[CallWriter], Syntax]

# By form: the mark after which calls follow, and the first character of calls without a mark.
_MARKED: Mapping[str, tuple[str, _Start]] = {
    "hermes": ("<tool_call>", hermes),
    "llama3_json": ("<|python_tag|>", llama3_json),
    "pythonic": ("<|python_start|>", pythonic),
    "mistral": ("[TOOL_CALLS]", mistral),
}
_UNMARKED: Mapping[str, tuple[str, _Start]] = {
    "llama3_json": ("{", llama3_json),
    "pythonic": ("[", pythonic),
    "array": ("[", array),
}
FORMS = tuple(_MARKED)


class _Reading:
    """One stretch of text that may be calls. `skipped` is whitespace before it."""

    def __init__(self, start: _Start, writer: CallWriter, mark: str, skipped: str) -> None:
        self._writer = writer
        self._raw = [skipped, mark]
        self._taken = 0
        self._syntax = start(writer)
        next(self._syntax)

    @property
    def num_calls(self) -> int:
        """All calls so far, those before this stretch included."""
        return self._writer.index + 1

    def take(self) -> list[Piece]:
        """What was found since the last time."""
        new = self._writer.pieces[self._taken :]
        self._taken += len(new)
        return new

    def feed(self, text: str) -> tuple[str, str] | None:
        """None while the calls go on; else the content that they turned out to be, and the rest."""
        for at, char in enumerate(text):
            if not self._writer.pieces:
                self._raw.append(char)
            try:
                self._syntax.send(char)
            except StopIteration as ended:
                return "", str(ended.value) + text[at + 1 :]
            except NotACall:
                if self._writer.pieces:
                    return "", text[at:]
                return "".join(self._raw), text[at + 1 :]
        return None

    def finish(self) -> str:
        """The text has ended; what of it is content."""
        try:
            while True:
                self._syntax.send("")
        except StopIteration:
            return ""
        except NotACall:
            return "" if self._writer.pieces else "".join(self._raw)


class CallParser:
    """Content and calls in the given forms, which are among `FORMS`, or "array".

    `names`: the tools that there are; calls without a mark must name one of them.
    """

    def __init__(self, forms: Collection[str], names: Collection[str]) -> None:
        self._starts = dict(_MARKED[form] for form in forms if form in _MARKED)
        self._marks = tuple(self._starts)
        self._mark = re.compile("|".join(map(re.escape, self._marks)) or r"(?!)")
        self._unmarked = dict(_UNMARKED[form] for form in forms if form in _UNMARKED)
        self._names = frozenset(names)
        self._waiting = ""  # whitespace, or what may be the beginning of a mark
        self._num_calls = 0
        self._at_start = True  # nothing but whitespace yet
        self._after_call = False  # nothing but whitespace since
        self._reading: _Reading | None = None

    def feed(self, text: str) -> list[Piece]:
        """What `text` adds."""
        pieces: list[Piece] = []
        while text:
            if self._reading is None:
                text = self._read_content(text, pieces)
            if self._reading is not None:
                ended = self._reading.feed(text)
                pieces += self._reading.take()
                if ended is None:
                    break
                content, text = ended
                self._end_reading(content, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back, now that nothing follows."""
        pieces: list[Piece] = []
        if self._reading is not None:
            content = self._reading.finish()
            pieces += self._reading.take()
            self._end_reading(content, pieces)
        self._emit(self._waiting, pieces)
        self._waiting = ""
        return pieces

    def _read_content(self, text: str, pieces: list[Piece]) -> str:
        """Give content up to where calls may begin, and the text from there on."""
        text, self._waiting = self._waiting + text, ""
        begun = text.lstrip()
        if self._at_start and begun and begun[0] in self._unmarked:
            if any(mark.startswith(begun) for mark in self._marks):
                self._waiting = text
                return ""
            if not begun.startswith(self._marks or ("\0",)):
                skipped = text[: len(text) - len(begun)]
                self._begin_reading(self._unmarked[begun[0]], "", skipped)
                return begun
        mark = self._mark.search(text)
        if mark is None:
            shown = text[: len(text) - held_back(text, self._marks)]
            if self._is_blank(shown):
                shown = ""
            self._emit(shown, pieces)
            self._waiting = text[len(shown) :]
            return ""
        before = text[: mark.start()]
        skipped = before if self._is_blank(before) else ""
        if not skipped:
            self._emit(before, pieces)
        self._begin_reading(self._starts[mark[0]], mark[0], skipped)
        return text[mark.end() :]

    def _is_blank(self, text: str) -> bool:
        """Whether `text` is whitespace that a call may follow."""
        return (self._at_start or self._after_call) and not text.strip()

    def _begin_reading(self, start: _Start, mark: str, skipped: str) -> None:
        writer = CallWriter(
            self._num_calls, None if mark else self._names, short_ids=start is mistral
        )
        self._reading = _Reading(start, writer, mark, skipped)

    def _end_reading(self, content: str, pieces: list[Piece]) -> None:
        assert self._reading is not None
        if self._reading.num_calls > self._num_calls:
            self._num_calls = self._reading.num_calls
            self._at_start, self._after_call = False, True
        self._reading = None
        self._emit(content, pieces)

    def _emit(self, text: str, pieces: list[Piece]) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            pieces.append(Text(text))
            self._at_start = self._after_call = False


class NamedCall:
    """An output that is, as a whole, the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def feed(self, text: str) -> list[Piece]:
        """What `text` adds."""
        if not self._started:
            text = text.lstrip()
            if not text:
                return []
            self._started = True
            return [CallStart(0, self._name), Arguments(0, text)]
        return [Arguments(0, text)]

    def finish(self) -> list[Piece]:
        """Nothing is held back."""
        return []
