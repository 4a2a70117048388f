"""The library that compiles grammars, and what it must know of a tokenizer.

Owns everything that names xgrammar. It must not know processes, caches or requests. The library is
imported in functions only: it loads torch and transformers, which takes seconds.

Invariant: the same vocabulary and spec compile to the same grammar in every process, so what one
process has compiled within its limits another one can compile as cheaply.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trident_llm.text.grammar.spec import EBNF_PART, GrammarKind, GrammarSpec
from trident_llm.text.tokenizer import Tokenizer

# The characters of a string with bounds of its length: as the library has them, and as they must be.
_LOOSE_STRING_CHAR = r"[^\"\\\r\n]"
_STRING_CHAR = r"[^\0-\x1f\"\\\u2028\u2029]"
# Surrogates are no text: neither in UTF-8, which classes of characters stand for, nor in escapes.
_SURROGATES = r"\ud800-\udfff"
_UNICODE_ESCAPE = '"u" [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9]'
_SCALAR_ESCAPE = '"u" (([A-CEFa-cef0-9] [A-Fa-f0-9]) | ([Dd] [0-7])) [A-Fa-f0-9] [A-Fa-f0-9]'
_CLASS_CHAR = r"(?:\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\x[0-9a-fA-F]{1,8}|\\.|[^\\])"
_CLASS_RANGE = re.compile(rf"(?P<low>{_CLASS_CHAR})-(?P<high>{_CLASS_CHAR})", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x[0-9a-f]{2}|.)", re.DOTALL)
_ADDITIONAL_KEY = re.compile(r"^\w*_addl_key\w* ::=.*$", re.MULTILINE)
_ESCAPE_IN_KEY = r' | ("\\" basic_escape basic_string_sub)'


class BackendError(Exception):
    """A grammar that the library refuses; the text is its reason."""


@dataclass(frozen=True)
class Vocabulary:
    """What a grammar must know of the model's tokens.

    tokens: the bytes of each id in the middle of a text; b"" for a token that no grammar may use,
    which control tokens are. vocab_size: width of the logits, at least len(tokens); ids beyond the
    tokens are never allowed. stop_ids: tokens that end an output; none: an output ends as soon as
    it is complete.
    """

    tokens: tuple[bytes, ...]
    vocab_size: int
    stop_ids: tuple[int, ...]

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Tokenizer, *, vocab_size: int, stop_ids: Sequence[int]
    ) -> Vocabulary | None:
        """Return the vocabulary of a model; None where tokens have no bytes of their own.

        vocab_size: of the model's head, which may be wider or narrower than the tokenizer.
        stop_ids: the model's end-of-sequence ids.
        """
        if tokenizer.byte_rules is None:
            return None
        stops = tuple(dict.fromkeys(id_ for id_ in stop_ids if 0 <= id_ < vocab_size))
        unusable = tokenizer.special_ids | set(stops)
        tokens = tuple(
            b"" if id_ in unusable else tokenizer.token_bytes(id_)
            for id_ in range(min(tokenizer.vocab_size, vocab_size))
        )
        return cls(tokens, vocab_size, stops)


def is_installed() -> bool:
    """Whether the library is there; does not import it."""
    return importlib.util.find_spec("xgrammar") is not None


class Backend:
    """The library, set up for one vocabulary. Its methods may be called from any thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self.vocabulary = vocabulary
        self._library = xgrammar
        self._info = xgrammar.TokenizerInfo(
            list(vocabulary.tokens),
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.vocab_size,
            stop_token_ids=list(vocabulary.stop_ids),
        )
        # One thread: compiling must not take the cores that decoding runs on.
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)

    def compile(self, spec: GrammarSpec) -> Any:
        """Return the library's compiled grammar.

        Raises:
            BackendError: the library refuses it.
        """
        try:
            return self._compile(spec)
        except MemoryError:
            raise
        except Exception as error:  # the library raises RuntimeError and its own kinds
            if "bad_alloc" in str(error):
                raise MemoryError from error
            raise BackendError(_reason(str(error))) from error

    def matcher(self, compiled: Any) -> Any:
        """Return a new matcher of the library for a compiled grammar."""
        return self._library.GrammarMatcher(
            compiled, terminate_without_stop_token=not self.vocabulary.stop_ids
        )

    def _compile(self, spec: GrammarSpec) -> Any:
        if spec.kind is GrammarKind.REGEX:
            return self._compiler.compile_regex(spec.text)
        if spec.kind in (GrammarKind.EBNF, GrammarKind.CHOICE):
            return self._compiler.compile_grammar(_without_surrogates(spec.text))
        grammar_type = self._library.Grammar
        if spec.kind is GrammarKind.STRUCTURAL_TAG:
            grammar = grammar_type.from_structural_tag(spec.text)
        elif spec.max_whitespace == 0:
            grammar = grammar_type.from_json_schema(
                spec.text, any_whitespace=False, separators=(", ", ": ")
            )
        else:
            grammar = grammar_type.from_json_schema(
                spec.text, any_whitespace=True, max_whitespace_cnt=spec.max_whitespace
            )
        written = str(grammar)
        mended = _mend(written)
        return self._compiler.compile_grammar(
            grammar if mended == written else grammar_type.from_ebnf(mended)
        )


def _mend(grammar: str) -> str:
    """Return a grammar of JSON, in EBNF, without some outputs that the library lets through.

    Surrogates, in UTF-8 or in escapes, are no text. A string with bounds of its length may hold raw control characters, which JSON forbids (line and
    paragraph separators go too: the form of the pattern ``.*`` is such a string); and the key of an
    additional property may spell a named one in escapes, and so give it a second value.
    """

    def replace(match: re.Match[str]) -> str:
        if match[0] == _LOOSE_STRING_CHAR:
            return _STRING_CHAR
        # Written as \xdf, a character would take an "e" behind it for one of its digits.
        return _ESCAPE.sub(lambda escape: escape[0].replace("\\x", "\\u00"), match[0])

    grammar = grammar.replace(_UNICODE_ESCAPE, _SCALAR_ESCAPE)
    return _ADDITIONAL_KEY.sub(
        lambda line: line[0].replace(_ESCAPE_IN_KEY, ""),
        _without_surrogates(EBNF_PART.sub(replace, grammar)),
    )


def _without_surrogates(grammar: str) -> str:
    """Return a grammar in EBNF whose classes of characters hold no surrogates."""

    def replace(match: re.Match[str]) -> str:
        if not match[0].startswith("["):
            return match[0]
        if match[0].startswith("[^"):
            return f"{match[0][:-1]}{_SURROGATES}]"
        return _CLASS_RANGE.sub(_split_range, match[0])

    return EBNF_PART.sub(replace, grammar)


def _split_range(match: re.Match[str]) -> str:
    low, high = match["low"], match["high"]
    if _code_of(low) < 0xD800 and _code_of(high) > 0xDFFF:
        return rf"{low}-\ud7ff\ue000-{high}"
    return match[0]


def _code_of(char: str) -> int:
    """Return the code point of a character as a class spells it."""
    return int(char[2:], 16) if char[:2] in (r"\u", r"\U", r"\x") else ord(char[-1])


def _reason(text: str) -> str:
    """Return the library's message without the place in its source, and without quoted content."""
    line = text.strip().splitlines()[0] if text.strip() else "no reason given"
    if line.startswith("[") and ".cc:" in line:
        line = line.split(".cc:", 1)[1].partition(": ")[2]
    pieces = line.split('"')
    kept = [piece if index % 2 == 0 else "..." for index, piece in enumerate(pieces)]
    return json.dumps(" ".join(kept))[1:-1][:200].strip()
