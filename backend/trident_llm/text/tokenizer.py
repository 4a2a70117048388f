"""The tokenizer of a model: text to ids and back, and the bytes each token stands for.

Owns the `tokenizers` objects and what a model folder says about special tokens. It must not know
chats, requests or streams. Nothing in a model folder is ever run as code.

Invariant: after construction no shared object changes, so every method may be called from any
number of threads at once.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend

from trident_llm.text.literals import ControlLiterals
from trident_llm.text.pieces import CHAR_OF_BYTE, read_byte_rules

NAMED_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TokenizerError(Exception):
    """A tokenizer that cannot be loaded, or a text that cannot be encoded."""


@dataclass(frozen=True)
class SpecialTokenNames:
    """What a folder says of special tokens.

    named: "bos_token" and so on, to the token's string. extra: further special tokens.
    added: tokens that tokenizer_config.json adds to (or changes in) tokenizer.json, in id order.
    """

    named: Mapping[str, str]
    extra: tuple[str, ...] = ()
    added: tuple[AddedToken, ...] = ()


class Tokenizer:
    """Encodes and decodes; see the module's invariant.

    vocab_size: the largest id + 1, added tokens included.
    bos_token_id, eos_token_id: None where the model has none.
    special_ids: ids of control tokens; control_literals: their strings.
    named_special_tokens: "bos_token" and so on, to the token's string.
    max_chars_per_token: length of the longest token: a text longer than this times a token limit
        cannot fit that limit (runs of blanks that a normalizer drops aside).
    byte_rules: how ids turn to bytes; None where only the real decoder knows.
    """

    def __init__(self, backend: Backend, names: SpecialTokenNames) -> None:
        """backend: becomes this object's own; it must not be used by anyone else afterwards."""
        backend.no_truncation()
        backend.no_padding()
        _add_tokens(backend, names)
        self._backend = backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.max_chars_per_token = max(map(len, vocabulary), default=1)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.control_literals = ControlLiterals(
            {token.content: token for token in added.values() if token.special}
        )
        self.named_special_tokens = dict(names.named)
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self._unk_token_id = self._named_id("unk_token")
        self._adds_bos = self._find_adds_bos()
        decoder = backend.decoder
        self.byte_rules = read_byte_rules(None if decoder is None else decoder.__getstate__())
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        self._plain = _make_plain_backend(backend, continues=False)
        self._plain_continuing = _make_plain_backend(backend, continues=True)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Load the tokenizer of a Hugging Face model folder.

        tokenizer.json decides what is added around a text, as in transformers 5: the flags
        add_bos_token and add_eos_token of tokenizer_config.json are not read beside it. A folder
        without tokenizer.json is converted by transformers (imported only then).

        Raises TokenizerError, naming the file, if one is missing or broken.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise TokenizerError(f"{folder} is not a folder; give a model folder")
        file = folder / "tokenizer.json"
        if not file.is_file():
            return cls(*_convert_slow_tokenizer(folder))
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{file} cannot be read as a tokenizer: {error}") from error
        return cls(backend, read_special_token_names(folder))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text in which the strings of special tokens mean those tokens.

        A text that already begins with the BOS string gets no second BOS.
        Raises TokenizerError if the text holds a lone surrogate.
        """
        ids = _encode(self._backend, text, add_special_tokens)
        if add_special_tokens and self._adds_bos and len(ids) > 1 and ids[1] == self.bos_token_id:
            bos = self.named_special_tokens["bos_token"]
            return ids[1:] if text.startswith(bos) else ids
        return ids

    def encode_beginning(self, text: str, max_tokens: int) -> list[int]:
        """Return the ids of as much of a text's beginning as fits ``max_tokens`` ids.

        What is added around a text is part of them. Raises TokenizerError as encode does.
        """
        room = max_tokens - self._backend.num_special_tokens_to_add(False)
        encoding = _encoding(self._backend, text, False)
        encoding.truncate(max(0, room))
        ids: list[int] = self._backend.post_process(encoding).ids
        return ids[:max_tokens]

    def encode_plain(self, text: str, *, at_start: bool = True) -> list[int]:
        """Return the ids of a text in which the strings of special tokens are ordinary text.

        No special tokens are added. at_start: False = the text follows a special token, so it gets
        no leading blank where only the beginning of a whole text has one.
        Raises TokenizerError if the text holds a lone surrogate.
        """
        ids = _encode(self._plain if at_start else self._plain_continuing, text, False)
        if self._forbidden_ids.isdisjoint(ids):
            return ids
        # The model itself knows the token's string (a Unigram model may): spell it out instead.
        return [part for id_ in ids for part in self._spelled_out(id_)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; those outside the tokenizer stand for nothing."""
        known = [id_ for id_ in ids if 0 <= id_ < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for in the middle of a text; b"" outside the tokenizer.

        Special tokens stand for their string.
        """
        if not 0 <= token_id < self.vocab_size:
            return b""
        data = self._bytes[token_id]
        if data is None:
            # Two threads may both compute it: they get the same bytes.
            data = self._bytes[token_id] = self._compute_bytes(token_id)
        return data

    def piece(self, token_id: int) -> str | None:
        """Return the token's string in the vocabulary's own spelling; None outside the tokenizer."""
        if not 0 <= token_id < self.vocab_size:
            return None
        return self._backend.id_to_token(token_id)

    def token_id(self, piece: str) -> int | None:
        """Return the id of a token by its string in the vocabulary's own spelling."""
        return self._backend.token_to_id(piece)

    def _compute_bytes(self, token_id: int) -> bytes:
        piece = self.piece(token_id)
        if piece is None:
            return b""
        if self.byte_rules is not None:
            return self.byte_rules.piece_bytes(piece)
        context = [self._context_id]
        before = self._backend.decode(context, skip_special_tokens=False)
        after = self._backend.decode([*context, token_id], skip_special_tokens=False)
        return after[len(before) :].encode("utf-8", "replace")

    @cached_property
    def _context_id(self) -> int:
        """Return an ordinary token with visible text, to decode others after it."""
        for token_id in range(self.vocab_size):
            if token_id not in self.special_ids and self._backend.decode([token_id]).strip():
                return token_id
        return 0

    @cached_property
    def _forbidden_ids(self) -> frozenset[int]:
        """Ids that plain text must not give: control tokens, but the unknown token is no secret."""
        return self.special_ids - {self._unk_token_id}

    def _spelled_out(self, token_id: int) -> list[int]:
        if token_id not in self._forbidden_ids:
            return [token_id]
        piece = self.piece(token_id) or ""
        if self.byte_rules is not None and self.byte_rules.byte_level:
            piece = "".join(CHAR_OF_BYTE[byte] for byte in piece.encode())
        model = self._backend.model
        ids = [token.id for char in piece for token in model.tokenize(char)]
        return [id_ for id_ in ids if id_ not in self._forbidden_ids]

    def _named_id(self, name: str) -> int | None:
        string = self.named_special_tokens.get(name)
        return None if string is None else self._backend.token_to_id(string)

    def _find_adds_bos(self) -> bool:
        ids: list[int] = self._backend.encode("a").ids
        return self.bos_token_id is not None and ids[:1] == [self.bos_token_id]


def read_special_token_names(folder: Path) -> SpecialTokenNames:
    """Read tokenizer_config.json, and special_tokens_map.json where transformers 5 reads it.

    The map is an older format: it counts only beside a configuration without added_tokens_decoder.
    Raises TokenizerError, naming the file, if one is broken.
    """
    config = read_json_object(folder / "tokenizer_config.json")
    file = folder / "tokenizer_config.json"
    added_by_id = config.get("added_tokens_decoder")
    if added_by_id is None:
        config = {**config, **read_json_object(folder / "special_tokens_map.json")}
    named: dict[str, str] = {}
    extra: list[str] = []
    for key, value in config.items():
        if key in ("additional_special_tokens", "extra_special_tokens"):
            values = value.values() if isinstance(value, dict) else value or ()
            extra.extend(string for item in values if (string := _token_string(item)) is not None)
        elif key.endswith("_token") and (string := _token_string(value)) is not None:
            if key in NAMED_SPECIAL_TOKENS:
                named[key] = string
            else:
                extra.append(string)
    try:
        added = tuple(
            AddedToken(**token)
            for _, token in sorted((added_by_id or {}).items(), key=lambda item: int(item[0]))
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise TokenizerError(f"{file}: added_tokens_decoder must map ids to tokens") from error
    return SpecialTokenNames(named=named, extra=tuple(extra), added=added)


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file, {} if there is no such file.

    Raises TokenizerError, naming the file, if it holds anything else.
    """
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file} must hold a JSON object")
    return value


def _token_string(value: object) -> str | None:
    """Return a token written as a string or as an AddedToken's fields."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _add_tokens(backend: Backend, names: SpecialTokenNames) -> None:
    """Add what the configuration adds, and mark its special tokens as such.

    A special token whose string is in no vocabulary is left out: it would get an id that the model
    has no embedding for.
    """
    present = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    specials = {*names.named.values(), *names.extra}
    for token in names.added:
        if token.content in names.named.values():
            token.special = True
        if repr(token) not in present:
            backend.add_tokens([token])
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [
        AddedToken(string, special=True, normalized=False)
        for string in sorted(specials - known)
        if backend.token_to_id(string) is not None
    ]
    backend.add_special_tokens(missing)


def _encode(backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
    ids: list[int] = _encoding(backend, text, add_special_tokens).ids
    return ids


def _encoding(backend: Backend, text: str, add_special_tokens: bool) -> Encoding:
    try:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    except TypeError as error:  # what the library makes of a string that is not valid Unicode
        raise TokenizerError(
            "the text holds a lone surrogate (half a character); send valid Unicode"
        ) from error


def _make_plain_backend(backend: Backend, *, continues: bool) -> Backend:
    """Return a tokenizer that shares the vocabulary but takes special tokens as ordinary text.

    continues: it encodes the middle of a text, so a blank for its beginning only is left out.
    """
    plain = Backend(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(backend, part)) is not None:
            setattr(plain, part, value)
    added = backend.get_added_tokens_decoder()
    plain.add_tokens([token for _, token in sorted(added.items())])
    if any(plain.token_to_id(token.content) != id_ for id_, token in added.items()):
        # Gaps between the ids of added tokens: only the library's own file format keeps them.
        plain = Backend.from_str(backend.to_str())
    plain.encode_special_tokens = True
    if continues and backend.pre_tokenizer is not None:
        # A copy, because the part itself is shared with the first object.
        pre_tokenizer = copy.deepcopy(backend.pre_tokenizer)
        state = json.loads(pre_tokenizer.__getstate__())
        pre_tokenizer.__setstate__(json.dumps(_without_first_blank(state)).encode())
        plain.pre_tokenizer = pre_tokenizer
    return plain


def _without_first_blank(state: dict[str, Any]) -> dict[str, Any]:
    """Return a pre-tokenizer's state that gives no blank to the beginning of a text only."""
    if state["type"] == "Sequence":
        parts = [_without_first_blank(part) for part in state["pretokenizers"]]
        return {**state, "pretokenizers": parts}
    if state.get("prepend_scheme") == "first":
        return {**state, "prepend_scheme": "never"}
    return state


def _convert_slow_tokenizer(folder: Path) -> tuple[Backend, SpecialTokenNames]:
    """Let transformers build the tokenizer of a folder that has no tokenizer.json."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise TokenizerError(
            f"{folder} has no tokenizer.json; install transformers and sentencepiece, which convert "
            "other tokenizers, or save the model with a tokenizer.json"
        ) from error
    try:
        converted = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # any converter of any model may fail in its own way
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise TokenizerError(
            f"{folder} has no tokenizer.json (add one), and transformers cannot convert what it has "
            f"without running code from the folder: {reason}"
        ) from error
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise TokenizerError(
            f"{folder} has no tokenizer.json and its tokenizer has no fast form; add a tokenizer.json"
        )
    return backend, SpecialTokenNames(named=dict(converted.special_tokens_map))
