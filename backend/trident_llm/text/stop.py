"""Stop strings: where a text ends, and how much of it may be shown already.

Owns the search over one sequence's text. It must not know tokens, requests or why a text goes on.

Invariant: what has been emitted never contains any part of a stop string that later matches, and
what is held back is exactly the longest end of the text that a stop string could begin with.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopResult:
    """text: what may be shown now; stop: the stop string that ended the text, or None."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    An Aho-Corasick automaton (Aho and Corasick, 1975): its depth after a character is the length of
    the longest end of the text that begins some stop string, so a push costs time linear in its
    text, however many and however long the stop strings are.

    The text ends as soon as it contains a stop string: nothing waits for a longer one that might
    still follow. Of those it contains by then the earliest start wins, then the longest.
    """

    __slots__ = (
        "_depth",
        "_ended",
        "_fail",
        "_first_chars",
        "_goto",
        "_held",
        "_include_stop_str",
        "_longest_end",
        "_state",
    )

    def __init__(self, stop: Sequence[str], *, include_stop_str: bool = False) -> None:
        """stop: no empty strings (they are refused where a request comes in)."""
        assert all(stop), "an empty stop string must be refused before it gets here"
        self._include_stop_str = include_stop_str
        self._goto: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        # The longest stop string that ends where this node ends.
        self._longest_end: list[str | None] = [None]
        for string in stop:
            self._add(string)
        self._link()
        self._first_chars = frozenset(self._goto[0])
        self._state = 0
        self._held = ""
        self._ended = False

    def push(self, text: str) -> StopResult:
        """Take new text; return what may be shown of all text so far, and the match if one ended it."""
        assert not self._ended, "text was pushed after a stop string had matched"
        if not self._state and self._first_chars.isdisjoint(text):
            return StopResult(text)
        begin = len(self._held)
        pending = self._held + text
        match_start, match = self._scan(pending, begin)
        if match is not None:
            self._ended, self._held = True, ""
            end = match_start + (len(match) if self._include_stop_str else 0)
            return StopResult(pending[:end], match)
        emitted = len(pending) - self._depth[self._state]
        self._held = pending[emitted:]
        return StopResult(pending[:emitted])

    def skip(self, text: str) -> str:
        """Take text in which nothing may match (made before min_tokens); return what to show."""
        shown = self.flush() + text
        self._state = 0
        return shown

    def flush(self) -> str:
        """Return the text still held back; call it when the text ends without a match."""
        shown, self._held = self._held, ""
        return shown

    def fork(self) -> StopMatcher:
        """Return a copy that goes on by itself."""
        return copy.copy(self)  # what a push changes is never changed in place

    def _scan(self, pending: str, begin: int) -> tuple[int, str | None]:
        """Return start and string of the best match in pending, whose new text starts at begin."""
        goto, fail, depth, longest_end = self._goto, self._fail, self._depth, self._longest_end
        state = self._state
        best_start, best = len(pending), None
        for index in range(begin, len(pending)):
            char = pending[index]
            while (following := goto[state].get(char)) is None and state:
                state = fail[state]
            state = following or 0
            if (string := longest_end[state]) is not None:
                start = index + 1 - len(string)
                if start <= best_start:  # later end at the same start = longer
                    best_start, best = start, string
            if best is not None and index + 1 - depth[state] > best_start:
                break  # every candidate still alive starts later
        self._state = state
        return best_start, best

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            following = self._goto[state].get(char)
            if following is None:
                following = len(self._goto)
                self._goto[state][char] = following
                self._goto.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._longest_end.append(None)
            state = following
        self._longest_end[state] = string

    def _link(self) -> None:
        """Set each node's fail link: the node of its longest proper end that is in the tree."""
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._goto[state].items():
                back = self._fail[state]
                while char not in self._goto[back] and back:
                    back = self._fail[back]
                self._fail[child] = self._goto[back].get(char, 0)
                if self._longest_end[child] is None:
                    self._longest_end[child] = self._longest_end[self._fail[child]]
                queue.append(child)
