"""Forms of strings, numbers and listed values, and of what bounds an object's keys.

Owns the forms that hold no other schema; see schema_form, of which this is a part. It must
not know how a schema is walked.

Invariant: whatever satisfies a form satisfies the schema it was made from.
"""

from __future__ import annotations

import math
from typing import Any

from trident_llm.text.grammar import pattern as grammar_pattern
from trident_llm.text.grammar.formats import FORMAT_PATTERNS
from trident_llm.text.grammar.schema import MAX_COUNT, SchemaError, child
from trident_llm.text.grammar.schema_merge import OWNER, NoValueError, has_type, types_of

Form = dict[str, Any]

_MAX_LISTED = 1000  # values of a bounded multipleOf that are written out


def property_counts(merged: Form, required: int, limit: int | None, pointer: str) -> Form:
    """Return minProperties and maxProperties, where they say more than ``required`` does.

    limit: how many properties there can be; None: without end, and then a key might be given twice.
    """
    low, high = int(merged.get("minProperties", 0)), merged.get("maxProperties")
    counts: Form = {}
    if limit is None and low > max(required, 1):
        raise SchemaError(
            child(pointer, "minProperties"),
            "above 1 is supported only with additionalProperties: false; use required",
        )
    if high is not None:
        counts["maxProperties"] = int(high)
        limit = int(high) if limit is None else min(limit, int(high))
    if limit is not None and max(low, required) > limit:
        raise NoValueError(
            pointer, "allows no value: more properties are asked for than may be there"
        )
    if low > required:
        counts["minProperties"] = low
    return counts


def names_pattern(schema: Form, pointer: str) -> str:
    """Return the pattern, as written in JSON, of the keys that propertyNames allows."""
    keywords = schema.keys() - {"type"}
    if "string" not in types_of({**schema, "type": schema.get("type", "string")}):
        raise NoValueError(pointer, "allows no key: keys are strings")
    if keywords == {"enum"}:
        names = [name for name in schema["enum"] if isinstance(name, str)]
        if not names:
            raise NoValueError(pointer, "allows no key: keys are strings")
        branches = tuple(grammar_pattern.literal(name) for name in names)
        return grammar_pattern.write_in_json(grammar_pattern.Choice(branches))
    form = string_form(schema, pointer)
    if keywords - {"pattern", "format", "minLength", "maxLength"}:
        raise SchemaError(
            pointer, "is supported with enum, const, pattern, format or lengths alone"
        )
    if "pattern" in form:
        return str(form["pattern"])
    low, high = form.get("minLength", 0), form.get("maxLength")
    if (high or low) > grammar_pattern.MAX_REPEAT:
        raise SchemaError(pointer, f"must allow at most {grammar_pattern.MAX_REPEAT} characters")
    any_char = grammar_pattern.Chars(((0x20, 0x10FFFF),))
    return grammar_pattern.write_in_json(grammar_pattern.Repeat(any_char, low, high))


def _lengths_of(pattern: str, pointer: str) -> Form | None:
    """Return the form of a pattern such as ``^.{1,200}$``, which bounds a length and nothing else.

    As lengths it is matched quickly; as a pattern it is not.
    """
    try:
        node = grammar_pattern.parse(pattern)
    except grammar_pattern.PatternError as error:
        raise SchemaError(pointer, str(error)) from None
    if not isinstance(node, grammar_pattern.Repeat) or not grammar_pattern.is_any_char(node.node):
        return None
    form: Form = {"type": "string"}
    if node.low:
        form["minLength"] = node.low
    if node.high is not None:
        form["maxLength"] = node.high
    # Without bounds a string could hold the line breaks that "." leaves out, as escapes.
    return form if len(form) > 1 else {**form, "minLength": 0, "maxLength": MAX_COUNT}


def json_pattern(pattern: str, pointer: str) -> str:
    try:
        return grammar_pattern.write_in_json(grammar_pattern.parse(pattern))
    except grammar_pattern.PatternError as error:
        raise SchemaError(pointer, str(error)) from None


