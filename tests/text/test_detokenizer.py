from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from trident_llm.text.detokenizer import Detokenizer
from trident_llm.text.pieces import CHAR_OF_BYTE, read_byte_rules
from trident_llm.text.tokenizer import SpecialTokenNames, Tokenizer

from .tokenizer_builders import (
    BYTE_LEVEL_CONFIG,
    SENTENCEPIECE_CONFIG,
    SENTENCES,
    WORDPIECE_CONFIG,
    make_byte_level,
    make_sentencepiece,
    make_wordpiece,
)


def wrap(backend: Backend, config: dict[str, str]) -> Tokenizer:
    return Tokenizer(backend, SpecialTokenNames(named=config))


BYTE_LEVEL = wrap(make_byte_level(), BYTE_LEVEL_CONFIG)
SENTENCEPIECE = wrap(make_sentencepiece(), SENTENCEPIECE_CONFIG)
METASPACE = wrap(
    make_sentencepiece(prepend="always", decoder=decoders.Metaspace()), SENTENCEPIECE_CONFIG
)
WORDPIECE = wrap(make_wordpiece(), WORDPIECE_CONFIG)
ALL = [BYTE_LEVEL, SENTENCEPIECE, METASPACE, WORDPIECE]
MELTING = "\U0001fae0"  # no vocabulary here has a token for it


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Return one token per byte."""
    if tokenizer is BYTE_LEVEL:
        pieces = [CHAR_OF_BYTE[byte] for byte in data]
    else:
        pieces = [f"<0x{byte:02X}>" for byte in data]
    ids = [tokenizer.token_id(piece) for piece in pieces]
    return [id_ for id_ in ids if id_ is not None]


def letter_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return one token per letter."""
    return [id_ for letter in text if (id_ := tokenizer.token_id(letter)) is not None]


def stream(tokenizer: Tokenizer, prompt: list[int], output: list[int], **options: Any) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, **options)
    return [*(detokenizer.push([id_]) for id_ in output), detokenizer.flush()]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE])
@pytest.mark.parametrize("cut", [(2,), (1,), (3,), (1, 2, 3)])
def test_character_split_over_tokens_comes_whole(
    tokenizer: Tokenizer, cut: tuple[int, ...]
) -> None:
    ids = byte_ids(tokenizer, MELTING.encode())
    detokenizer = Detokenizer(tokenizer, byte_ids(tokenizer, b"x"))
    bounds = [0, *cut, 4]
    deltas = [detokenizer.push(ids[a:b]) for a, b in pairwise(bounds)]
    assert deltas == [""] * len(cut) + [MELTING]
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE])
def test_three_kinds_of_replacement_characters(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, byte_ids(tokenizer, b"x"))
    assert detokenizer.push(byte_ids(tokenizer, b"\xff")) == "\ufffd"  # never valid: at once
    assert detokenizer.push(byte_ids(tokenizer, "\ufffd".encode())) == "\ufffd"  # meant
    assert detokenizer.push(byte_ids(tokenizer, b"\xf0\x9f")) == ""  # incomplete: held back
    assert detokenizer.push(byte_ids(tokenizer, b"\xab\xa0")) == MELTING
    assert detokenizer.push(byte_ids(tokenizer, b"\xe2\x82")) == ""
    tail = detokenizer.flush()
    assert tail == tokenizer.decode(byte_ids(tokenizer, b"\xe2\x82"))
    assert set(tail) == {"\ufffd"}


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE])
def test_prompt_that_ends_inside_a_character(tokenizer: Tokenizer) -> None:
    pepper = "\U0001f336".encode()
    prompt = tokenizer.encode("Hello world ") + byte_ids(tokenizer, pepper[:2])
    rest, hot = byte_ids(tokenizer, pepper[2:]), letter_ids(tokenizer, "hot")
    assert stream(tokenizer, prompt, [*rest, *hot])[:3] == ["", "\U0001f336", "h"]
    assert stream(tokenizer, prompt, hot) == ["h", "o", "t", ""]
    assert stream(tokenizer, prompt, []) == [""]
    joined = "".join(stream(tokenizer, prompt, rest[:1]))
    assert tokenizer.decode(prompt) + joined == tokenizer.decode(prompt + rest[:1])
    broken = [*rest[:1], *hot]
    joined = "".join(stream(tokenizer, prompt, broken))
    assert tokenizer.decode(prompt) + joined == tokenizer.decode(prompt + broken)


def test_prompt_that_ends_inside_a_replacement_character() -> None:
    prompt, rest = byte_ids(BYTE_LEVEL, b"\xef\xbf"), byte_ids(BYTE_LEVEL, b"\xbd")
    assert stream(BYTE_LEVEL, prompt, rest) == ["\ufffd", ""]


@pytest.mark.parametrize("tokenizer", ALL)
def test_one_token_at_a_time_equals_one_decode(tokenizer: Tokenizer) -> None:
    for text in [*SENTENCES, "hello singing, a world.", f"a{MELTING}b \U0001f979 \U0001f336"]:
        ids = tokenizer.encode(text)
        for cut in range(len(ids)):
            prompt, output = ids[:cut], ids[cut:]
            before, whole = tokenizer.decode(prompt), tokenizer.decode(ids)
            joined = "".join(stream(tokenizer, prompt, output))
            assert before.rstrip("\ufffd") + joined == whole


