"""Two schemas that must hold at once, written as one; and schemas that cannot hold at once.

Owns the intersection of keywords (for allOf and for what stands beside $ref, anyOf and oneOf) and
the proof that alternatives of a oneOf exclude each other. It must not know how a schema is walked.

Invariant: whatever satisfies a merged schema satisfies both of its parts.
"""

from __future__ import annotations

import json
from typing import Any

from trident_llm.text.grammar.schema import TYPES, SchemaError, child

_NAMES_INSIDE = {
    "unevaluatedProperties": {"properties", "patternProperties", "additionalProperties"},
    "unevaluatedItems": {"items", "prefixItems"},
}
UNEVALUATED = _NAMES_INSIDE.keys()
_LARGER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_SMALLER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_OF_TYPE = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "propertyNames",
               "minProperties", "maxProperties", "unevaluatedProperties"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems",
              "unevaluatedItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}  # fmt: skip
OWNER = {keyword: owner for owner, keywords in _OF_TYPE.items() for keyword in keywords}


class NoValueError(SchemaError):
    """A schema that nothing satisfies."""


def types_of(schema: dict[str, Any]) -> list[str]:
    """Return the types that a schema (without $ref and allOf) is read to allow.

    Where it names none, the types that its keywords are about; all where there are none such.
    "integer" is never beside "number".
    """
    named = schema.get("type")
    if named is None:
        owners = {OWNER[keyword] for keyword in schema if keyword in OWNER}
        named = [name for name in TYPES if name in owners] or list(TYPES)
    names = [named] if isinstance(named, str) else list(dict.fromkeys(named))
    return [name for name in names if name != "integer" or "number" not in names]


def has_type(value: Any, names: list[str]) -> bool:
    """Whether a JSON value is of one of the types."""
    if value is None:
        return "null" in names
    if isinstance(value, bool):
        return "boolean" in names
    if isinstance(value, (int, float)):
        return "number" in names or ("integer" in names and value == int(value))
    kind = "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
    return kind in names


def key_of(value: Any) -> str:
    """Return a text that is equal for equal JSON values alone (1 and 1.0 are equal)."""
    if isinstance(value, float) and value == int(value):
        value = int(value)
    if isinstance(value, list):
        return "[" + ",".join(map(key_of, value)) + "]"
    if isinstance(value, dict):
        return (
            "{" + ",".join(f"{json.dumps(k)}:{key_of(v)}" for k, v in sorted(value.items())) + "}"
        )
    return json.dumps(value)


def intersect(a: dict[str, Any], b: dict[str, Any], pointer: str) -> dict[str, Any]:
    """Return a schema for what satisfies both, neither of which holds $ref or allOf.

    Raises:
        NoValueError: nothing satisfies both.
        SchemaError: they hold keywords that have no common form.
    """
    if not a or not b:
        return {**a, **b}
    merged = {**a, **b}
    for keyword in a.keys() & b.keys():
        first, second = a[keyword], b[keyword]
        if first == second and isinstance(first, bool) == isinstance(second, bool):
            continue
        if keyword in _LARGER:
            merged[keyword] = max(first, second)
        elif keyword in _SMALLER:
            merged[keyword] = min(first, second)
        elif keyword == "type":
            merged[keyword] = _common_types(a, b, pointer)
        elif keyword == "required":
            merged[keyword] = list(dict.fromkeys([*first, *second]))
        elif keyword == "properties":
            shared = {
                name: {"allOf": [first[name], second[name]]} for name in first.keys() & second
            }
            merged[keyword] = {**first, **second, **shared}
        elif keyword == "enum":
            keys = set(map(key_of, second))
            merged[keyword] = [value for value in first if key_of(value) in keys]
        elif keyword in ("items", "additionalProperties", "propertyNames") and not (
            isinstance(first, list) or isinstance(second, list)
        ):
            merged[keyword] = {"allOf": [first, second]}
        elif keyword in ("unevaluatedProperties", "unevaluatedItems", "uniqueItems"):
            merged[keyword] = keyword == "uniqueItems"
        else:
            raise SchemaError(child(pointer, keyword), "is given twice, which is not supported")
    _check_closed(a, b, merged, pointer)
    if merged.get("enum") == []:
        raise NoValueError(pointer, "allows no value: its parts exclude each other")
    return merged


def _common_types(a: dict[str, Any], b: dict[str, Any], pointer: str) -> list[str]:
    first, second = types_of(a), types_of(b)
    common = [name for name in first if name in second]
    if ("integer" in first and "number" in second) or ("number" in first and "integer" in second):
        common.append("integer")
    if not common:
        raise NoValueError(child(pointer, "type"), "allows no value: its parts exclude each other")
    return common


def _check_closed(
    a: dict[str, Any], b: dict[str, Any], merged: dict[str, Any], pointer: str
) -> None:
    """Refuse parts of which one constrains properties or items that the other one names."""
    for one, other in ((a, b), (b, a)):
        for keyword, inside in _NAMES_INSIDE.items():
            if one.get(keyword) is False and inside & other.keys():
                raise SchemaError(
                    child(pointer, keyword),
                    "is combined with what is named elsewhere; put it beside allOf, anyOf or $ref",
                )
        foreign = other.get("properties", {}).keys() - one.get("properties", {}).keys()
        for keyword in ("additionalProperties", "patternProperties"):
            if one.get(keyword, True) is not True and foreign:
                raise SchemaError(
                    child(pointer, keyword),
                    "is combined with properties named elsewhere; name them all in one place",
                )
        if (
            "items" in one
            and one["items"] is not True
            and "prefixItems" in other.keys() - one.keys()
        ):
            raise SchemaError(child(pointer, "items"), "is combined with prefixItems elsewhere")
    said = [part.get("additionalProperties") for part in (a, b)]
    if True in said and said != [True, True] and merged.get("properties"):
        # One part allows what it does not name; the other one may not.
        del merged["additionalProperties"]


def exclude_each_other(a: Any, b: Any, resolve: Any) -> bool:
    """Whether no value satisfies both schemas, proved by type, by value or by a named property.

    resolve: returns the dict that a schema stands for, without $ref and allOf.
    """
    a, b = resolve(a), resolve(b)
    if (values := _values(a)) is not None and (others := _values(b)) is not None:
        return not {key_of(v) for v in values} & {key_of(v) for v in others}
    for one, other in ((a, b), (b, a)):
        if (values := _values(one)) is not None and "type" in other:
            return not any(has_type(value, types_of(other)) for value in values)
    if "type" not in a or "type" not in b:
        return False
    first, second = set(types_of(a)), set(types_of(b))
    if {"integer", "number"} <= first | second and not first & second <= {"object"}:
        return False
    common = first & second
    if not common:
        return not ("integer" in first | second and "number" in first | second)
    if common != {"object"} or {"integer", "number"} <= first | second:
        return False
    shared = set(a.get("required", ())) & set(b.get("required", ()))
    for name in shared:
        first_values, second_values = (
            _values(resolve(part.get("properties", {}).get(name, {}))) for part in (a, b)
        )
        if first_values is None or second_values is None:
            continue
        if not set(map(key_of, first_values)) & set(map(key_of, second_values)):
            return True
    return False


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """Return the finite list of values that a schema allows at most; None if it has none."""
    if "const" in schema:
        return [schema["const"]]
    if "enum" in schema:
        return list(schema["enum"])
    if schema.get("type") == "null":
        return [None]
    return None
