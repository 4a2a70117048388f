"""Schemas are refused where they cannot be honoured, and rewritten where they can."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from trident_llm.text.grammar.schema import (
    MAX_DEPTH,
    MAX_NODES,
    MAX_SCHEMA_BYTES,
    SchemaError,
    read_schema,
)
from trident_llm.text.grammar.schema_form import normalize_schema


def form(schema: Any, **options: Any) -> Any:
    return json.loads(normalize_schema(read_schema(schema), **options))


def closed(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    """The form of an object without other properties."""
    names = list(properties) if required is None else required
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


def obj(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names}


REFUSED: list[tuple[Any, str]] = [
    # not a schema
    ({"type": "object", "properties": {"a": {"type": "array", "items": 5}}}, "/properties/a/items"),
    ({"type": "foo"}, "/type"),
    ({"type": ["string", "foo"]}, "/type"),
    ({"type": []}, "/type"),
    ({"type": 5}, "/type"),
    ({"properties": [1]}, "/properties"),
    ({"properties": {"a/b~c": 1}}, "/properties/a~1b~0c"),
    ({"required": "a"}, "/required"),
    ({"anyOf": []}, "/anyOf"),
    ({"anyOf": {}}, "/anyOf"),
    ({"enum": []}, "/enum"),
    ({"minLength": -1}, "/minLength"),
    ({"minLength": "3"}, "/minLength"),
    ({"maxItems": 10**9}, "/maxItems"),
    ({"minimum": "3"}, "/minimum"),
    ({"exclusiveMinimum": True, "minimum": 1}, "/exclusiveMinimum"),
    ({"minimum": 1e300}, "/minimum"),
    ({"pattern": "("}, "/pattern"),
    ({"pattern": 5}, "/pattern"),
    ({"enum": [2**60]}, "/enum/0"),
    # keywords that would be dropped silently
    ({"not": {"type": "string"}}, "/not"),
    ({"if": {}, "then": {}, "else": {}}, "/if"),
    ({"dependentRequired": {"a": ["b"]}}, "/dependentRequired"),
    ({"dependentSchemas": {"a": {}}}, "/dependentSchemas"),
    ({"dependencies": {"a": ["b"]}}, "/dependencies"),
    ({"type": "array", "uniqueItems": True}, "/uniqueItems"),
    ({"type": "array", "contains": {}}, "/contains"),
    ({"type": "array", "minContains": 1}, "/minContains"),
    ({"contentEncoding": "base64"}, "/contentEncoding"),
    ({"nullable": True}, "/nullable"),
    ({"type": "string", "format": "regex"}, "/format"),
    ({"type": "string", "format": "int32"}, "/format"),
    ({"type": "string", "minLength": 2, "pattern": "a"}, "/minLength"),
    ({"type": "string", "maxLength": 2, "pattern": "a"}, "/maxLength"),
    ({"type": "string", "format": "date", "pattern": "a"}, "/format"),
    ({"type": "string", "format": "date", "minLength": 3}, "/minLength"),
    ({"type": "string", "minlength": 3}, "/minlength"),
    ({"type": "number", "multipleOf": 0.1}, "/multipleOf"),
    ({"type": "integer", "multipleOf": 3, "minimum": 1}, "/multipleOf"),
    ({"type": "integer", "multipleOf": 5000}, "/multipleOf"),
    ({"unevaluatedProperties": {"type": "string"}}, "/unevaluatedProperties"),
    ({"$ref": "http://example.org/x"}, "/$ref"),
    ({"$ref": "#name", "$defs": {}}, "/$ref"),
    ({"$defs": {"a": {"$anchor": "x"}}}, "/$defs/a/$anchor"),
    ({"$dynamicRef": "#x"}, "/$dynamicRef"),
    ({"properties": {"a": {"$id": "x"}}}, "/properties/a/$id"),
    ({"enum": ["a"], "pattern": "b"}, "/pattern"),
    # parts that cannot be told apart or combined
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "/oneOf"),
    ({"oneOf": [{"type": ["object", "null"]}, {"type": "null"}]}, "/oneOf"),
    ({"oneOf": [{"enum": ["a", "b"]}, {"const": "b"}]}, "/oneOf"),
    ({"oneOf": [obj({"a": {"const": 1}}, []), obj({"a": {"const": 2}}, [])]}, "/oneOf"),
    ({"oneOf": [{"minimum": 1}, {"type": "string"}]}, "/oneOf"),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "/pattern"),
    ({"allOf": [{"properties": {"a": {}}}, {"additionalProperties": False}]}, "/additionalProperties"),
    ({"allOf": [{"properties": {"a": {}}}, {"unevaluatedProperties": False}]}, "/unevaluatedProperties"),
    (obj({"a": {}}) | {"patternProperties": {"b": {}}}, "/patternProperties"),
    (obj({"a": {}}) | {"propertyNames": {"pattern": "b"}}, "/propertyNames"),
    ({"patternProperties": {"a": {}, "b": {}}}, "/patternProperties"),
    ({"patternProperties": {"a": {}}, "additionalProperties": True}, "/patternProperties"),
    ({"type": "object", "minProperties": 2}, "/minProperties"),
    # nothing satisfies them
    (False, ""),
    ({"$ref": "#"}, "/$ref"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "/$ref"),
    ({"$ref": "#/$defs/missing"}, "/$ref"),
    (obj({"a": {"$ref": "#"}}), ""),
    ({"enum": ["a"], "type": "integer"}, ""),
    ({"type": "integer", "minimum": 1.2, "maximum": 1.8}, ""),
    ({"type": "number", "minimum": 2, "maximum": 1}, ""),
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 1}, ""),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "/minLength"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "/type"),
    ({"type": "array", "prefixItems": [{}], "items": False, "minItems": 2}, "/minItems"),
    (obj({"a": {}}) | {"maxProperties": 0}, ""),
    (obj({}, ["a"]) | {"additionalProperties": False}, "/required"),
    (obj({"a": False}), "/properties/a"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "pointer"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_what_cannot_be_honoured_is_refused_with_a_pointer(schema: Any, pointer: str) -> None:
    with pytest.raises(SchemaError) as caught:
        form(schema)
    assert caught.value.pointer == pointer
    assert caught.value.reason


NUMBER = {"type": "number"}
FORMS: list[tuple[Any, Any]] = [
    (True, {}),
    ({}, {}),
    ({"title": "x", "description": "y", "default": 1, "x-mine": 2, "$schema": "z"}, {}),
    # an object is closed as soon as it names properties
    ({"type": "object"}, {"type": "object", "additionalProperties": True}),
    (obj({"a": NUMBER}, []), closed({"a": NUMBER}, [])),
    (obj({"a": NUMBER}) | {"additionalProperties": True}, closed({"a": NUMBER}) | {"additionalProperties": True}),
    (obj({"b": NUMBER}, ["a"]), closed({"b": NUMBER, "a": {}}, ["a"])),
    ({"required": ["a"]}, closed({"a": {}})),
    ({"additionalProperties": False, "properties": {"a": False}}, {"type": "object", "additionalProperties": False}),
    # types that are only implied
    ({"minimum": 5}, {"type": "number", "minimum": 5}),
    ({"maxLength": 5}, {"type": "string", "maxLength": 5}),
    ({"items": NUMBER}, {"type": "array", "items": NUMBER}),
    # several types
    (
        {"type": ["integer", "string"], "minimum": 5, "maxLength": 2},
        {"anyOf": [{"type": "integer", "minimum": 5}, {"type": "string", "maxLength": 2}]},
    ),
    ({"type": ["integer", "number"]}, NUMBER),
    # numbers
    ({"type": "integer", "minimum": 1.5, "exclusiveMaximum": 4}, {"type": "integer", "minimum": 2, "maximum": 3}),
    ({"type": "integer", "minimum": 3, "maximum": 3}, {"enum": [3]}),
    ({"type": "number", "minimum": 1, "exclusiveMinimum": 1}, {"type": "number", "exclusiveMinimum": 1}),
    ({"type": "integer", "multipleOf": 10, "minimum": -5, "maximum": 20}, {"enum": [0, 10, 20]}),
    ({"type": "number", "multipleOf": 2}, {"type": "integer", "multipleOf": 2}),
    # listed values
    ({"const": 1}, {"enum": [1]}),
    ({"enum": ["a", 1, None, 1.5], "type": ["string", "integer"]}, {"enum": ["a", 1]}),
    ({"enum": ["a", "bb", 1, 9], "maxLength": 1, "maximum": 5}, {"enum": ["a", 1]}),
    ({"enum": [1, 2], "const": 2}, {"enum": [2]}),
    # arrays
    ({"type": "array"}, {"type": "array", "items": {}}),
    ({"prefixItems": [NUMBER]}, {"type": "array", "prefixItems": [NUMBER], "items": False}),
    ({"items": [NUMBER, NUMBER], "additionalItems": {}}, {"type": "array", "prefixItems": [NUMBER, NUMBER], "items": {}}),
    ({"prefixItems": [NUMBER, NUMBER], "maxItems": 1}, {"type": "array", "prefixItems": [NUMBER], "items": False}),
    ({"type": "array", "unevaluatedItems": False}, {"type": "array", "items": False}),
    # parts that must hold at once
    ({"allOf": [{"type": "number", "minimum": 1}, {"minimum": 3, "maximum": 9}]}, {"type": "number", "minimum": 3, "maximum": 9}),
    ({"allOf": [obj({"a": NUMBER}), obj({"b": NUMBER})]}, closed({"a": NUMBER, "b": NUMBER})),
    (
        {"allOf": [{"$ref": "#/$defs/a"}, {"required": ["x"]}], "$defs": {"a": obj({"x": NUMBER}, [])}},
        closed({"x": NUMBER}),
    ),
    ({"type": "integer", "allOf": [{"type": "number"}]}, {"type": "integer"}),
    ({"allOf": [obj({"a": {"minimum": 1}}), obj({"a": {"maximum": 2}})]}, closed({"a": {"type": "number", "minimum": 1, "maximum": 2}})),
    # alternatives, and what stands beside them
    ({"anyOf": [NUMBER, {"type": "null"}]}, {"anyOf": [NUMBER, {"type": "null"}]}),
    ({"anyOf": [NUMBER, False]}, NUMBER),
    ({"type": "string", "anyOf": [NUMBER, {"maxLength": 3}]}, {"type": "string", "maxLength": 3}),
    (
        obj({"a": NUMBER}, []) | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"anyOf": [closed({"a": NUMBER}), closed({"a": NUMBER, "b": {}}, ["b"])]},
    ),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
    (
        {"oneOf": [obj({"t": {"const": 1}}), obj({"t": {"enum": [2, 3]}})]},
        {"anyOf": [closed({"t": {"enum": [1]}}), closed({"t": {"enum": [2, 3]}})]},
    ),
    # references
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": NUMBER}}, {"$ref": "#/$defs/d0", "$defs": {"d0": NUMBER}}),
    (
        {"properties": {"a": NUMBER, "b": {"$ref": "#/properties/a"}}},
        closed({"a": NUMBER, "b": {"$ref": "#/$defs/d0"}}, []) | {"$defs": {"d0": NUMBER}},
    ),
    ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": NUMBER}}, {"$ref": "#/$defs/d0", "$defs": {"d0": NUMBER}}),
    # strings
    ({"pattern": "^a+$"}, {"type": "string", "pattern": "(?:a){1,}"}),
    ({"pattern": "^.{2,300}$"}, {"type": "string", "minLength": 2, "maxLength": 300}),
    # keys
    (
        {"propertyNames": {"enum": ["x", "y"]}, "additionalProperties": NUMBER},
        {"type": "object", "patternProperties": {"(?:x|y)": NUMBER}, "additionalProperties": False},
    ),
    # keywords that ask for nothing
    ({"type": "array", "uniqueItems": False}, {"type": "array", "items": {}}),
    ({"type": "string", "nullable": False}, {"type": "string"}),
    (obj({"a": NUMBER}) | {"unevaluatedProperties": False}, closed({"a": NUMBER})),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "expected"), FORMS, ids=lambda value: json.dumps(value)[:60])
def test_schemas_are_rewritten(schema: Any, expected: Any) -> None:
    assert form(schema) == expected


def test_objects_can_be_closed() -> None:
    schema = {**obj({"a": NUMBER}), "additionalProperties": True}
    assert form(schema, close_objects=True) == closed({"a": NUMBER})


def test_the_order_of_properties_stays() -> None:
    names = ["z", "a", "m"]
    assert list(form(obj({name: {} for name in names}))["properties"]) == names


def test_recursion_is_allowed_where_it_can_end() -> None:
    schema = obj({"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}})
    node = closed({"next": {"anyOf": [{"$ref": "#/$defs/d0"}, {"type": "null"}]}})
    assert form(schema) == {**node, "$defs": {"d0": node}}


@pytest.mark.parametrize("text", ["{", "5", '"x"', "[1]", "null", '{"minimum": NaN}', '{"minimum": 1e999}', "[" * 10**5])  # fmt: skip
def test_text_that_is_no_schema(text: str) -> None:
    with pytest.raises(SchemaError):
        read_schema(text)


def test_a_schema_may_be_text() -> None:
    assert form('{"type": "null"}') == {"type": "null"}


def test_half_characters_are_refused() -> None:
    with pytest.raises(SchemaError, match="surrogate"):
        read_schema({"const": "\ud800"})


def test_size_is_bounded() -> None:
    with pytest.raises(SchemaError, match="bytes"):
        read_schema({"description": "x" * MAX_SCHEMA_BYTES})
    with pytest.raises(SchemaError, match="bytes"):
        read_schema(json.dumps({"description": "é" * (MAX_SCHEMA_BYTES // 2)}, ensure_ascii=False))


def test_depth_is_bounded() -> None:
    def nested(depth: int) -> Any:
        return {"type": "null"} if depth == 0 else {"items": nested(depth - 1)}

    form(nested(MAX_DEPTH))
    with pytest.raises(SchemaError, match="deeper"):
        form(nested(MAX_DEPTH + 1))


def test_the_number_of_schemas_is_bounded() -> None:
    with pytest.raises(SchemaError, match="at most"):
        form({"anyOf": [{}] * MAX_NODES})


@pytest.mark.parametrize(
    "schema",
    [
        # Each level doubles what the one below it holds.
        {
            "$ref": "#/$defs/a0",
            "$defs": {
                f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}, {"$ref": f"#/$defs/a{n + 1}"}]}
                for n in range(20)
            }
            | {"a20": {"type": "null"}},
        },
        {
            **obj({"a": NUMBER}),
            "anyOf": [{"anyOf": [{"anyOf": [{"required": ["a"]}] * 30}] * 30}] * 30,
        },
    ],
    ids=["references", "alternatives"],
)
def test_what_grows_when_combined_is_refused_quickly(schema: Any) -> None:
    start = time.process_time()
    with pytest.raises(SchemaError, match=r"grows|at most|one too many"):
        form(schema)
    assert time.process_time() - start < 2
