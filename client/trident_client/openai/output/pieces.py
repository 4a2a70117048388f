"""The parts of an output, as the parsers give them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Arguments", "CallStart", "Piece", "Reasoning", "Text", "joined"]


@dataclass(frozen=True)
class Text:
    """Content for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """What the model thought before it answered."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool call begins; its arguments follow. `index` counts the output's calls."""

    index: int
    name: str
    short_id: bool = False  # some templates take only ids of nine letters and digits


@dataclass(frozen=True)
class Arguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Piece = Text | Reasoning | CallStart | Arguments


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same output with neighbours of one kind made one, and nothing empty."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(piece, CallStart):
            result.append(piece)
        elif not piece.text:
            continue
        elif isinstance(piece, Text) and isinstance(last, Text):
            result[-1] = Text(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + piece.text)
        elif (
            isinstance(piece, Arguments) and isinstance(last, Arguments)
            and piece.index == last.index
        ):  # fmt: skip
            result[-1] = Arguments(piece.index, last.text + piece.text)
        else:
            result.append(piece)
    return result
