"""The parser of one choice's text: reasoning first, then content and calls."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from trident_client.openai.output.calls import FORMS, CallParser, NamedCall
from trident_client.openai.output.pieces import Piece, Text, joined
from trident_client.openai.output.reasoning import ReasoningParser

__all__ = ["REASONING_PARSERS", "TOOL_PARSERS", "OutputForm", "OutputParser"]

TOOL_PARSERS = ("auto", "off", *FORMS)
"""``auto`` reads every form; calls without a mark count if they name a tool of the request."""

REASONING_PARSERS = ("auto", "off", "open")
"""``auto``: a ``<think>`` block at the beginning; ``open``: the template has opened it already."""


@dataclass(frozen=True)
class OutputForm:
    """What to look for in an output.

    tool_parser: one of TOOL_PARSERS, or "array" for an output that is a list of calls. named: the
    tool whose arguments the whole output is. names: the tools that there are.
    """

    reasoning_parser: str = "off"
    tool_parser: str = "off"
    named: str | None = None
    names: Collection[str] = ()
    max_calls: int | None = None


class OutputParser:
    """Tells the parts of one choice's text apart, while it comes."""

    def __init__(self, form: OutputForm) -> None:
        self._reasoning: ReasoningParser | None = None
        self._calls: CallParser | NamedCall | None = None
        self._max_calls = form.max_calls
        if form.named is not None:
            self._calls = NamedCall(form.named)
        elif form.tool_parser != "off":
            forms = FORMS if form.tool_parser == "auto" else (form.tool_parser,)
            self._calls = CallParser(forms, form.names)
        if form.reasoning_parser != "off":
            self._reasoning = ReasoningParser(begins_inside=form.reasoning_parser == "open")

    def feed(self, text: str) -> list[Piece]:
        """What `text` adds."""
        if not text:
            return []
        return self._pass_on(
            [Text(text)] if self._reasoning is None else self._reasoning.feed(text)
        )

    def finish(self) -> list[Piece]:
        """What was held back, now that nothing follows."""
        pieces = [] if self._reasoning is None else self._pass_on(self._reasoning.finish())
        return self._within_limit(pieces + ([] if self._calls is None else self._calls.finish()))

    def _pass_on(self, pieces: list[Piece]) -> list[Piece]:
        if self._calls is None:
            return joined(pieces)
        found: list[Piece] = []
        for piece in pieces:
            found += self._calls.feed(piece.text) if isinstance(piece, Text) else [piece]
        return self._within_limit(found)

    def _within_limit(self, pieces: list[Piece]) -> list[Piece]:
        if self._max_calls is not None:
            pieces = [piece for piece in pieces if getattr(piece, "index", 0) < self._max_calls]
        return joined(pieces)
