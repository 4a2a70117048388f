"""Ids to text, as they are made: the text deltas of one sequence.

Owns the state between two tokens of one sequence. It must not know stop strings, requests or how
ids are chosen.

Invariant: the deltas of a sequence, joined, are the decoder's text of prompt and output without
its text of the prompt, and no delta holds a character that later tokens could still complete.
"""

from __future__ import annotations

import codecs
import copy
import re
from collections.abc import Iterator, Sequence
from typing import Protocol

from trident_llm.text.pieces import ByteRules
from trident_llm.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")
_MAX_INCOMPLETE_BYTES = 3
# Tokens before the text that the real decoder sees with it, where it must be asked.
_CONTEXT_TOKENS = 6


class _Stream(Protocol):
    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...

    def fork(self) -> _Stream: ...


class Detokenizer:
    """Turns the output of one sequence to text, in time independent of the sequence's length.

    Works on bytes where every token has bytes of its own, and so tells an incomplete character
    (held back, at most 3 bytes) from bytes that can never become one (U+FFFD at once) and from a
    U+FFFD that was written on purpose. Ids outside the tokenizer stand for nothing.

    One limit of streaming: SentencePiece's own decoder looks at a whole run of byte tokens and
    gives U+FFFD for all of its bytes if one is invalid; here valid characters of the run, which
    were shown before the invalid byte came, stay.
    """

    __slots__ = ("_stream",)

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        """prompt_ids: what comes before the output; only a few at its ends are looked at.

        spaces_between_special_tokens: False = no blank between adjacent special tokens, where a
        decoder (WordPiece, say) would write one.
        """
        hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stream: _Stream
        if tokenizer.byte_rules is not None:
            self._stream = _ByteStream(tokenizer, tokenizer.byte_rules, prompt_ids, hidden)
        else:
            joined = frozenset() if spaces_between_special_tokens else tokenizer.special_ids
            self._stream = _DecodedStream(tokenizer, prompt_ids, hidden, joined)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new output ids; return the new text, "" while a character is incomplete."""
        return self._stream.push(token_ids)

    def flush(self) -> str:
        """Return the rest at the end of the output: an incomplete character becomes U+FFFD."""
        return self._stream.flush()

    def fork(self) -> Detokenizer:
        """Return a copy that goes on by itself."""
        other = copy.copy(self)
        other._stream = self._stream.fork()
        return other


class _ByteStream:
    """The path for decoders with byte rules: joins the tokens' bytes and decodes UTF-8."""

    __slots__ = (
        "_decoder",
        "_escapes",
        "_first",
        "_hidden",
        "_prompt_tail",
        "_resolving",
        "_rules",
        "_strip",
        "_tokenizer",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        rules: ByteRules,
        prompt_ids: Sequence[int],
        hidden: frozenset[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._rules = rules
        self._hidden = hidden
        # With byte fallback each invalid byte is one U+FFFD: let the codec keep them apart.
        self._escapes = rules.byte_fallback
        errors = "surrogateescape" if self._escapes else "replace"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)
        self._first = True  # no token yet
        self._strip = rules.strip_count
        self._read_prompt_start(prompt_ids)
        self._prompt_tail = self._find_prompt_tail(prompt_ids)
        self._decoder.decode(self._prompt_tail)
        # While the prompt's own incomplete bytes are in the decoder: the output bytes after them.
        self._resolving: bytes | None = b"" if self._prompt_tail else None

    def push(self, token_ids: Sequence[int]) -> str:
        hidden, token_bytes = self._hidden, self._tokenizer.token_bytes
        data = b"".join([token_bytes(id_) for id_ in token_ids if id_ not in hidden])
        if self._first:
            data = self._take_first(token_ids)
        text = self._decoder.decode(data)
        if self._resolving is not None:
            self._resolving += data
        return self._finish(text) if text else ""

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        return self._finish(text) if text else ""

    def fork(self) -> _ByteStream:
        other = copy.copy(self)
        other._decoder = copy.copy(self._decoder)
        return other

    def _finish(self, text: str) -> str:
        if self._resolving is not None:
            text = self._without_prompt_tail(text, self._resolving)
            self._resolving = None
        if self._escapes and not text.isascii():
            text = _ESCAPED_BYTE.sub(_REPLACEMENT, text)
        while self._strip and text:
            if text[0] != self._rules.strip_char:
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text

    def _kept(self, token_ids: Sequence[int]) -> Iterator[str]:
        """Yield the strings of the tokens that the decoder would see."""
        for id_ in token_ids:
            if id_ not in self._hidden and (piece := self._tokenizer.piece(id_)) is not None:
                yield piece

    def _take_first(self, token_ids: Sequence[int]) -> bytes:
        """Return the bytes of ids that may hold the first token of the whole text."""
        pieces = list(self._kept(token_ids))
        if not pieces:
            return b""
        self._first = False
        rest = b"".join([self._rules.piece_bytes(piece) for piece in pieces[1:]])
        return self._rules.first_piece_bytes(pieces[0]) + rest

    def _read_prompt_start(self, prompt_ids: Sequence[int]) -> None:
        """Find out whether the prompt already holds what is stripped off the start of a text."""
        for piece in self._kept(prompt_ids):
            self._first = False
            text = self._rules.piece_bytes(piece).decode("utf-8", "replace")
            while self._strip and text.startswith(self._rules.strip_char):
                text = text[1:]
                self._strip -= 1
            if text:
                self._strip = 0
            if not self._strip:
                return

    def _find_prompt_tail(self, prompt_ids: Sequence[int]) -> bytes:
        """Return the incomplete character that the prompt ends with, b"" if it ends whole."""
        end = b""
        for id_ in reversed(prompt_ids):
            if id_ not in self._hidden:
                end = self._tokenizer.token_bytes(id_) + end
            if len(end) > _MAX_INCOMPLETE_BYTES:
                break
        probe = codecs.getincrementaldecoder("utf-8")("replace")
        probe.decode(end)
        return probe.getstate()[0]

    def _without_prompt_tail(self, text: str, output: bytes) -> str:
        """Drop from the first text what the decoder gives for the prompt alone.

        A character that the output completed is the output's; one that it broke is the prompt's.
        """
        if self._escapes:
            broken = len(self._prompt_tail) if _ESCAPED_BYTE.match(text) else 0
            return text[broken:]
        written = (self._prompt_tail + output).startswith(_REPLACEMENT.encode())
        return text[1:] if text[0] == _REPLACEMENT and not written else text


class _DecodedStream:
    """The path for all other decoders: decodes a short window twice and takes the difference."""

    __slots__ = (
        "_after_special",
        "_hidden",
        "_joined",
        "_prefix",
        "_read",
        "_tokenizer",
        "_window",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        hidden: frozenset[int],
        joined: frozenset[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._joined = joined
        self._window: list[int] = []
        for id_ in reversed(prompt_ids):
            if len(self._window) == _CONTEXT_TOKENS:
                break
            if self._is_shown(id_):
                self._window.insert(0, id_)
        self._read = len(self._window)  # tokens whose text has been emitted
        self._after_special = bool(self._window) and self._window[-1] in joined

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push_one(id_) for id_ in token_ids if self._is_shown(id_)])

    def flush(self) -> str:
        return self._take()

    def fork(self) -> _DecodedStream:
        other = copy.copy(self)
        other._window = list(self._window)
        return other

    def _push_one(self, id_: int) -> str:
        is_special = id_ in self._joined
        bare = is_special and self._after_special
        self._after_special = is_special
        if bare:
            text = self._take() + (self._tokenizer.piece(id_) or "")
            self._window.append(id_)
            self._read = len(self._window)
            return text
        self._window.append(id_)
        text = self._decode(self._window)
        held = len(self._window) - self._read
        written = _REPLACEMENT in (self._tokenizer.piece(id_) or "")
        if text.endswith(_REPLACEMENT) and not written and held <= _MAX_INCOMPLETE_BYTES:
            return ""
        return self._take()

    def _take(self) -> str:
        """Return the text of the tokens not emitted yet, and move the window on."""
        before = self._decode(self._window[: self._read])
        text = self._decode(self._window)[len(before) :]
        del self._window[: max(0, min(self._read, len(self._window) - _CONTEXT_TOKENS))]
        self._read = len(self._window)
        return text

    def _is_shown(self, id_: int) -> bool:
        return id_ not in self._hidden and self._tokenizer.piece(id_) is not None

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
