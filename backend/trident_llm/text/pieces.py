"""What bytes a token stands for, read from a tokenizer's decoder.

Owns the rules of the three decoder families in which every token has bytes of its own (byte-level
BPE, Metaspace, SentencePiece with byte fallback). It must not know a vocabulary or a stream.

Invariant: for a decoder that `read_byte_rules` accepts, the bytes of the tokens of a text, joined
and with the leading blank taken off as the rules say, are the bytes of the decoder's own text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's character for each byte: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


BYTE_OF_CHAR: Mapping[str, int] = _byte_level_alphabet()
CHAR_OF_BYTE: Mapping[int, str] = {byte: char for char, byte in BYTE_OF_CHAR.items()}


@dataclass(frozen=True)
class ByteRules:
    """How one decoder turns a token's string ("piece") to bytes.

    byte_level: pieces are written in the byte-level alphabet.
    byte_fallback: a piece `<0xNN>` is that byte; invalid bytes then become one U+FFFD each.
    replacements: (old, new) pairs applied to a piece, in order.
    bare_first_mark: in the first token of a text, this mark stands for nothing.
    strip_char, strip_count: up to so many of this character are taken off the start of a text.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    bare_first_mark: str | None = None
    strip_char: str = " "
    strip_count: int = 0

    def piece_bytes(self, piece: str) -> bytes:
        """Return the bytes of a token's string in the middle of a text."""
        if self.byte_level:
            try:
                return bytes([BYTE_OF_CHAR[char] for char in piece])
            except KeyError:  # an added token, written as it is
                return piece.encode("utf-8", "replace")
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        if self.byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return piece.encode("utf-8", "replace")

    def first_piece_bytes(self, piece: str) -> bytes:
        """Return the bytes of a token's string at the start of a text, before any stripping."""
        if self.bare_first_mark is not None:
            piece = piece.replace(self.bare_first_mark, "")
        return self.piece_bytes(piece)


def read_byte_rules(decoder_state: bytes | None) -> ByteRules | None:
    """Return the byte rules of a decoder, or None where a token has no bytes of its own.

    decoder_state: the decoder's JSON as the `tokenizers` library writes it; None = no decoder.
    """
    if decoder_state is None:
        return None
    steps = _flatten(json.loads(decoder_state))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteRules(byte_level=True)
    if kinds == ["Metaspace"]:
        mark = steps[0]["replacement"]
        keeps_blank = steps[0].get("prepend_scheme", "always") == "never"
        return ByteRules(replacements=((mark, " "),), bare_first_mark=None if keeps_blank else mark)
    return _read_sentencepiece_rules(steps)


def _read_sentencepiece_rules(steps: list[dict[str, Any]]) -> ByteRules | None:
    """Read the sequence Replace..., ByteFallback, Fuse, Strip (each may be absent)."""
    replacements: list[tuple[str, str]] = []
    while steps and steps[0]["type"] == "Replace":
        pattern = steps[0]["pattern"]
        if "String" not in pattern:
            return None
        replacements.append((pattern["String"], steps[0]["content"]))
        steps = steps[1:]
    kinds = [step["type"] for step in steps]
    if kinds not in (
        ["ByteFallback", "Fuse", "Strip"],
        ["ByteFallback", "Fuse"],
        ["ByteFallback"],
        ["Fuse", "Strip"],
        ["Fuse"],
    ):
        return None
    rules = ByteRules(byte_fallback="ByteFallback" in kinds, replacements=tuple(replacements))
    if "Strip" not in kinds:
        return rules
    strip = steps[-1]
    if strip["stop"] != 0:
        return None
    return ByteRules(
        byte_fallback=rules.byte_fallback,
        replacements=rules.replacements,
        strip_char=strip["content"],
        strip_count=strip["start"],
    )


def _flatten(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the steps of a decoder whose sequences may be nested."""
    if state["type"] != "Sequence":
        return [state]
    return [step for child in state["decoders"] for step in _flatten(child)]
