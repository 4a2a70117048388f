"""The ``<think>`` block that an output begins with, told apart from what follows.

Whitespace beside the two marks belongs to neither side.
"""

from __future__ import annotations

from trident_client.openai.output.pieces import Piece, Reasoning, Text

__all__ = ["CLOSE", "OPEN", "ReasoningParser", "held_back", "reasoning_end"]

OPEN = "<think>"
CLOSE = "</think>"


def held_back(text: str, marks: tuple[str, ...]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `marks`.

    >>> held_back("a <to", ("<tool_call>",)), held_back("a < b", ("<tool_call>",))
    (3, 0)
    """
    longest = max(map(len, marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(mark.startswith(tail) for mark in marks):
            return length
    return 0


def reasoning_end(text: str, *, begins_inside: bool) -> int:
    """Where the block of a whole output ends, its closing mark included; 0 if there is none.

    >>> reasoning_end("<think>so</think>yes", begins_inside=False), reasoning_end("yes", begins_inside=False)
    (17, 0)
    """
    if not (begins_inside or text.lstrip().startswith(OPEN)):
        return 0
    close = text.find(CLOSE)
    return len(text) if close < 0 else close + len(CLOSE)


class ReasoningParser:
    """`begins_inside`: the prompt has opened the block already, as some templates do."""

    def __init__(self, *, begins_inside: bool) -> None:
        self._waiting = ""
        self._state = "start"
        self._begins_inside = begins_inside
        self._has_thought = False

    def feed(self, text: str) -> list[Piece]:
        """What `text` adds."""
        self._waiting += text
        pieces: list[Piece] = []
        if self._state == "start":
            self._start()
        if self._state == "inside":
            pieces += self._inside()
        if self._state == "after":
            self._waiting = self._waiting.lstrip()
            if self._waiting:
                self._state = "text"
        if self._state == "text":
            pieces.append(Text(self._waiting))
            self._waiting = ""
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back, now that nothing follows."""
        rest, self._waiting = self._waiting, ""
        if self._state == "inside":
            return [Reasoning(rest)]
        return [Text(rest)] if self._state == "start" else []

    def _start(self) -> None:
        begun = self._waiting.lstrip()
        if begun.startswith(OPEN):
            self._state, self._waiting = "inside", begun[len(OPEN) :]
        elif begun and not OPEN.startswith(begun):
            self._state = "inside" if self._begins_inside else "text"

    def _inside(self) -> list[Piece]:
        # Whitespace after the opening mark: dropped while nothing else has come.
        if not self._has_thought:
            self._waiting = self._waiting.lstrip()
            self._has_thought = bool(self._waiting)
        before, mark, after = self._waiting.partition(CLOSE)
        if mark:
            self._state, self._waiting = "after", after
            return [Reasoning(before.rstrip())]
        shown = before[: len(before) - held_back(before, (CLOSE,))].rstrip()
        self._waiting = before[len(shown) :]
        return [Reasoning(shown)]
