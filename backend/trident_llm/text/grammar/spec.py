"""What a request asks its output to follow: the spellings, and one checked description of it.

Owns the parsing of ``structured_outputs``, of the older ``guided_*`` names and of OpenAI's
``response_format``. It must not know how grammars are compiled or matched.

Invariant: a GrammarSpec that exists has passed every check that needs no compiler; two specs that
are equal describe the same outputs, so a compiled grammar can be shared between them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from trident_llm.core.errors import invalid
from trident_llm.core.sampling_params import GRAMMAR_PARAMETERS
from trident_llm.text.grammar import pattern as grammar_pattern
from trident_llm.text.grammar.schema import MAX_SCHEMA_BYTES, SchemaError, read_schema
from trident_llm.text.grammar.schema_form import normalize_schema
from trident_llm.text.grammar.tags import read_tags

FIELD = "sampling_parameters"
MAX_WHITESPACE = 8  # characters between two JSON tokens
MAX_GRAMMAR_BYTES = 64 * 1024
MAX_CHOICES = 2000

_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_OPTIONS = ("disable_any_whitespace", "disable_additional_properties")
# Accepted where they ask for nothing.
_NEUTRAL = ("whitespace_pattern", "backend", "disable_fallback", "_backend", "_backend_was_auto")

# The parts of a grammar in which braces, quotes and brackets mean something.
EBNF_PART = re.compile(
    r'"(?:\\.|[^"\\])*"'  # a literal
    r"|\[(?:\\.|[^\]\\])*\]"  # a class of characters
    r"|\#[^\n]*"  # a comment
    r"|\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}"  # a repetition
)


class GrammarKind(Enum):
    """The ways to describe an output."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True)
class GrammarSpec:
    """One checked description of an output; hashable, so it is the key of compiled grammars.

    kind: which description. text: its canonical text: a schema's form, a pattern, a grammar in
    EBNF (also for CHOICE), or a structural tag. max_whitespace: characters that may stand between
    two JSON tokens; 0: single blanks after "," and ":" and nothing else, as `json.dumps` writes.
    parameter: the name it came under, for errors; no part of what it describes.
    """

    kind: GrammarKind
    text: str
    max_whitespace: int = MAX_WHITESPACE
    parameter: str = field(default="structured_outputs", compare=False)

    @property
    def error_field(self) -> str:
        """What errors name."""
        return f"{FIELD}.{self.parameter}"


def parse_grammar(values: Mapping[str, Any]) -> GrammarSpec | None:
    """Return what the sampling parameters of a request ask of its output; None if nothing.

    Raises:
        RequestError: INVALID_ARG naming the parameter at fault, or if two ask for something.
    """
    specs: dict[str, GrammarSpec] = {}
    for name in GRAMMAR_PARAMETERS:
        value = values.get(name)
        if value is None:
            continue
        if name == "response_format":
            spec = parse_response_format(value)
        elif name in ("structured_outputs", "guided_decoding"):
            spec = parse_structured_outputs(value, field=f"{FIELD}.{name}")
        else:
            spec = _parse_one(name.removeprefix("guided_"), value, f"{FIELD}.{name}")
        if spec is not None:
            specs[name] = replace(spec, parameter=name)
    if len(specs) > 1:
        first, second, *_ = specs
        raise invalid(
            f"{FIELD}.{second}", f"cannot be given together with {first}; keep one of them"
        )
    return next(iter(specs.values()), None)


def parse_structured_outputs(
    value: Any, *, field: str = f"{FIELD}.structured_outputs"
) -> GrammarSpec:
    """Return the description in vLLM's ``structured_outputs`` (an object, or the text of one).

    field: the name of the parameter, for errors.

    Raises:
        RequestError: INVALID_ARG naming ``field`` or a name inside it.
    """
    fields = _object(value, field)
    for name in fields:
        if name not in (*_CONSTRAINTS, *_OPTIONS, *_NEUTRAL):
            known = ", ".join((*_CONSTRAINTS, *_OPTIONS))
            raise invalid(field, f"holds an unknown name; the supported ones are: {known}")
        if name in _NEUTRAL and fields[name] not in (None, False, "", "auto", "xgrammar"):
            raise invalid(f"{field}.{name}", "is not supported; leave it out")
    options = {name: _boolean(fields.get(name), f"{field}.{name}") for name in _OPTIONS}
    given = [name for name in _CONSTRAINTS if fields.get(name) not in (None, False, "false")]
    if "json" in fields and fields["json"] is False:
        given.append("json")  # the schema that allows nothing: refused as such
    if len(given) != 1:
        raise invalid(field, f"must hold exactly one of {', '.join(_CONSTRAINTS)}")
    spec = _parse_one(
        given[0],
        fields[given[0]],
        f"{field}.{given[0]}",
        any_whitespace=not options["disable_any_whitespace"],
        close_objects=options["disable_additional_properties"],
    )
    assert spec is not None  # the one that may be None was not counted
    return spec


def parse_response_format(value: Any) -> GrammarSpec | None:
    """Return the description in OpenAI's ``response_format``; None for plain text.

    Raises:
        RequestError: INVALID_ARG naming ``sampling_parameters.response_format`` or a name inside it.
    """
    field = f"{FIELD}.response_format"
    fields = _object(value, field)
    kind = fields.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _json_object()
    if kind == "structural_tag":
        return _structural_tag(fields, field, True, False)
    if kind != "json_schema":
        raise invalid(
            f"{field}.type", "must be one of text, json_object, json_schema, structural_tag"
        )
    inner = _object(fields.get("json_schema"), f"{field}.json_schema")
    if "schema" not in inner:
        raise invalid(f"{field}.json_schema", "must hold a schema")
    return _json_schema(inner["schema"], f"{field}.json_schema.schema", True, False)


