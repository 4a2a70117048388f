"""Structural tags: free text in which given marks begin text that follows a grammar.

Owns the reading and checking of the formats they are made of. It must not know the library that
compiles them, nor requests.

Invariant: what `read_tags` returns holds only the fields written here, with checked values: JSON
schemas in the form of schema_form, patterns as pattern writes them, and white space
between JSON tokens bounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from trident_llm.text.grammar import pattern as grammar_pattern
from trident_llm.text.grammar.schema import (
    MAX_DEPTH,
    MAX_NODES,
    MAX_SCHEMA_BYTES,
    SchemaError,
    child,
    read_schema,
)
from trident_llm.text.grammar.schema_form import normalize_schema

Fields = dict[str, Any]


def read_tags(
    value: Any, *, max_whitespace: int, close_objects: bool, check_ebnf: Callable[[str], str]
) -> str:
    """Return the canonical text of a structural tag.

    value: ``{"type": "structural_tag", "format": {...}}``, or the older ``{"structures":
    [{"begin", "schema", "end"}, ...], "triggers": [...]}``. max_whitespace: characters between JSON
    tokens. check_ebnf: returns a grammar's text, or raises ValueError.

    Raises:
        SchemaError: with a pointer to what is not supported.
    """
    try:
        size = len(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
    except (ValueError, RecursionError):
        raise SchemaError("", "must be valid JSON and not be nested that deep") from None
    if size > MAX_SCHEMA_BYTES:
        raise SchemaError("", f"must have at most {MAX_SCHEMA_BYTES} bytes")
    reader = _Reader(max_whitespace, close_objects, check_ebnf)
    return json.dumps({"type": "structural_tag", "format": reader.read(value)}, ensure_ascii=False)


class _Reader:
    """One reading of one structural tag."""

    def __init__(
        self, max_whitespace: int, close_objects: bool, check_ebnf: Callable[[str], str]
    ) -> None:
        self._max_whitespace = max_whitespace
        self._close_objects = close_objects
        self._check_ebnf = check_ebnf
        self._nodes = 0
        self._readers: dict[str, Callable[[Fields, str, int], Fields]] = {
            "const_string": lambda f, at, _: {"value": _text(f, "value", at)},
            "any_text": _any_text,
            "json_schema": self._schema,
            "grammar": self._grammar,
            "regex": _regex,
            "sequence": self._elements,
            "or": self._elements,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
            "optional": self._content,
            "plus": self._content,
            "star": self._content,
            "repeat": self._repeat,
        }

    def read(self, value: Any) -> Fields:
        if not isinstance(value, dict):
            raise SchemaError("", "must be an object")
        if "structures" in value:
            return self._format(_from_structures(value), "", 0)
        if value.get("type", "structural_tag") != "structural_tag":
            raise SchemaError("/type", 'must be "structural_tag"')
        _only(value, ("type", "format"), "")
        return self._format(value.get("format"), "/format", 0)

    def _format(self, value: Any, pointer: str, depth: int) -> Fields:
        self._nodes += 1
        if self._nodes > MAX_NODES or depth > MAX_DEPTH:
            raise SchemaError(
                pointer,
                f"is too much: at most {MAX_NODES} formats, nested {MAX_DEPTH} deep, may be there",
            )
        kind = value.get("type") if isinstance(value, dict) else None
        reader = self._readers.get(kind) if isinstance(kind, str) else None
        if reader is None:
            raise SchemaError(
                child(pointer, "type"), f"must be one of {', '.join(sorted(self._readers))}"
            )
        fields = reader(value, pointer, depth)
        _only(value, ("type", *fields, *(["style", "syntax"])), pointer)
        return {"type": kind, **fields}

    def _formats(self, fields: Fields, name: str, pointer: str, depth: int) -> list[Fields]:
        values = fields.get(name)
        at = child(pointer, name)
        if not isinstance(values, list) or not values:
            raise SchemaError(at, "must be a list of at least one format")
        return [self._format(v, child(at, index), depth + 1) for index, v in enumerate(values)]

    def _schema(self, fields: Fields, pointer: str, depth: int) -> Fields:
        at = child(pointer, "json_schema")
        if fields.get("style", "json") != "json":
            raise SchemaError(child(pointer, "style"), 'must be "json"')
        try:
            text = normalize_schema(
                read_schema(fields.get("json_schema")), close_objects=self._close_objects
            )
        except SchemaError as error:
            raise SchemaError(at + error.pointer, error.reason) from None
        return {"json_schema": json.loads(text), "max_whitespace_cnt": self._max_whitespace}

    def _grammar(self, fields: Fields, pointer: str, depth: int) -> Fields:
        if fields.get("syntax", "ebnf") != "ebnf":
            raise SchemaError(child(pointer, "syntax"), 'must be "ebnf"')
        try:
            return {"grammar": self._check_ebnf(_text(fields, "grammar", pointer))}
        except ValueError as error:
            raise SchemaError(child(pointer, "grammar"), str(error)) from None

    def _elements(self, fields: Fields, pointer: str, depth: int) -> Fields:
        return {"elements": self._formats(fields, "elements", pointer, depth)}

    def _content(self, fields: Fields, pointer: str, depth: int) -> Fields:
        at = child(pointer, "content")
        return {"content": self._format(fields.get("content"), at, depth + 1)}

    def _tag(self, fields: Fields, pointer: str, depth: int) -> Fields:
        end = fields.get("end")
        if isinstance(end, list):
            end = _texts(fields, "end", pointer)
        else:
            end = _text(fields, "end", pointer)
        return {
            "begin": _text(fields, "begin", pointer),
            "end": end,
            **self._content(fields, pointer, depth),
        }

    def _tags(self, fields: Fields, pointer: str, depth: int) -> Fields:
        tags = self._formats(fields, "tags", pointer, depth)
        for index, tag in enumerate(tags):
            if tag["type"] != "tag":
                raise SchemaError(child(pointer, "tags", index, "type"), 'must be "tag"')
        return {
            "tags": tags,
            "at_least_one": _flag(fields, "at_least_one", pointer),
            "stop_after_first": _flag(fields, "stop_after_first", pointer),
        }

    def _triggered(self, fields: Fields, pointer: str, depth: int) -> Fields:
        triggers = _texts(fields, "triggers", pointer)
        read = self._tags(fields, pointer, depth)
        for index, tag in enumerate(read["tags"]):
            if sum(tag["begin"].startswith(trigger) for trigger in triggers) != 1:
                raise SchemaError(
                    child(pointer, "tags", index, "begin"),
                    "must begin with exactly one of triggers",
                )
        excludes = {"excludes": _texts(fields, "excludes", pointer)} if "excludes" in fields else {}
        return {"triggers": triggers, **read, **excludes}

    def _separated(self, fields: Fields, pointer: str, depth: int) -> Fields:
        return {
            "separator": _text(fields, "separator", pointer),
            **self._tags(fields, pointer, depth),
        }

    def _repeat(self, fields: Fields, pointer: str, depth: int) -> Fields:
        low = _number(fields, "min", pointer)
        unbounded = fields.get("max") == -1
        high = -1 if unbounded else _number(fields, "max", pointer)
        if not unbounded and high < low:
            raise SchemaError(child(pointer, "max"), "must be at least min, or -1")
        return {"min": low, "max": high, **self._content(fields, pointer, depth)}


def _from_structures(value: Fields) -> Fields:
    """Return the newer spelling of tags given as structures and triggers."""
    _only(value, ("type", "structures", "triggers"), "")
    structures = value["structures"]
    if not isinstance(structures, list) or not all(isinstance(item, dict) for item in structures):
        raise SchemaError("/structures", "must be a list of objects with begin, schema and end")
    tags = []
    for index, item in enumerate(structures):
        _only(item, ("begin", "schema", "end"), child("/structures", index))
        content = {"type": "json_schema", "json_schema": item.get("schema")}
        tags.append(
            {"type": "tag", "begin": item.get("begin"), "content": content, "end": item.get("end")}
        )
    return {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}


def _any_text(fields: Fields, pointer: str, depth: int) -> Fields:
    read: Fields = {
        name: _number(fields, name, pointer)
        for name in ("max_chars", "max_tokens")
        if fields.get(name) is not None
    }
    if "excludes" in fields:
        read["excludes"] = _texts(fields, "excludes", pointer)
    return read


def _regex(fields: Fields, pointer: str, depth: int) -> Fields:
    try:
        node = grammar_pattern.parse(_text(fields, "pattern", pointer))
        return {"pattern": grammar_pattern.write(node)}
    except grammar_pattern.PatternError as error:
        raise SchemaError(child(pointer, "pattern"), str(error)) from None


def _only(fields: Fields, known: tuple[str, ...], pointer: str) -> None:
    for name in fields:
        if name not in known:
            raise SchemaError(child(pointer, name), "is not a supported field here; leave it out")


def _text(fields: Fields, name: str, pointer: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise SchemaError(child(pointer, name), "must be a string")
    return value


def _texts(fields: Fields, name: str, pointer: str) -> list[str]:
    value = fields.get(name)
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise SchemaError(child(pointer, name), "must be a list of non-empty strings")
    return value


def _flag(fields: Fields, name: str, pointer: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise SchemaError(child(pointer, name), "must be true or false")
    return value


def _number(fields: Fields, name: str, pointer: str) -> int:
    value = fields.get(name)
    limit = grammar_pattern.MAX_REPEAT
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
        raise SchemaError(child(pointer, name), f"must be a whole number between 0 and {limit}")
    return value