def string_form(merged: Form, pointer: str) -> Form:
    given = [name for name in ("pattern", "format") if name in merged]
    lengths = [name for name in ("minLength", "maxLength") if name in merged]
    if given and len(given) + len(lengths) > 1:
        other = [*given, *lengths][1]
        raise SchemaError(
            child(pointer, other),
            f"is not supported together with {given[0]}; say both in one pattern",
        )
    if "format" in merged:
        return {
            "type": "string",
            "pattern": json_pattern(FORMAT_PATTERNS[merged["format"]], pointer),
        }
    if "pattern" in merged:
        if (lengths_form := _lengths_of(merged["pattern"], child(pointer, "pattern"))) is not None:
            return lengths_form
        return {
            "type": "string",
            "pattern": json_pattern(merged["pattern"], child(pointer, "pattern")),
        }
    low, high = int(merged.get("minLength", 0)), merged.get("maxLength")
    if high is not None and low > high:
        raise NoValueError(child(pointer, "minLength"), "is above maxLength")
    form: Form = {"type": "string"}
    if low:
        form["minLength"] = low
    if high is not None:
        form["maxLength"] = int(high)
    return form


def enum_form(merged: Form, pointer: str) -> Form:
    others = merged.keys() - {"enum", "type"}
    values = merged["enum"]
    if "type" in merged:
        values = [value for value in values if has_type(value, types_of(merged))]
    simple = {
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "minLength",
        "maxLength",
    }
    for keyword in sorted(others):
        owner = OWNER.get(keyword, "")
        if keyword not in simple and any(has_type(value, [owner]) for value in values):
            raise SchemaError(
                child(pointer, keyword), "is not supported together with enum or const"
            )
    values = [value for value in values if _is_within(value, merged)]
    if not values:
        raise NoValueError(pointer, "allows no value: none of the listed ones fits the rest")
    return {"enum": values}


def _is_within(value: Any, schema: Form) -> bool:
    """Whether a value keeps to a schema's bounds of numbers and lengths."""
    if isinstance(value, str):
        return bool(schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        inside = schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
        above = value > schema.get("exclusiveMinimum", -math.inf)
        return bool(inside and above and value < schema.get("exclusiveMaximum", math.inf))
    return True


def number_form(name: str, merged: Form, pointer: str) -> Form:
    low, above = merged.get("minimum", -math.inf), merged.get("exclusiveMinimum", -math.inf)
    high, below = merged.get("maximum", math.inf), merged.get("exclusiveMaximum", math.inf)
    multiple = int(merged.get("multipleOf", 1))
    if name == "integer" or "multipleOf" in merged:
        return _integer_form(low, above, high, below, multiple, pointer)
    form: Form = {"type": "number"}
    if low != -math.inf or above != -math.inf:
        form["exclusiveMinimum" if above >= low else "minimum"] = max(low, above)
    if high != math.inf or below != math.inf:
        form["exclusiveMaximum" if below <= high else "maximum"] = min(high, below)
    lowest, highest = max(low, above), min(high, below)
    if lowest > highest or (lowest == highest and len(form) > 1 and not low == high == lowest):
        raise NoValueError(pointer, "allows no value: its smallest number is above its largest")
    return {"enum": [lowest]} if lowest == highest else form


def _integer_form(
    low: float, above: float, high: float, below: float, multiple: int, pointer: str
) -> Form:
    lowest = None if max(low, above) == -math.inf else max(
        -(2**63) if low == -math.inf else math.ceil(low),
        -(2**63) if above == -math.inf else math.floor(above) + 1,
    )  # fmt: skip
    highest = None if min(high, below) == math.inf else min(
        2**63 if high == math.inf else math.floor(high),
        2**63 if below == math.inf else math.ceil(below) - 1,
    )  # fmt: skip
    if lowest is not None and highest is not None:
        values = range(-(-lowest // multiple) * multiple, highest + 1, multiple)
        if not values:
            raise NoValueError(pointer, "allows no value: no whole number is within its bounds")
        if len(values) <= (_MAX_LISTED if multiple > 1 else 1):
            return {"enum": list(values)}
    form: Form = {"type": "integer"}
    if multiple > 1:
        if lowest is not None or highest is not None:
            raise SchemaError(
                child(pointer, "multipleOf"),
                f"is supported without bounds, or with both and at most {_MAX_LISTED} values between",
            )
        form["multipleOf"] = multiple
    if lowest is not None:
        form["minimum"] = lowest
    if highest is not None:
        form["maximum"] = highest
    return form
