"""A checked JSON schema, rewritten into the few forms that the grammar compiler honours exactly.

Owns the rewriting: references, alternatives, parts that must hold at once, types that are only
implied, bounds. It must not know requests or the compiler's interface.

Every schema of the result is one of: ``{}`` (any value), ``{"$ref": "#/$defs/..."}``,
``{"enum": [...]}``, ``{"anyOf": [...]}``, or one type with keywords of that type alone, where
objects and arrays say explicitly what else they may hold.

Invariant: whatever satisfies the result satisfies the schema. The reverse does not hold: an object
that names its properties has no others unless it says ``additionalProperties``, and a pattern
describes a whole string.
"""

from __future__ import annotations

import json
import math
from typing import Any
from urllib.parse import unquote

from trident_llm.text.grammar.schema import (
    MAX_NODES,
    SchemaError,
    check_schema,
    child,
    is_annotation,
)
from trident_llm.text.grammar.schema_merge import (
    UNEVALUATED,
    NoValueError,
    exclude_each_other,
    intersect,
    types_of,
)
from trident_llm.text.grammar.schema_scalar import (
    Form,
    enum_form,
    json_pattern,
    names_pattern,
    number_form,
    property_counts,
    string_form,
)

_MAX_FORM_DEPTH = 64


def normalize_schema(schema: Any, *, close_objects: bool = False) -> str:
    """Return the text of the schema's form; see the module.

    schema: what `schema.read_schema` returned. close_objects: an object that names
    properties never has others, also where the schema allows them.

    Raises:
        SchemaError: with a pointer to what is not supported, or allows no finite value.
    """
    check_schema(schema)
    return json.dumps(_Rewriter(schema, close_objects).rewrite(), ensure_ascii=False)


