"""Patterns mean what Python's own regular expressions mean, or are refused."""

from __future__ import annotations

import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trident_llm.text.grammar.formats import FORMAT_PATTERNS
from trident_llm.text.grammar.pattern import (
    MAX_REPEAT,
    PatternError,
    parse,
    write,
    write_in_json,
)

PATTERNS = [
    "abc", "^abc$", "a|^b$|cd", "a*", "a+b?", "(ab){2,3}", "(?:a|b)*c", "[a-c]{2}", "[^a-c]", ".",
    r"\d+\.\d*", r"\w-\W", r"\s\S", r"[\w.-]+", r"[^\d\s]", r"\x41\u0042\t", r"\.\*\[\]",
    "(?P<n>a)b", "a{0}b", "a{2,}", r"[\]\-^]", "(a|)b", "", "^$", r"\/", "a+?b", "[^\\n]", r"[\s\S]",
    '"', r"\\", '[a"]', r"\n", r"\x01", "}", "a-z", "[a-]", "(?:)a", "^.{1,3}$",
]  # fmt: skip
TEXTS = ["", "a", "b", "c", "ab", "abc", "abab", "cd", "d", "aa", "aaa", "ac", "bc", "a-", "1.5", "1.",
         "A", "AB\t", ".*[]", "-", "]", "^", "/", '"', "\\", "\n", "\x01", "}", "a-z", " ", "é", "\u2028",
         "a\n", "😀", " x", "_-%", "x-!"]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_written_pattern_matches_what_it_was_read_from_matches(pattern: str) -> None:
    plain = write(parse(pattern))
    for text in filter(str.isascii, TEXTS):
        expected = re.fullmatch(pattern, text) is not None
        assert (re.fullmatch(_for_python(plain), text) is not None) == expected, text


@pytest.mark.parametrize("pattern", PATTERNS)
def test_in_json_nothing_matches_that_is_no_json_or_no_match(pattern: str) -> None:
    written = _for_python(write_in_json(parse(pattern)))
    for text in TEXTS:
        for body in (json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], text):
            if re.fullmatch(written, body):
                assert re.fullmatch(pattern, json.loads(f'"{body}"')), body


@pytest.mark.parametrize(
    ("pattern", "body"),
    [('"', '\\"'), (r"\\", "\\\\"), (r"a\n", "a\\n"), (r"\x01", "\\u0001"), ("[a-c]+", "cab")],
)
def test_in_json_characters_are_escaped_as_json_demands(pattern: str, body: str) -> None:
    assert re.fullmatch(_for_python(write_in_json(parse(pattern))), body)


def test_a_pair_of_escaped_surrogates_is_one_character() -> None:
    assert write(parse(r"\ud83d\ude00")) == write(parse("😀")) == r"\u{1f600}"


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "without its )"),
        (")", "without its ("),
        ("[a", "without its ]"),
        ("[]", "empty class"),
        ("*a", "nothing before"),
        ("a**", "two quantifiers"),
        ("a{2", "no quantifier"),
        ("a{,3}", "no quantifier"),
        ("a{3,2}", "below its start"),
        ("a{1000000000}", f"more than {MAX_REPEAT}"),
        ("(a{1000}){1000}", "too large"),
        ("(?=a)a", "lookaround"),
        ("(?!a)a", "lookaround"),
        ("(?<=a)a", "lookaround"),
        ("(?<!a)a", "lookaround"),
        ("(?i)a", "lookaround or a flag"),
        (r"(a)\1", "not supported"),
        (r"\bfoo", "not supported"),
        (r"\p{L}", "not supported"),
        (r"\Z", "not supported"),
        (r"\x4", "broken"),
        (r"\u{110000}", "beyond Unicode"),
        (r"\ud800", "lone surrogate"),
        ("[\ud800]", "lone surrogate"),
        ("a\\", "single backslash"),
        ("[z-a]", "ends before"),
        ("a^b", "only at its start"),
        ("a$b", "only at its end"),
        ("(^a)", "only at its start"),
        ("(" * 100 + ")" * 100, "nests"),
        ("a" * 5000, "at most"),
    ],
)
def test_what_no_automaton_matches_is_refused_by_name(pattern: str, says: str) -> None:
    with pytest.raises(PatternError, match=re.escape(says)):
        parse(pattern)


def test_a_class_that_json_cannot_hold_is_refused() -> None:
    # Negated over everything: no character is left.
    with pytest.raises(PatternError, match=r"matches nothing|no JSON string"):
        write_in_json(parse(r"[^\s\S]"))


def test_an_open_class_is_written_as_what_it_excludes() -> None:
    # Compilers are fast with these alone.
    assert write(parse("[^a]")) == r"[^a\ud800-\udfff]"
    assert write_in_json(parse("[^a-z]{9}")).startswith("(?:(?:[")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(alphabet="ab(){}[]|*+?^$.\\-,0123dwsu", max_size=12))
def test_any_text_is_read_or_refused(pattern: str) -> None:
    try:
        node = parse(pattern)
        written = write(node)
    except PatternError:
        return
    re.compile(_for_python(written))
    # Plain patterns stay as they are, but for the surrogates, which open classes leave out.
    assert write(parse(written.replace(r"\ud800-\udfff", ""))) == written


def test_reading_is_fast_for_hostile_patterns() -> None:
    start = time.process_time()
    for pattern in ("(a" * 60 + ")*" * 60, "[^a]" * 1000, "(a|b|" * 60 + ")" * 60, "(?<" * 1000):
        try:
            write_in_json(parse(pattern))
        except PatternError:
            continue
    assert time.process_time() - start < 2


@pytest.mark.parametrize("name", FORMAT_PATTERNS)
def test_patterns_of_formats_can_be_written(name: str) -> None:
    assert write_in_json(parse(FORMAT_PATTERNS[name]))


@pytest.mark.parametrize(
    ("name", "valid", "not_valid"),
    [
        ("date", ["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29", "2024-04-31"]),
        ("time", ["23:59:59Z", "00:00:00.5+05:30"], ["24:00:00Z", "12:00:00", "12:60:00Z"]),
        ("date-time", ["2024-05-06T07:08:09Z"], ["2024-05-06 07:08:09Z", "2024-05-06T07:08:09"]),
        ("duration", ["P3Y6M4DT12H30M5S", "PT0S", "P2W"], ["P", "PT", "P1D2H", "1D"]),
        ("email", ["a.b+c@ex-ample.org"], ["a", ".a@b", "a..b@c", "a@-b"]),
        ("hostname", ["a", "a-b.c1.org"], ["-a", "a-", "a..b", "xn--a"]),
        ("ipv4", ["0.0.0.0", "255.255.255.255"], ["256.0.0.0", "01.1.1.1", "1.1.1"]),
        ("ipv6", ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "1::8", "fe80::1:2"], [":", "1:2", "1::2::3", "1:2:3:4:5:6:7:8:9"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
        ("uri", ["https://a.org/b/c?d=e#f", "ftp://x:21"], ["a b", "//a.org", "http://"]),
    ],
)  # fmt: skip
def test_formats(name: str, valid: list[str], not_valid: list[str]) -> None:
    pattern = re.compile(_for_python(write(parse(FORMAT_PATTERNS[name]))))
    assert [text for text in valid if not pattern.fullmatch(text)] == []
    assert [text for text in not_valid if pattern.fullmatch(text)] == []


def _for_python(written: str) -> str:
    """The same pattern with characters beyond four digits as Python spells them."""
    return re.sub(r"\\u\{([0-9a-f]+)\}", lambda match: f"\\U{int(match[1], 16):08x}", written)
