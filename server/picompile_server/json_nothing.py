"""Keywords of JSON schemas that ask for nothing: they are left out, since llguidance refuses those it does not know.

A keyword asks for nothing because of its value, such as `"uniqueItems": false`, because of those beside it, such as
`"uniqueItems": true` where there is one item at most, or because every name or value satisfies its schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Schema = Mapping[Any, Any]

# parser/src/json/formats.rs of llguidance.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)  # fmt: skip
_DRAFTS = ("2020-12/schema", "2019-09/schema", "draft-07/schema", "draft-06/schema", "draft-04/schema")
# Annotations of JSON Schema 2020-12 (validation, 9), and comments and identifiers of its core (8).
_NOTES = frozenset(
    ("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
     "$comment", "$id", "$schema", "$anchor", "$defs", "definitions")
)  # fmt: skip
_ANY_TEXT = ("", ".*", "^.*$", "^.*", ".*$")


def asks_for_nothing(key: str, value: object, schema: Schema) -> bool:
    """Return whether the keyword `key` of `schema` excludes no value, or its draft is one that is not known."""
    test = _TESTS.get(key)
    return test is not None and test(value, schema)


def is_always_true(schema: object, kind: str | None = None) -> bool:
    """Return whether every value satisfies a schema, or every value of the type `kind`: certainly, not possibly."""
    if not isinstance(schema, Mapping):
        return schema is True
    return all(key in _NOTES or asks_for_nothing(key, value, schema) or _holds(key, value, kind)
               for key, value in schema.items())  # fmt: skip


def _holds(key: str, value: object, kind: str | None) -> bool:
    """Return whether a keyword holds for all values of the type `kind`."""
    if kind is not None and key == "type":
        return kind in (value if isinstance(value, list) else [value])
    if key in ("minLength", "minItems", "minProperties"):
        return value == 0 and not isinstance(value, bool)
    return key == "pattern" and value in _ANY_TEXT


def _is_open(value: object, schema: Schema) -> bool:
    return is_always_true(value)


def _is_empty(value: object, schema: Schema) -> bool:
    return value == {}


def _are_different(value: object, schema: Schema) -> bool:
    most = schema.get("maxItems")
    return value is False or (isinstance(most, int) and most <= 1)


def _is_contained(value: object, schema: Schema) -> bool:
    """Return whether `contains` asks for nothing: no item, or any item where there is one."""
    least, most = schema.get("minContains", 1), schema.get("maxContains")
    items = schema.get("minItems")
    return most is None and (least == 0 or (is_always_true(value) and isinstance(items, int) and items >= least))


def _is_excluded(value: object, schema: Schema) -> bool:
    """Return whether `not` asks for nothing: it excludes no value, or types that the schema does not have."""
    if value is False:
        return True
    if not isinstance(value, Mapping) or value.keys() != {"type"} or "type" not in schema:
        return False
    return not _types(value["type"]) & _types(schema["type"])


def _types(given: object) -> frozenset[str]:
    named = {name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)}
    return frozenset(named | ({"integer"} if "number" in named else set()))


_TESTS: Mapping[str, Callable[[object, Schema], bool]] = {
    "format": lambda value, schema: isinstance(value, str) and value not in FORMATS,
    "$schema": lambda value, schema: isinstance(value, str) and not value.rstrip("#").endswith(_DRAFTS),
    "x-guidance": lambda value, schema: True,  # ours counts
    "if": lambda value, schema: "then" not in schema and "else" not in schema,
    "then": lambda value, schema: "if" not in schema,
    "else": lambda value, schema: "if" not in schema,
    "uniqueItems": _are_different,
    "dependencies": _is_empty,
    "dependentRequired": _is_empty,
    "dependentSchemas": _is_empty,
    "propertyNames": lambda value, schema: is_always_true(value, "string"),
    "unevaluatedProperties": _is_open,
    "unevaluatedItems": _is_open,
    "contains": _is_contained,
    "minContains": lambda value, schema: "contains" not in schema or (value == 0 and "maxContains" not in schema),
    "not": _is_excluded,
}
