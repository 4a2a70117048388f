"""What a request may ask of its output, in every spelling."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from trident_llm.core.errors import ErrorCode, RequestError
from trident_llm.text.grammar.spec import (
    MAX_GRAMMAR_BYTES,
    MAX_WHITESPACE,
    GrammarKind,
    GrammarSpec,
    parse_grammar,
    parse_structured_outputs,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
EBNF = 'root ::= "a" root | "b"'


def spec(values: dict[str, Any]) -> GrammarSpec:
    parsed = parse_grammar(values)
    assert parsed is not None
    return parsed


def refused(values: dict[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_grammar(values)
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("json", SCHEMA, GrammarKind.JSON_SCHEMA),
        ("json", json.dumps(SCHEMA), GrammarKind.JSON_SCHEMA),
        ("json_object", True, GrammarKind.JSON_OBJECT),
        ("json_object", "true", GrammarKind.JSON_OBJECT),
        ("regex", r"\d+", GrammarKind.REGEX),
        ("choice", ["yes", "no"], GrammarKind.CHOICE),
        ("choice", '["yes", "no"]', GrammarKind.CHOICE),
        ("grammar", EBNF, GrammarKind.EBNF),
    ],
)
def test_every_spelling_asks_for_the_same(name: str, value: Any, kind: GrammarKind) -> None:
    expected = spec({f"guided_{name}": value})
    assert expected.kind is kind
    for outer in ("structured_outputs", "guided_decoding"):
        assert spec({outer: {name: value}}) == expected
        assert spec({outer: json.dumps({name: value})}) == expected  # as Triton's clients send it


@pytest.mark.parametrize(
    ("value", "same"),
    [
        ({"type": "json_object"}, {"guided_json_object": True}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
            {"guided_json": SCHEMA},
        ),
        (
            {"type": "structural_tag", "format": {"type": "any_text"}},
            {"structured_outputs": {"structural_tag": {"format": {"type": "any_text"}}}},
        ),
    ],
)
def test_response_format(value: Any, same: dict[str, Any]) -> None:
    assert spec({"response_format": value}) == spec(same)
    assert spec({"response_format": json.dumps(value)}) == spec(same)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 1},
        {"structured_outputs": None, "guided_json": None, "response_format": None},
        {"response_format": {"type": "text"}},
        {"guided_json_object": False},
        {"guided_json_object": "false"},
    ],
)
def test_nothing_is_asked(values: dict[str, Any]) -> None:
    assert parse_grammar(values) is None


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"jason": {}}}, "structured_outputs"),
        ({"structured_outputs": 5}, "structured_outputs"),
        ({"structured_outputs": "{"}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " *"}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": 7}}, "structured_outputs.disable_any_whitespace"),
        ({"structured_outputs": {"json": {"type": "foo"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": False}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a{1000000000}"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["\ud800"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a" * (MAX_GRAMMAR_BYTES + 1)]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": 'root ::= "a"{1,1000000000}'}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": 5}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": EBNF + " " * MAX_GRAMMAR_BYTES}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": {"type": "x"}}}, "structured_outputs.structural_tag"),
        ({"guided_json": {"type": "foo"}}, "guided_json"),
        ({"guided_decoding": {"json": {"type": "foo"}}}, "guided_decoding.json"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format.json_schema.schema"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "response_format"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(values: dict[str, Any], field: str) -> None:
    assert refused(values).field == f"sampling_parameters.{field}"


def test_a_schema_error_points_to_the_keyword() -> None:
    error = refused({"structured_outputs": {"json": {"properties": {"a/b": {"not": {}}}}}})
    assert "#/properties/a~1b/not" in error.reason


def test_a_repetition_in_a_literal_or_a_comment_is_none() -> None:
    text = 'root ::= "a{1000000000}" [{9999999,}] # {1000000000}'
    assert spec({"guided_grammar": text}).text == text


def test_choices_are_written_as_literals_of_ebnf() -> None:
    text = spec({"guided_choice": ['a"b', "é\n", 'a"b']}).text
    assert text == r'root ::= "a\U00000022b" | "\U000000e9\U0000000a"'


def test_white_space_is_bounded_unless_it_is_fixed() -> None:
    assert spec({"structured_outputs": {"json": SCHEMA}}).max_whitespace == MAX_WHITESPACE == 8
    fixed = {"json": SCHEMA, "disable_any_whitespace": True}
    assert spec({"structured_outputs": fixed}).max_whitespace == 0


def test_additional_properties_can_be_disabled() -> None:
    schema = {**SCHEMA, "additionalProperties": True}
    options = {"disable_additional_properties": "true"}
    assert parse_structured_outputs({"json": schema, **options}) == spec({"guided_json": SCHEMA})
    assert parse_structured_outputs({"json": schema}) != spec({"guided_json": SCHEMA})


def test_equal_requests_are_equal_specs() -> None:
    annotated = {"title": "x", **SCHEMA, "description": "y"}
    assert spec({"guided_json": annotated}) == spec({"guided_json": json.dumps(SCHEMA)})
    assert len({spec({"guided_json": annotated}), spec({"guided_json": SCHEMA})}) == 1


def tags(value: Any) -> Any:
    return json.loads(spec({"structured_outputs": {"structural_tag": value}}).text)["format"]


def test_structural_tags_hold_checked_schemas_and_patterns() -> None:
    content = {"type": "json_schema", "json_schema": {"title": "x", **SCHEMA}}
    tag = {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}
    read = tags(
        {"format": {"type": "sequence", "elements": [tag, {"type": "regex", "pattern": "^a+$"}]}}
    )
    first, second = read["elements"]
    assert first["content"]["max_whitespace_cnt"] == MAX_WHITESPACE
    assert first["content"]["json_schema"] == json.loads(spec({"guided_json": SCHEMA}).text)
    assert second == {"type": "regex", "pattern": "(?:a){1,}"}


def test_structures_and_triggers_are_triggered_tags() -> None:
    structures = [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}]
    content = {"type": "json_schema", "json_schema": SCHEMA}
    tag = {"type": "tag", "begin": "<f=a>", "content": content, "end": "</f>"}
    newer = {"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag]}}
    assert tags({"structures": structures, "triggers": ["<f"]}) == tags(newer)


@pytest.mark.parametrize(
    ("value", "pointer"),
    [
        ({"format": {"type": "token", "token": 5}}, "/format/type"),
        ({"format": {"type": "qwen_xml_parameter", "json_schema": {}}}, "/format/type"),
        ({"format": None}, "/format/type"),
        ({"format": {"type": "any_text", "x": 1}}, "/format/x"),
        ({"format": {"type": "any_text"}, "x": 1}, "/x"),
        ({"format": {"type": "sequence", "elements": []}}, "/format/elements"),
        ({"format": {"type": "regex", "pattern": "("}}, "/format/pattern"),
        ({"format": {"type": "grammar", "grammar": "x"}}, "/format/grammar"),
        ({"format": {"type": "json_schema", "json_schema": {"not": {}}}}, "/format/json_schema/not"),
        ({"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}, "/format/style"),
        ({"format": {"type": "repeat", "min": 1, "max": 10**9, "content": {"type": "any_text"}}}, "/format/max"),
        ({"format": {"type": "repeat", "min": 2, "max": 1, "content": {"type": "any_text"}}}, "/format/max"),
        ({"format": {"type": "tag", "begin": 5, "content": {"type": "any_text"}, "end": "x"}}, "/format/begin"),
        ({"structures": [{"begin": "a", "schema": {}, "end": "b"}], "triggers": ["x"]}, "/tags/0/begin"),
        ({"structures": 5, "triggers": []}, "/structures"),
    ],
)  # fmt: skip
def test_a_structural_tag_that_is_wrong_is_refused_with_a_pointer(value: Any, pointer: str) -> None:
    error = refused({"structured_outputs": {"structural_tag": value}})
    assert re.search(rf"#{re.escape(pointer)}(?![\w/])", error.reason)


def test_nothing_of_a_request_is_echoed_but_names_and_pointers() -> None:
    secret = "tell-nobody"
    for values in (
        {"guided_regex": f"({secret}"},
        {"guided_json": {"type": secret}},
        {"guided_json": {"type": "string", "format": secret}},
        {"guided_grammar": secret},
        {"guided_choice": secret},
        {"structured_outputs": {secret: 1}},
    ):
        assert secret not in str(refused(values))
