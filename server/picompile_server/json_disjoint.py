"""A test whether two JSON schemas exclude each other, so that at most one of them holds and `oneOf` is `anyOf`.

llguidance proves some of that itself, but does not look behind a `$ref`, as pydantic writes every union with one.
Only a part of each schema is looked at: if those parts exclude each other, the schemas do, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

Schema = Mapping[str, Any]

_ALL_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_MOST_DEEP = 8
# More take too long, since each is compared with each.
_MOST_ALTERNATIVES = 64
# Names and values that are looked at, for all of a schema: some tens of milliseconds.
_MOST_WORK = 100_000
_MOST_LETTERS = 1000  # of a reference


class Exclusion:
    """Finds out which parts of one schema exclude each other, within a bound of work for all of them together.

    Two recursive schemas have exponentially many pairs of parts; whatever is not found out counts as not excluded.
    """

    def __init__(self, root: Schema) -> None:
        """Make it for the schema whose definitions the parts refer to."""
        self._root = root
        self._left = _MOST_WORK

    def of_each_other(self, alternatives: object, types: object = None) -> bool:
        """Return whether it is certain that no value satisfies two of the alternatives.

        Args:
            alternatives: schemas.
            types: the `type` of the schema that has the alternatives, None if it has none.
        """
        if not isinstance(alternatives, list) or len(alternatives) > _MOST_ALTERNATIVES:
            return False
        around: list[Schema] = [] if types is None else [{"type": types}]
        parts = [[*around, *_parts(each, self._root)] for each in alternatives]
        return all(self._exclude(first, second, 0) for first, second in combinations(parts, 2))

    def _exclude(self, first: list[Schema], second: list[Schema], depth: int) -> bool:
        self._left -= _work(first) + _work(second)
        if self._left < 0:
            return False
        types = _types(first), _types(second)
        if not types[0] & types[1]:
            return True
        values = _values(first), _values(second)
        if values[0] is not None and values[1] is not None and not values[0] & values[1]:
            return True
        if types[0] & types[1] != {"object"} or depth > _MOST_DEEP:
            return False
        required = _required(first), _required(second)
        if any(_forbids(second, name) for name in required[0]) or any(_forbids(first, name) for name in required[1]):
            return True
        return any(
            self._exclude(_property(first, name, self._root), _property(second, name, self._root), depth + 1)
            for name in required[0] & required[1]
        )


def _work(parts: list[Schema]) -> int:
    """Return about how much there is to look at, in names and values."""
    lists = (part.get(key) for part in parts for key in ("enum", "required", "type"))
    return 1 + sum(len(each) for each in lists if isinstance(each, list))


def _parts(schema: object, root: Schema) -> Iterator[Schema]:
    """Yield the schema that holds if `schema` does: itself, or the target of its reference.

    Up to draft 7 nothing else counts beside a `$ref`.
    """
    for _ in range(_MOST_DEEP):
        if not isinstance(schema, Mapping):
            return
        if "$ref" not in schema:
            yield schema
            return
        schema = resolved(schema["$ref"], root)


def resolved(reference: object, root: Schema) -> object:
    """Return the target of a reference within the schema, None if it points elsewhere."""
    if not isinstance(reference, str) or not reference.startswith("#") or len(reference) > _MOST_LETTERS:
        return None
    found: object = root
    for name in reference[1:].split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _types(parts: list[Schema]) -> set[str]:
    """Return the types that all parts allow. An integer is a number, too."""
    allowed = set(_ALL_TYPES)
    for part in parts:
        given = part.get("type")
        named = [given] if isinstance(given, str) else given if isinstance(given, list) else [*_ALL_TYPES]
        some = {name for name in named if isinstance(name, str)}
        allowed &= some | ({"integer"} if "number" in some else set())
    return allowed


def _values(parts: list[Schema]) -> set[str] | None:
    """Return the values that one of the parts lists, as JSON; None if none lists any."""
    for part in parts:
        named = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(named, list):
            return {_canonical(value) for value in named}
    return None


def _canonical(value: Any) -> str:
    """Return JSON that is the same for equal values: 1.0 is 1."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return "object" if isinstance(value, Mapping | list) else json.dumps(value)


def _required(parts: list[Schema]) -> set[str]:
    lists = (part.get("required") for part in parts)
    return {name for names in lists if isinstance(names, list) for name in names if isinstance(name, str)}


def _forbids(parts: list[Schema], name: str) -> bool:
    return any(
        part.get("additionalProperties") is False
        and "patternProperties" not in part
        and name not in (part.get("properties") or {})
        for part in parts
    )


def _property(parts: list[Schema], name: str, root: Schema) -> list[Schema]:
    """Return the schemas that must hold for a property."""
    tables = (part.get("properties") for part in parts)
    named = [table[name] for table in tables if isinstance(table, Mapping) and name in table]
    return [part for schema in named for part in _parts(schema, root)]
