"""Fifty schemas of the kinds that programs send: tools, forms, records, extracted facts."""

from __future__ import annotations

from typing import Any

TEXT = {"type": "string", "maxLength": 40}
SLUG = {"type": "string", "pattern": "^[a-z][a-z0-9-]{0,20}$"}
POSITIVE = {"type": "integer", "minimum": 1}


def record(required: list[str] | None = None, /, **properties: Any) -> dict[str, Any]:
    """An object; everything is required unless told."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names}


def listed(items: Any, low: int = 0, high: int | None = None) -> dict[str, Any]:
    schema = {"type": "array", "items": items, "minItems": low}
    return schema if high is None else {**schema, "maxItems": high}


def maybe(schema: Any) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


ADDRESS = record(
    ["street", "city"], street=TEXT, city=TEXT, zip={"type": "string", "pattern": "^\\d{5}$"}
)
MONEY = record(
    amount={"type": "number", "minimum": 0, "maximum": 1e6}, currency={"enum": ["EUR", "USD"]}
)

SCHEMAS: dict[str, Any] = {
    "person": record(name=TEXT, age={"type": "integer", "minimum": 0, "maximum": 130}),
    "optional fields": record(["id"], id=POSITIVE, nick=TEXT, mail={"type": "string", "format": "email"}),
    "weather tool": record(
        ["city"], city=TEXT, unit={"type": "string", "enum": ["celsius", "fahrenheit"]}, days=POSITIVE
    ),
    "tool call": record(name={"const": "get_weather"}, arguments=record(city=TEXT, days=POSITIVE)),
    "tool choice": {
        "anyOf": [
            record(tool={"const": "search"}, query=TEXT),
            record(tool={"const": "open"}, url={"type": "string", "format": "uri"}),
            record(tool={"const": "finish"}, answer=maybe(TEXT)),
        ]
    },
    "discriminated": {
        "oneOf": [
            record(["kind", "radius"], kind={"const": "circle"}, radius={"type": "number", "exclusiveMinimum": 0}),
            record(kind={"const": "square"}, side={"type": "number", "exclusiveMinimum": 0}),
        ]
    },
    "sentiment": {"enum": ["positive", "neutral", "negative"]},
    "scores": record(
        label={"type": "string", "enum": ["a", "b", "c"]},
        confidence={"type": "number", "minimum": 0, "maximum": 1},
    ),
    "order": record(
        id={"type": "string", "format": "uuid"},
        created={"type": "string", "format": "date-time"},
        lines=listed(record(sku=SLUG, quantity=POSITIVE, price=MONEY), 1, 5),
        shipping=ADDRESS,
    ),
    "invoice": record(
        number={"type": "string", "pattern": "^INV-\\d{4,8}$"},
        due={"type": "string", "format": "date"},
        total=MONEY,
        paid={"type": "boolean"},
        notes=maybe(TEXT),
    ),
    "matrix": listed(listed({"type": "number"}, 2, 3), 2, 3),
    "point": {
        "type": "array",
        "prefixItems": [{"type": "number"}, {"type": "number"}],
        "items": False,
        "minItems": 2,
    },
    "old tuple": {
        "$schema": "http://json-schema.org/draft-07/schema#","type": "array", "items": [{"type": "string"}, {"type": "integer"}], "minItems": 2},
    "tuple with rest": {"type": "array", "prefixItems": [SLUG], "items": POSITIVE, "minItems": 1},
    "geojson": record(
        type={"const": "Point"}, coordinates=listed({"type": "number", "minimum": -180, "maximum": 180}, 2, 2)
    ),
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {"node": record(["value"], value={"type": "integer"}, children=listed({"$ref": "#/$defs/node"}))},
    },
    "linked list": record(value=TEXT, next=maybe({"$ref": "#"})),
    "expression": {
        "$ref": "#/$defs/expr",
        "$defs": {
            "expr": {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/binary"}]},
            "binary": record(
                op={"enum": ["+", "-", "*", "/"]}, left={"$ref": "#/$defs/expr"}, right={"$ref": "#/$defs/expr"}
            ),
        },
    },
    "pydantic model": {
        "title": "User",
        "description": "a user",
        "type": "object",
        "properties": {
            "id": {"title": "Id", "type": "integer"},
            "role": {"$ref": "#/$defs/Role", "default": "guest"},
            "manager": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "title": "Manager"},
        },
        "required": ["id", "role"],
        "$defs": {"Role": {"enum": ["admin", "guest"], "title": "Role", "type": "string"}},
    },
    "single allOf": record(owner={"allOf": [{"$ref": "#/definitions/o"}], "description": "x"})
    | {"definitions": {"o": record(name=TEXT)}},
    "inheritance": {
        "allOf": [{"$ref": "#/$defs/base"}, record(wheels={"type": "integer", "enum": [2, 3, 4]})],
        "$defs": {"base": record(maker=TEXT)},
    },
    "narrowed": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 900}, {"type": "number"}]},
    "either field": {
        **record([], phone={"type": "string", "pattern": "^\\+?[0-9]{6,12}$"}, mail=TEXT),
        "anyOf": [{"required": ["phone"]}, {"required": ["mail"]}],
    },
    "free map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    "map with names": {"type": "object", "propertyNames": {"enum": ["de", "en", "fr"]}, "additionalProperties": TEXT},
    "map with pattern": {
        "type": "object",
        "patternProperties": {"^env_[a-z]{1,8}$": {"type": "string"}},
        "additionalProperties": False,
        "minProperties": 1,
    },
    "map with short keys": {"type": "object", "propertyNames": {"maxLength": 4}, "additionalProperties": {"type": "null"}},
    "open object": {**record(id=POSITIVE), "additionalProperties": {"type": "boolean"}},
    "any value": record(payload={}, ok={"type": "boolean"}),
    "mixed types": record(value={"type": ["integer", "string", "null"], "minimum": 5, "maxLength": 3}),
    "config": record(
        ["name", "replicas"],
        name=SLUG,
        replicas={"type": "integer", "minimum": 1, "maximum": 50},
        ports=listed({"type": "integer", "minimum": 1, "maximum": 65535}, 0, 4),
        labels={"type": "object", "additionalProperties": TEXT, "maxProperties": 2},
        resources=record([], cpu={"type": "string", "pattern": "^\\d+m$"}, memory={"type": "string"}),
    ),
    "network": record(
        host={"type": "string", "format": "hostname"},
        v4={"type": "string", "format": "ipv4"},
        v6={"type": "string", "format": "ipv6"},
    ),
    "times": record(
        at={"type": "string", "format": "time"}, lasts={"type": "string", "format": "duration"}
    ),
    "calendar": listed(
        record(
            ["title", "day"],
            title=TEXT,
            day={"type": "string", "format": "date"},
            repeats={"enum": ["daily", "weekly", None]},
        ),
        1,
        3,
    ),
    "steps": listed({"type": "integer", "multipleOf": 5}, 1, 4),
    "percent steps": record(volume={"type": "integer", "multipleOf": 10, "minimum": 0, "maximum": 100}),
    "temperature": record(celsius={"type": "number", "exclusiveMinimum": -273.15, "maximum": 1000.5}),
    "bounds below one": {"type": "number", "minimum": 0.001, "exclusiveMaximum": 0.25},
    "negative": {"type": "integer", "minimum": -100, "exclusiveMaximum": 0},
    "code review": record(
        summary=TEXT,
        findings=listed(
            record(
                file={"type": "string", "pattern": "^(?:[a-z]{1,8}/){0,3}[a-z_]{1,8}\\.py$"},
                line=POSITIVE,
                severity={"enum": ["low", "high"]},
                fix=maybe(TEXT),
            ),
            0,
            3,
        ),
    ),
    "quoted pattern": record(cell={"type": "string", "pattern": '^"[^"\\\\]*"\\\\n$'}),
    "unicode": record(größe={"enum": ["klein", "groß"]}, 名前={"const": "日本 \"x\"\n"}),
    "entities": record(
        people=listed(record(name=TEXT, role=maybe(SLUG)), 0, 3), places=listed({"type": "string"}, 0, 2)
    ),
    "quiz": record(
        question=TEXT,
        answers=listed(record(text=TEXT, correct={"type": "boolean"}), 2, 4),
        difficulty={"type": "integer", "enum": [1, 2, 3]},
    ),
    "exactly some": {
        **record([], a={"type": "null"}, b={"type": "null"}, c={"type": "null"}),
        "minProperties": 1,
        "maxProperties": 2,
        "additionalProperties": False,
    },
    "empty object": {"type": "object", "properties": {}, "additionalProperties": False},
    "nested deep": record(a=record(b=record(c=record(d=record(e=record(f=listed(POSITIVE, 1, 2))))))),
    "all optional": record([], a=TEXT, b=POSITIVE, c={"type": "boolean"}, d=listed(SLUG)),
    "nullable refs": record(start=maybe({"$ref": "#/$defs/p"}), end=maybe({"$ref": "#/$defs/p"}))
    | {"$defs": {"p": record(x={"type": "integer"}, y={"type": "integer"})}},
    "inner closed": {
        "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "unevaluatedProperties": False,
        "$defs": {"a": record(x=POSITIVE), "b": record(y=SLUG)},
    },
}  # fmt: skip
