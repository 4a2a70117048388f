"""Checks of a JSON schema before anything is compiled: its size, its keywords and their values.

Owns the list of keywords. It must not know the library that compiles grammars, nor how a schema is
brought into the form that it honours (that is schema_form).

Invariant: a schema that passes holds only keywords that are honoured or that constrain nothing,
each with a value of the right kind; whatever else it holds is refused with a JSON pointer to it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from trident_llm.core.errors import RequestError, invalid
from trident_llm.text.grammar.formats import FORMAT_PATTERNS

MAX_SCHEMA_BYTES = 64 * 1024
MAX_DEPTH = 16  # schemas within schemas
MAX_NODES = 2000  # schemas in one document
MAX_VALUE_DEPTH = 32  # lists and objects within a value of enum or const
MAX_COUNT = 65_536  # of characters, items or properties
MAX_SAFE_INTEGER = 2**53
MAX_ENUM_VALUES = 2000
MAX_MULTIPLE = 1024

TYPES = ("null", "boolean", "object", "array", "number", "integer", "string")

# Keywords that describe and do not constrain (names beginning with x- are others).
ANNOTATIONS = frozenset(
    ["title", "description", "default", "examples", "example", "$comment", "$schema", "$id", "id",
     "deprecated", "readOnly", "writeOnly", "externalDocs", "discriminator"]
)  # fmt: skip

# What to do instead of a keyword that is not supported.
_UNSUPPORTED = {
    "not": "list what is allowed instead",
    "if": "use anyOf with complete alternatives",
    "then": "use anyOf with complete alternatives",
    "else": "use anyOf with complete alternatives",
    "dependentRequired": "use anyOf with complete alternatives",
    "dependentSchemas": "use anyOf with complete alternatives",
    "dependencies": "use anyOf with complete alternatives",
    "contains": "use items or prefixItems",
    "minContains": "use minItems",
    "maxContains": "use maxItems",
    "contentEncoding": "use pattern",
    "contentMediaType": "leave it out",
    "contentSchema": "leave it out",
    "$anchor": "refer by a path such as #/$defs/name",
    "$dynamicAnchor": "refer by a path such as #/$defs/name",
    "$dynamicRef": "use $ref with a path such as #/$defs/name",
    "$recursiveAnchor": "refer by a path such as #/$defs/name",
    "$recursiveRef": "use $ref with a path such as #/$defs/name",
    "$vocabulary": "leave it out",
    "nullable": 'add "null" to type',
}


class SchemaError(Exception):
    """A schema that cannot be used: where (a JSON pointer, "" for the root) and why."""

    def __init__(self, pointer: str, reason: str) -> None:
        super().__init__(f"#{pointer}: {reason}")
        self.pointer = pointer
        self.reason = reason

    def as_request_error(self, field: str) -> RequestError:
        """The same as the answer to a request whose ``field`` holds the schema."""
        return invalid(field, f"the schema at #{self.pointer} {self.reason}")


def read_schema(value: Any) -> Any:
    """Return a schema given as an object, a boolean, or the text of one.

    Raises:
        SchemaError: it is neither, or larger than MAX_SCHEMA_BYTES.
    """
    if isinstance(value, str):
        if len(value) > MAX_SCHEMA_BYTES:
            raise SchemaError("", f"must have at most {MAX_SCHEMA_BYTES} bytes")
        try:
            value = json.loads(value, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise SchemaError("", "is not valid JSON") from None
    if not isinstance(value, (dict, bool)):
        raise SchemaError("", "must be a JSON object or a boolean")
    try:
        size = len(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
    except UnicodeEncodeError:
        raise SchemaError("", "holds half a character (a lone surrogate)") from None
    except (ValueError, RecursionError):
        raise SchemaError("", "must hold finite numbers and not be nested that deep") from None
    if size > MAX_SCHEMA_BYTES:
        raise SchemaError("", f"must have at most {MAX_SCHEMA_BYTES} bytes")
    return value


def check_schema(schema: Any) -> None:
    """Check every schema of a document; see the module's invariant.

    Raises:
        SchemaError: with a pointer to the keyword at fault.
    """
    _Checker().check(schema, "", 0)


def child(pointer: str, *names: str | int) -> str:
    """Return the JSON pointer of something inside of ``pointer``."""
    escaped = (str(name).replace("~", "~0").replace("/", "~1") for name in names)
    return "/".join([pointer, *escaped])


def is_annotation(keyword: str) -> bool:
    """Whether a keyword describes only."""
    return keyword in ANNOTATIONS or keyword.startswith("x-")


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


class _Checker:
    """One walk over a document."""

    def __init__(self) -> None:
        self._nodes = 0
        self._checks: dict[str, Callable[[Any, str, int], None]] = {
            **dict.fromkeys(("items",), self._items),
            **dict.fromkeys(("additionalProperties", "additionalItems", "propertyNames"), self.check),
            **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), self._schemas),
            **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), self._map),
            **dict.fromkeys(
                ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
                _count,
            ),
            **dict.fromkeys(
                ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _number
            ),
            **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), _boolean),
            "multipleOf": _multiple,
            "uniqueItems": _not_true,
            "type": _type,
            "enum": _enum,
            "const": lambda value, pointer, _: _value(value, pointer, 0),
            "required": _names,
            "pattern": _string,
            "format": _format,
            "$ref": _reference,
        }  # fmt: skip

    def check(self, schema: Any, pointer: str, depth: int) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise SchemaError(pointer, f"is one too many: at most {MAX_NODES} schemas are allowed")
        if depth > MAX_DEPTH:
            raise SchemaError(pointer, f"is nested deeper than {MAX_DEPTH} schemas")
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise SchemaError(pointer, "must be a schema, that is an object or a boolean")
        for keyword, value in schema.items():
            at = child(pointer, keyword)
            if (check := self._checks.get(keyword)) is not None:
                check(value, at, depth)
            elif keyword in _UNSUPPORTED:
                if not (keyword == "nullable" and value is False):
                    raise SchemaError(at, f"is not supported; {_UNSUPPORTED[keyword]}")
            elif keyword in ("$id", "id") and pointer:
                raise SchemaError(at, "is supported only at the root; leave it out")
            elif not is_annotation(keyword):
                raise SchemaError(at, "is not a keyword of JSON Schema; leave it out")

    def _items(self, value: Any, pointer: str, depth: int) -> None:
        if isinstance(value, list):  # as drafts before 2020-12 write prefixItems
            self._schemas(value, pointer, depth)
        else:
            self.check(value, pointer, depth + 1)

    def _schemas(self, value: Any, pointer: str, depth: int) -> None:
        if not isinstance(value, list) or not value:
            raise SchemaError(pointer, "must be a list of at least one schema")
        for index, schema in enumerate(value):
            self.check(schema, child(pointer, index), depth + 1)

    def _map(self, value: Any, pointer: str, depth: int) -> None:
        if not isinstance(value, dict):
            raise SchemaError(pointer, "must be an object whose values are schemas")
        for name, schema in value.items():
            self.check(schema, child(pointer, name), depth + 1)


def _count(value: Any, pointer: str, depth: int) -> None:
    whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value == int(value)
    if not whole or not 0 <= value <= MAX_COUNT:
        raise SchemaError(pointer, f"must be a whole number between 0 and {MAX_COUNT}")


def _number(value: Any, pointer: str, depth: int) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not abs(value) <= MAX_SAFE_INTEGER or 0 < abs(value) < 1e-9:
        raise SchemaError(
            pointer, "must be a number within plus or minus 2^53, and 0 or at least 1e-9 in size"
        )


def _multiple(value: Any, pointer: str, depth: int) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or value != math.floor(value) or not 1 <= value <= MAX_MULTIPLE:
        raise SchemaError(pointer, f"must be a whole number between 1 and {MAX_MULTIPLE}")


def _boolean(value: Any, pointer: str, depth: int) -> None:
    if not isinstance(value, bool):
        raise SchemaError(pointer, "must be true or false; a schema is not supported here")


def _not_true(value: Any, pointer: str, depth: int) -> None:
    if value is not False:
        raise SchemaError(pointer, "is not supported; leave it out")


def _type(value: Any, pointer: str, depth: int) -> None:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or any(name not in TYPES for name in names):
        raise SchemaError(pointer, f"must be one or more of {', '.join(TYPES)}")


def _enum(value: Any, pointer: str, depth: int) -> None:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_ENUM_VALUES:
        raise SchemaError(pointer, f"must be a list of 1 to {MAX_ENUM_VALUES} values")
    for index, item in enumerate(value):
        _value(item, child(pointer, index), 0)


def _value(value: Any, pointer: str, depth: int) -> None:
    if depth > MAX_VALUE_DEPTH:
        raise SchemaError(pointer, f"is nested deeper than {MAX_VALUE_DEPTH} levels")
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and abs(value) > MAX_SAFE_INTEGER:
        raise SchemaError(pointer, "must be a number within plus or minus 2^53")
    for item in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        _value(item, pointer, depth + 1)


def _names(value: Any, pointer: str, depth: int) -> None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise SchemaError(pointer, "must be a list of property names")


def _string(value: Any, pointer: str, depth: int) -> None:
    if not isinstance(value, str):
        raise SchemaError(pointer, "must be a string")


def _format(value: Any, pointer: str, depth: int) -> None:
    if not isinstance(value, str) or value not in FORMAT_PATTERNS:
        known = ", ".join(FORMAT_PATTERNS)
        raise SchemaError(pointer, f"is not a supported format; the supported ones are {known}")


def _reference(value: Any, pointer: str, depth: int) -> None:
    if not isinstance(value, str) or (value != "#" and not value.startswith("#/")):
        raise SchemaError(pointer, "must refer into this schema by a path such as #/$defs/name")