def _parse_one(
    name: str,
    value: Any,
    field: str,
    *,
    any_whitespace: bool = True,
    close_objects: bool = False,
) -> GrammarSpec | None:
    if name == "json_object":
        return _json_object(any_whitespace) if _boolean(value, field) else None
    if name == "json":
        return _json_schema(value, field, any_whitespace, close_objects)
    if name == "structural_tag":
        return _structural_tag(_object(value, field), field, any_whitespace, close_objects)
    parsers: dict[str, Callable[[Any, str], GrammarSpec]] = {
        "regex": _regex,
        "choice": _choice,
        "grammar": _ebnf,
    }
    return parsers[name](value, field)


def _json_object(any_whitespace: bool = True) -> GrammarSpec:
    text = '{"type": "object", "additionalProperties": true}'
    return GrammarSpec(GrammarKind.JSON_OBJECT, text, MAX_WHITESPACE if any_whitespace else 0)


def _json_schema(value: Any, field: str, any_whitespace: bool, close_objects: bool) -> GrammarSpec:
    try:
        text = normalize_schema(read_schema(value), close_objects=close_objects)
    except SchemaError as error:
        raise error.as_request_error(field) from None
    return GrammarSpec(GrammarKind.JSON_SCHEMA, text, MAX_WHITESPACE if any_whitespace else 0)


def _structural_tag(
    value: Mapping[str, Any], field: str, any_whitespace: bool, close_objects: bool
) -> GrammarSpec:
    if not any_whitespace:
        raise invalid(field, "cannot be given together with disable_any_whitespace; leave that out")
    try:
        text = read_tags(
            value,
            max_whitespace=MAX_WHITESPACE,
            close_objects=close_objects,
            check_ebnf=check_ebnf,
        )
    except SchemaError as error:
        raise invalid(field, f"at #{error.pointer}: {error.reason}") from None
    return GrammarSpec(GrammarKind.STRUCTURAL_TAG, text)


def _regex(value: Any, field: str) -> GrammarSpec:
    if not isinstance(value, str) or not value:
        raise invalid(field, "must be a non-empty string")
    try:
        text = grammar_pattern.write(grammar_pattern.parse(value))
    except grammar_pattern.PatternError as error:
        raise invalid(field, str(error)) from None
    return GrammarSpec(GrammarKind.REGEX, text)


def _choice(value: Any, field: str) -> GrammarSpec:
    choices = _from_text(value, field) if isinstance(value, str) else value
    if not isinstance(choices, list) or not 1 <= len(choices) <= MAX_CHOICES:
        raise invalid(field, f"must be a list of 1 to {MAX_CHOICES} strings")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise invalid(field, "must hold non-empty strings alone")
    _check_size("".join(choices), field)
    text = "root ::= " + " | ".join(map(_ebnf_literal, dict.fromkeys(choices)))
    return GrammarSpec(GrammarKind.CHOICE, text)


def _ebnf(value: Any, field: str) -> GrammarSpec:
    if not isinstance(value, str):
        raise invalid(field, "must be a string")
    _check_size(value, field)
    try:
        return GrammarSpec(GrammarKind.EBNF, check_ebnf(value))
    except ValueError as error:
        raise invalid(field, str(error)) from None


def check_ebnf(text: str) -> str:
    """Return a grammar in EBNF whose repetition counts are within bounds.

    Raises:
        ValueError: it is none, or repeats too often.
    """
    if "::=" not in text:
        raise ValueError("must be a grammar in EBNF, with rules such as: root ::= ...")
    for match in EBNF_PART.finditer(text):
        counts = [int(count[:18]) for count in match.groups() if count]
        if max(counts, default=0) > grammar_pattern.MAX_REPEAT:
            raise ValueError(
                f"must not repeat anything more than {grammar_pattern.MAX_REPEAT} times"
            )
    return text


def _ebnf_literal(text: str) -> str:
    """Return a literal of EBNF; what is not a plain character is written as its number."""
    return '"' + "".join(
        char if char.isascii() and (char.isalnum() or char == " ") else f"\\U{ord(char):08x}"
        for char in text
    ) + '"'  # fmt: skip


def _check_size(text: str, field: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise invalid(field, "holds half a character (a lone surrogate)") from None
    if size > MAX_GRAMMAR_BYTES:
        raise invalid(field, f"must have at most {MAX_GRAMMAR_BYTES} bytes")


def _object(value: Any, field: str) -> Mapping[str, Any]:
    if isinstance(value, str):
        value = _from_text(value, field)
    if not isinstance(value, dict):
        raise invalid(field, "must be a JSON object")
    return value


def _from_text(text: str, field: str) -> Any:
    # Room for the names and escapes around a schema of the largest size.
    if len(text) > 2 * MAX_SCHEMA_BYTES:
        raise invalid(field, f"must have at most {2 * MAX_SCHEMA_BYTES} characters")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise invalid(field, "is not valid JSON") from None


def _boolean(value: Any, field: str) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    raise invalid(field, "must be true or false")