class _Rewriter:
    """One rewriting of one document. Pointers are those of the document, as near as can be told."""

    def __init__(self, document: Any, close_objects: bool) -> None:
        self._document = document
        self._close_objects = close_objects
        self._names: dict[str, str] = {}  # of referred schemas, by their pointer
        self._nodes = 0

    def rewrite(self) -> Form:
        root = self._form(self._document, "", 0)
        definitions: dict[str, Form] = {}
        done = 0
        while done < len(self._names):  # forming one may refer to more
            pointer, name = list(self._names.items())[done]
            definitions[name] = self._form(self._find(pointer, pointer), pointer, 0)
            done += 1
        self._check_finite(definitions)
        return {**root, "$defs": definitions} if definitions else root

    # References

    def _find(self, target: str, pointer: str) -> Any:
        """Return the schema at a pointer of the document; ``pointer`` is who asks."""
        found = self._document
        for part in unquote(target).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif (
                isinstance(found, list)
                and name.isascii()
                and name.isdigit()
                and int(name) < len(found)
            ):
                found = found[int(name)]
            else:
                raise SchemaError(pointer, "refers to something that is not in the schema")
        if not isinstance(found, (dict, bool)):
            raise SchemaError(pointer, "refers to something that is not a schema")
        return found

    def _name(self, target: str) -> str:
        return self._names.setdefault(target, f"d{len(self._names)}")

    def _resolve(self, schema: Any, pointer: str, depth: int = 0) -> Form:
        """Return a schema without $ref, allOf and annotations at its top."""
        if depth > _MAX_FORM_DEPTH:
            raise SchemaError(pointer, "refers to itself, or through too many references in a row")
        if schema is True:
            return {}
        if schema is False:
            raise NoValueError(pointer, "allows no value")
        rest = _constraints(schema)
        parts = rest.pop("allOf", [])
        if "$ref" in rest:
            target = rest.pop("$ref")[1:]
            parts = [self._find(target, child(pointer, "$ref")), *parts]
        if "const" in rest:
            rest = intersect({"enum": [rest.pop("const")]}, rest, pointer)
        # These look into the parts, so they are no part themselves.
        outer = {name: rest.pop(name) for name in UNEVALUATED & rest.keys()}
        merged: Form = {}
        for part in [*parts, rest]:
            self._count(pointer)
            # The last part holds neither reference nor allOf any more.
            resolved = rest if part is rest else self._resolve(part, pointer, depth + 1)
            merged = intersect(merged, resolved, pointer)
        hidden = [name for name in UNEVALUATED if merged.get(name) is False]
        if hidden and ("anyOf" in merged or "oneOf" in merged):
            raise SchemaError(
                pointer, f"has {hidden[0]} in a part that does not see the alternatives"
            )
        return {**merged, **outer}

    def _count(self, pointer: str) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise SchemaError(pointer, f"grows to more than {MAX_NODES} schemas when combined")

    # Forms

    def _form(self, schema: Any, pointer: str, depth: int) -> Form:
        self._count(pointer)
        if depth > _MAX_FORM_DEPTH:
            raise SchemaError(pointer, "is nested too deep when its parts are combined")
        if isinstance(schema, dict):
            only = _constraints(schema)
            if only.keys() == {"allOf"} and len(only["allOf"]) == 1:
                return self._form(only["allOf"][0], child(pointer, "allOf", 0), depth + 1)
            if only.keys() == {"$ref"}:
                target = only["$ref"][1:]
                self._check_chain(target, child(pointer, "$ref"))
                return {"$ref": f"#/$defs/{self._name(target)}"}
        merged = self._resolve(schema, pointer)
        for keyword in ("anyOf", "oneOf"):
            if keyword in merged:
                return self._alternatives(merged, keyword, pointer, depth)
        if "enum" in merged:
            return enum_form(merged, pointer)
        if not merged:
            return {}
        forms = [self._typed(name, merged, pointer, depth) for name in types_of(merged)]
        return forms[0] if len(forms) == 1 else {"anyOf": forms}

    def _check_chain(self, target: str, pointer: str) -> None:
        """Refuse references that lead back to themselves without a schema in between."""
        seen = {target}
        found = self._find(target, pointer)
        while isinstance(found, dict) and _constraints(found).keys() == {"$ref"}:
            target = found["$ref"][1:]
            if target in seen:
                raise SchemaError(pointer, "refers to itself without anything in between")
            seen.add(target)
            found = self._find(target, pointer)

    def _alternatives(self, merged: Form, keyword: str, pointer: str, depth: int) -> Form:
        branches = merged.pop(keyword)
        at = child(pointer, keyword)
        if keyword == "oneOf":
            self._check_exclusive([b for b in branches if b is not False], at)
        outer = {name: merged.pop(name) for name in UNEVALUATED & merged.keys()}
        forms: list[Form] = []
        for index, branch in enumerate(branches):
            if branch is False:
                continue
            place = child(at, index)
            if not merged and not outer:
                forms.append(self._form(branch, place, depth + 1))
                continue
            try:
                both = intersect(merged, self._resolve(branch, place), place)
                forms.append(self._form({**both, **outer}, place, depth + 1))
            except NoValueError:
                continue  # what stands beside the alternatives rules this one out
        if not forms:
            raise NoValueError(at, "allows no value: every alternative is ruled out")
        return forms[0] if len(forms) == 1 else {"anyOf": forms}

    def _check_exclusive(self, branches: list[Any], pointer: str) -> None:
        for index, branch in enumerate(branches):
            for other in branches[:index]:
                if not exclude_each_other(
                    branch, other, lambda schema: self._resolve(schema, pointer)
                ):
                    raise SchemaError(
                        pointer,
                        "has alternatives that one value might satisfy at once; use anyOf, or tell "
                        "them apart by type or by a required property with const",
                    )

    def _typed(self, name: str, merged: Form, pointer: str, depth: int) -> Form:
        if name == "object":
            return self._object(merged, pointer, depth)
        if name == "array":
            return self._array(merged, pointer, depth)
        if name == "string":
            return string_form(merged, pointer)
        if name in ("number", "integer"):
            return number_form(name, merged, pointer)
        return {"type": name}

    def _object(self, merged: Form, pointer: str, depth: int) -> Form:
        properties = dict(merged.get("properties", {}))
        patterns = merged.get("patternProperties", {})
        required = merged.get("required", [])
        extra = merged.get("additionalProperties")
        if extra is None:
            closed = merged.get("unevaluatedProperties") is False
            extra = not (properties or patterns or required or closed)
            added: Any = not closed
        else:
            added = extra
        if self._close_objects and (properties or patterns):
            extra = False
        for name in required:
            if name not in properties:
                if added is False or patterns or "propertyNames" in merged:
                    raise SchemaError(
                        child(pointer, "required"), "names a property that properties does not hold"
                    )
                properties[name] = added
        if patterns or "propertyNames" in merged:
            if properties:
                keyword = "patternProperties" if patterns else "propertyNames"
                raise SchemaError(
                    child(pointer, keyword),
                    "is not supported beside properties; use one of the two",
                )
            return self._keyed_object(merged, extra, pointer, depth)
        forms: dict[str, Form] = {}
        for name, schema in properties.items():
            if schema is False and name not in required and extra is False:
                continue
            forms[name] = self._form(schema, child(pointer, "properties", name), depth + 1)
        form: Form = {"type": "object", "properties": forms, "required": list(required)}
        if not forms:
            form = {"type": "object"}
        form["additionalProperties"] = self._extra(extra, pointer, depth)
        limit = len(forms) if extra is False else None
        return {**form, **property_counts(merged, len(required), limit, pointer)}

    def _extra(self, extra: Any, pointer: str, depth: int) -> Any:
        if isinstance(extra, bool):
            return extra
        return self._form(extra, child(pointer, "additionalProperties"), depth + 1)

    def _keyed_object(self, merged: Form, extra: Any, pointer: str, depth: int) -> Form:
        """An object whose keys are described by a pattern."""
        patterns = merged.get("patternProperties", {})
        at = child(pointer, "patternProperties" if patterns else "propertyNames")
        counts = property_counts(merged, 0, None, pointer)
        if not patterns:
            if extra is False:
                return {"type": "object", "additionalProperties": False}
            names = names_pattern(self._resolve(merged["propertyNames"], at), at)
            value = self._form(extra, child(pointer, "additionalProperties"), depth + 1)
        else:
            if len(patterns) > 1 or "propertyNames" in merged:
                raise SchemaError(at, "is supported with a single pattern and no propertyNames")
            if merged.get("additionalProperties", False) is not False and not self._close_objects:
                raise SchemaError(at, "is supported only with additionalProperties: false")
            pattern, schema = next(iter(patterns.items()))
            names = json_pattern(pattern, child(at, pattern))
            value = self._form(schema, child(at, pattern), depth + 1)
        return {
            "type": "object",
            "patternProperties": {names: value},
            "additionalProperties": False,
            **counts,
        }

    def _array(self, merged: Form, pointer: str, depth: int) -> Form:
        prefix, rest = merged.get("prefixItems", []), merged.get("items")
        if isinstance(rest, list):
            if prefix:
                raise SchemaError(child(pointer, "items"), "must be a schema beside prefixItems")
            prefix, rest = rest, merged.get("additionalItems")
        if rest is None:
            rest = not (prefix or merged.get("unevaluatedItems") is False)
        low, high = merged.get("minItems", 0), merged.get("maxItems")
        if False in [item for item in prefix if isinstance(item, bool)]:
            prefix, rest = prefix[: next(i for i, s in enumerate(prefix) if s is False)], False
        if high is not None and high <= len(prefix):
            prefix, rest, high = prefix[: int(high)], False, None
        if low > (len(prefix) if rest is False else math.inf if high is None else high):
            raise NoValueError(child(pointer, "minItems"), "asks for more items than may be there")
        form: Form = {"type": "array"}
        if prefix:
            form["prefixItems"] = [
                self._form(schema, child(pointer, "prefixItems", index), depth + 1)
                for index, schema in enumerate(prefix)
            ]
        form["items"] = (
            rest if isinstance(rest, bool) else self._form(rest, child(pointer, "items"), depth + 1)
        )
        if form["items"] is True:
            form["items"] = {}
        if low:
            form["minItems"] = int(low)
        if high is not None:
            form["maxItems"] = int(high)
        return form

    def _check_finite(self, definitions: dict[str, Form]) -> None:
        """Refuse a definition of which every value would hold another one, without end."""
        finite: set[str] = set()
        while True:
            more = {name for name, form in definitions.items() if _is_finite(form, finite)}
            if more == finite:
                break
            finite = more
        for pointer, name in self._names.items():
            if name not in finite:
                raise NoValueError(pointer, "has no finite value: it always holds itself again")


def _constraints(schema: Form) -> Form:
    return {
        keyword: value
        for keyword, value in schema.items()
        if not is_annotation(keyword) and keyword not in ("$defs", "definitions", "nullable")
    }


def _is_finite(form: Form, finite: set[str]) -> bool:
    if "$ref" in form:
        return form["$ref"].rsplit("/", 1)[1] in finite
    if "anyOf" in form:
        return any(_is_finite(branch, finite) for branch in form["anyOf"])
    if form.get("type") == "object":
        required = form.get("required", [])
        return all(_is_finite(form["properties"][name], finite) for name in required)
    if form.get("type") == "array" and form.get("minItems"):
        prefix = form.get("prefixItems", [])
        needed = prefix[: form["minItems"]]
        if form["minItems"] > len(prefix):
            needed = [*needed, form["items"]]
        return all(_is_finite(item, finite) for item in needed)
    return True
