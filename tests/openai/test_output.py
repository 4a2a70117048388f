"""The parsers of outputs: what they find, and that it does not matter where the text is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trident_client.openai.output.literals import literal_to_json
from trident_client.openai.output.parser import OutputForm, OutputParser
from trident_client.openai.output.pieces import (
    Arguments,
    CallStart,
    Piece,
    Reasoning,
    Text,
    joined,
)

ALL = OutputForm("auto", "auto", names=("f", "get_weather"))


def parse(parts: Iterable[str], form: OutputForm = ALL) -> list[Piece]:
    parser = OutputParser(form)
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return joined([*pieces, *parser.finish()])


def calls(*named: tuple[str, str], short_ids: bool = False) -> list[Piece]:
    pieces: list[Piece] = []
    for index, (name, arguments) in enumerate(named):
        pieces += [CallStart(index, name, short_ids), Arguments(index, arguments)]
    return pieces


CASES: list[tuple[str, list[Piece]]] = [
    ("Hello.", [Text("Hello.")]),
    (" blank \n", [Text(" blank \n")]),
    ("x < y <tool", [Text("x < y <tool")]),
    ("<think>\nhm \n</think>\n\nSo.", [Reasoning("hm"), Text("So.")]),
    ("<think>still", [Reasoning("still")]),
    ("say <think>", [Text("say <think>")]),
    (
        'See: <tool_call>\n{"name": "f", "arguments": {"a": "}\\"</tool_call>", "b": [1]}}\n'
        '</tool_call>\n<tool_call>{"name":"g","arguments":{}}</tool_call>\n',
        [Text("See: "), *calls(("f", '{"a": "}\\"</tool_call>", "b": [1]}'), ("g", "{}"))],
    ),
    (
        '<think>a</think><tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        [Reasoning("a"), *calls(("f", '{"a": 1}'))],
    ),
    ('<tool_call>[{"name":"f"},{"name":"g","arguments":null}]</tool_call>',
     calls(("f", "{}"), ("g", "{}"))),
    ('<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', calls(("f", '{"a": 1}'))),
    ('<tool_call>{"name":"f","arguments":{"a": 1', calls(("f", '{"a": 1'))),
    ("<tool_call>no call</tool_call>", [Text("<tool_call>no call</tool_call>")]),
    ("<tool_call>", [Text("<tool_call>")]),
    (
        '{"name": "f", "parameters": {"a": 1}}; {"name": "get_weather", "parameters": {}}',
        calls(("f", '{"a": 1}'), ("get_weather", "{}")),
    ),
    ('<|python_tag|>{"name": "new", "parameters": {}}', calls(("new", "{}"))),
    ('{"name": "Alice", "age": 3}', [Text('{"name": "Alice", "age": 3}')]),
    ('{"name": "f", "age": 3}', [Text('{"name": "f", "age": 3}')]),
    ('{"city": "Rome"} it is', [Text('{"city": "Rome"} it is')]),
    (
        '[TOOL_CALLS][{"name":"f","arguments":{"x":[1]}},{"name":"z","arguments":{}}]',
        calls(("f", '{"x":[1]}'), ("z", "{}"), short_ids=True),
    ),
    (
        '[TOOL_CALLS]f[CALL_ID]a1[ARGS]{"x":1}[TOOL_CALLS]g{"y":2}',
        calls(("f", '{"x":1}'), ("g", '{"y":2}'), short_ids=True),
    ),
    (
        "[f(a=1, b='it\\'s', c=[True, None, {'k': (1, 2)}]), get_weather()]",
        calls(
            ("f", '{"a": 1,"b": "it\'s","c": [true, null, {"k": [1, 2]}]}'), ("get_weather", "{}")
        ),
    ),
    ("<|python_start|>[f(a=1)]<|python_end|>", calls(("f", '{"a": 1}'))),
    ("[f(1)]", [Text("[f(1)]")]),
    ("[other(a=1)]", [Text("[other(a=1)]")]),
    ("[1, 2] is a list", [Text("[1, 2] is a list")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_what_is_found(text: str, expected: list[Piece]) -> None:
    assert parse([text]) == expected


@pytest.mark.parametrize("text", [text for text, _ in CASES])
def test_two_pieces_are_as_good_as_one_wherever_the_cut(text: str) -> None:
    whole = parse([text])
    for at in range(len(text) + 1):
        assert parse([text[:at], text[at:]]) == whole, text[:at]
    for size in range(1, 9):
        assert parse(text[at : at + size] for at in range(0, len(text), size)) == whole


FRAGMENTS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]",
    '{"name": "f", "arguments": ', '{"name": "f"', '{"a": 1}', '"', "\\", "{", "}", "[", "]", ",",
    "f(a=", ")", "'", ";", " ", "\n", "x", "<", "</", "[TOOL", "<|python_start|>", "null", "é🎉",
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.lists(st.integers(0, 80), max_size=6),
    st.sampled_from(("auto", "hermes", "llama3_json", "pythonic", "mistral", "array", "off")),
    st.sampled_from(("auto", "open", "off")),
)
def test_no_cut_changes_what_is_found(
    text: str, cuts: list[int], tool_parser: str, reasoning_parser: str
) -> None:
    form = OutputForm(reasoning_parser, tool_parser, names=("f",))
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[start:end] for start, end in itertools.pairwise(edges)]
    found = parse(parts, form)
    assert found == parse([text], form)
    if not any(isinstance(piece, CallStart) for piece in found) and "think>" not in text:
        shown = "".join(piece.text for piece in found if isinstance(piece, (Text, Reasoning)))
        if reasoning_parser == "open":  # a block of reasoning has no whitespace at its beginning
            shown, text = shown.lstrip(), text.lstrip()
        assert shown == text


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {"city": "Rome", "days": 3}}</tool_call>',
        '{"name": "f", "parameters": {"city": "Rome", "days": 3}}',
        '[TOOL_CALLS]f{"city": "Rome", "days": 3}',
        "[f(city='Rome', days=3)]",
    ],
)
def test_arguments_leave_while_the_call_is_being_written(text: str) -> None:
    parser = OutputParser(ALL)
    before_the_end = parser.feed(text[: text.index("days")])
    assert joined(before_the_end)[0] == CallStart(0, "f", "TOOL" in text)
    started = "".join(piece.text for piece in before_the_end if isinstance(piece, Arguments))
    assert '"Rome"' in started


def test_a_block_that_the_template_has_opened() -> None:
    form = OutputForm("open")
    assert parse(["hm</think>So."], form) == [Reasoning("hm"), Text("So.")]
    assert parse(["<think>hm</think>So."], form) == [Reasoning("hm"), Text("So.")]


def test_an_output_that_is_one_calls_arguments() -> None:
    assert parse([" {", "}"], OutputForm(named="f")) == calls(("f", "{}"))
    assert parse([], OutputForm(named="f")) == []


def test_no_more_calls_than_asked_for() -> None:
    form = OutputForm("off", "hermes", names=("f",), max_calls=1)
    text = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
    assert parse([text, text], form) == calls(("f", '{"a":1}'))


def test_a_long_text_takes_time_in_proportion() -> None:
    text = '<tool_call>{"x":"' * 4000
    assert parse(text[at : at + 5] for at in range(0, len(text), 5)) == [Text(text)]
    deep = '<tool_call>{"name":"f","arguments":' + "[" * 20_000
    assert parse([deep])[0] == CallStart(0, "f")


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("1", 1), ("-2.5e3", -2500.0), ("1_000", 1000), ("'a\\n\\x41\\u00e9'", "a\nAé"),
        ('"it\'s"', "it's"), ("True", True), ("null", None), ("(1,)", [1]), ("[]", []),
        ("{'a': {'b': [1, 2,]}}", {"a": {"b": [1, 2]}}), ("{1: 2}", {"1": 2}),
        ("__import__('os')", "__import__('os')"), ("1 + 1", "1 + 1"), ("[" * 500, "[" * 500),
        ("London", "London"), ("1e999", "1e999"), ("", ""),
    ],
)  # fmt: skip
def test_python_literals_are_read_and_never_run(literal: str, value: object) -> None:
    assert json.loads(literal_to_json(literal)) == value