@pytest.mark.parametrize("tokenizer", [SENTENCEPIECE, METASPACE])
def test_leading_blank_is_kept_in_the_middle_only(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Daenerys is the Khaleesi", add_special_tokens=False)
    assert "".join(stream(tokenizer, [], ids)) == "Daenerys is the Khaleesi"
    assert "".join(stream(tokenizer, [1], ids)) == "Daenerys is the Khaleesi"
    prompt = tokenizer.encode("I know:")
    assert "".join(stream(tokenizer, prompt, ids)) == " Daenerys is the Khaleesi"
    shown = "".join(stream(tokenizer, [], [1, *ids], skip_special_tokens=False))
    assert shown == tokenizer.decode([1, *ids], skip_special_tokens=False)


def test_only_as_many_blanks_are_stripped_as_the_decoder_strips() -> None:
    blank = SENTENCEPIECE.token_id("▁")
    assert blank is not None
    for output in ([blank] * 3, [blank, blank, *byte_ids(SENTENCEPIECE, b"a")]):
        joined = "".join(stream(SENTENCEPIECE, [], output))
        assert joined == SENTENCEPIECE.decode(output)
        joined = "".join(stream(SENTENCEPIECE, [blank], output))
        assert joined == SENTENCEPIECE.decode([blank, *output])


@pytest.mark.parametrize("tokenizer", ALL)
def test_special_tokens_are_hidden_or_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello a", add_special_tokens=False)
    output = [2, *ids, 1, 2]
    assert "".join(stream(tokenizer, ids, output)) == "".join(stream(tokenizer, ids, ids))
    shown = "".join(stream(tokenizer, ids, output, skip_special_tokens=False))
    before = tokenizer.decode(ids, skip_special_tokens=False)
    assert before + shown == tokenizer.decode(ids + output, skip_special_tokens=False)


def test_no_blank_between_special_tokens_on_request() -> None:
    output = [1, 2, 2, *WORDPIECE.encode("hello", add_special_tokens=False), 2]
    options = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert "".join(stream(WORDPIECE, [], output, **options)) == "[CLS][SEP][SEP] hello [SEP]"


@pytest.mark.parametrize("tokenizer", ALL)
def test_ids_outside_the_tokenizer_stand_for_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello a world")
    strays = [-1, tokenizer.vocab_size, 2**40]
    mixed = [stray for id_ in ids for stray in (*strays, id_)]
    assert "".join(stream(tokenizer, strays, mixed)) == tokenizer.decode(ids)


@given(st.lists(st.integers(0, 480), max_size=12), st.lists(st.integers(0, 480), max_size=12))
def test_any_byte_level_ids_equal_one_decode(prompt: list[int], output: list[int]) -> None:
    deltas = stream(BYTE_LEVEL, prompt, output)
    before = BYTE_LEVEL.decode(prompt)
    whole = BYTE_LEVEL.decode(prompt + output)
    # A character that the prompt began and the output completed is the output's.
    assert before + "".join(deltas) == whole or before[:-1] + "".join(deltas) == whole
    assert Detokenizer(BYTE_LEVEL, prompt).push(output) + deltas[-1] == "".join(deltas)


@given(st.text(max_size=12), st.text(max_size=12))
def test_any_text_of_byte_tokens_equals_one_decode(prompt: str, output: str) -> None:
    before = byte_ids(SENTENCEPIECE, prompt.encode())
    after = byte_ids(SENTENCEPIECE, output.encode())
    whole = SENTENCEPIECE.decode(before + after)
    assert SENTENCEPIECE.decode(before) + "".join(stream(SENTENCEPIECE, before, after)) == whole


def test_decoder_without_rules_holds_a_split_character() -> None:
    pieces = ["<unk>", "a", "▁b", "\ufffd", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer = wrap(backend, {})
    assert tokenizer.byte_rules is None
    emoji = byte_ids(tokenizer, MELTING.encode())
    assert stream(tokenizer, [1], [1, *emoji, 2, 3]) == [
        "a",
        "",
        "",
        "",
        MELTING,
        " b",
        "\ufffd",
        "",
    ]
    assert "".join(stream(tokenizer, [1], [*emoji[:2]])) == "\ufffd\ufffd"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.BPEDecoder(),
    ],
)
def test_other_decoders_have_no_byte_rules(decoder: Any) -> None:
    assert read_byte_rules(decoder.__getstate__()) is None


def test_no_decoder_joins_with_blanks() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = wrap(backend, {})
    assert "".join(stream(tokenizer, [0], [1, 0])) == " b a"


@pytest.mark.parametrize("tokenizer", ALL)
def test_a_copy_goes_on_by_itself(tokenizer: Tokenizer) -> None:
    one, other = (tokenizer.encode(text) for text in SENTENCES[:2])
    for place in range(len(one)):
        first = Detokenizer(tokenizer)
        text = "".join(first.push([id_]) for id_ in one[:place])
        second = first.fork()
        mine = text + "".join(first.push([id_]) for id_ in one[place:]) + first.flush()
        theirs = text + "".join(second.push([id_]) for id_ in other) + second.flush()
        assert mine == "".join(stream(tokenizer, [], one))
        assert theirs == "".join(stream(tokenizer, [], one[:place] + other))


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE])
def test_a_copy_inside_a_character(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, MELTING.encode())
    first = Detokenizer(tokenizer, byte_ids(tokenizer, b"x"))
    assert first.push(ids[:2]) == ""
    second = first.fork()
    assert second.push(byte_ids(tokenizer, b"y")).endswith("y")
    assert first.push(ids[2:]) == MELTING
