"""The types of values that a JSON schema may allow, for formats that write texts without quotes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from picompile_server.json_disjoint import resolved

ALL_TYPES = frozenset(("null", "boolean", "number", "string", "array", "object"))
_MOST_DEEP = 8
_TYPES: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "boolean"),
    ((int, float), "number"),
    (str, "string"),
    (list, "array"),
    (Mapping, "object"),
)


def possible_types(schema: object, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the types that values of `schema` may have; integers are numbers, and all types if it does not say.

    Args:
        schema: a part of `root`, to whose definitions it may refer.
        root: the whole schema.
        depth: how deep the part is in what was asked for.
    """
    if schema is False:
        return frozenset()
    if not isinstance(schema, Mapping) or depth > _MOST_DEEP:
        return ALL_TYPES
    found = ALL_TYPES
    if "$ref" in schema:
        found &= possible_types(resolved(schema["$ref"], root), root, depth + 1)
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        found &= {"number" if name == "integer" else name for name in named if isinstance(name, str)}
    if "const" in schema:
        found &= {type_name(schema["const"])}
    if isinstance(schema.get("enum"), list):
        found &= {type_name(value) for value in schema["enum"]}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found &= frozenset().union(*(possible_types(part, root, depth + 1) for part in schema[key]))
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        found &= possible_types(part, root, depth + 1)
    return found


def type_name(value: object) -> str:
    """Return JSON Schema's name of a value's type, "number" for integers, too."""
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "null")
