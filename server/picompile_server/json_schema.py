"""Translation of JSON schemas for llguidance, such that small models can write neither endless nor ambiguous JSON.

llguidance refuses keywords that it does not implement, and enforces all others. Five things are left to us:

1. Formats that it does not know are dropped, since a format is an annotation unless a validator says otherwise (JSON
   Schema 2020-12, validation, 7.2.1), and so are keywords that ask for nothing (json_nothing.py).
2. A key can occur twice where the schema does not name it. `minProperties` would count it twice, so it is refused.
3. `oneOf` whose alternatives exclude each other is `anyOf` (json_disjoint.py).
4. Characters cannot be written as `\\u0061`: a key could pass for another one.
5. Numbers, texts and patterns that it would change (json_values.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from picompile_runtime.errors import RequestError
from picompile_runtime.request_checks import shown
from picompile_server.json_disjoint import Exclusion
from picompile_server.json_nothing import asks_for_nothing
from picompile_server.json_values import check_keyword, check_value, safe_pattern

# Between two parts of JSON there may be a space, or a line break and an indentation. Models write both, compact and
# indented JSON; but nothing that could be repeated, since small models then write spaces until they run out of tokens.
_WHITESPACE = r"\x20|\n[\x20\x09]{0,32}"
_OPTIONS = {"whitespace_pattern": _WHITESPACE, "json_allowed_escapes": 'nrbtf\\"'}

# Keywords whose values are no schemas, and those whose values have names of the user's and then schemas.
_VALUES = frozenset(("const", "enum", "default", "examples", "example"))
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"))
_MOST_NESTED = 100
_LONGEST_HOST = 253  # RFC 1035


def json_rule(schema: object) -> str:
    """Return the part of a grammar in Lark's syntax that stands for JSON which satisfies `schema`.

    Raises RequestError if it is no JSON schema, or asks for something that cannot be enforced.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, Mapping):
        raise RequestError(f"a JSON schema is an object, not {shown(schema)}")
    try:
        return f"%json {json.dumps({**_Rewriter(schema).schema(schema, 0), 'x-guidance': _OPTIONS}, allow_nan=False)}"
    except (TypeError, ValueError) as error:
        raise RequestError(f"a JSON schema is JSON, not {shown(schema)}") from error
    except RecursionError as error:  # values such as constants have no limit of their own
        raise RequestError("the JSON schema cannot be used: it is nested too deeply") from error


class _Rewriter:
    """A translator that writes schemas in llguidance's keywords, without those that have no effect."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._exclusion = Exclusion(root)

    @cached_property
    def _has_one_base(self) -> bool:
        """Whether references are all to the whole schema: parts with identifiers could have their own."""
        return json.dumps(self._root).count('"$id"') == ("$id" in self._root)

    def schema(self, schema: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        """Return a schema. Raises RequestError for `minProperties` that cannot be enforced."""
        if depth > _MOST_NESTED:
            raise RequestError(f"the JSON schema cannot be used: it is nested more than {_MOST_NESTED} deep")
        least, required = schema.get("minProperties"), schema.get("required")
        if isinstance(least, int) and least > max(1, len(required) if isinstance(required, list) else 0):
            raise RequestError(
                f"the JSON schema cannot be used: minProperties of {least} is supported only where as many are required"
            )
        found: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _NAMED and isinstance(value, Mapping):
                name = safe_pattern if key == "patternProperties" else str
                named = {name(key): self._inner(part, depth + 1) for key, part in value.items()}
                found |= {key: named} if named or not asks_for_nothing(key, value, schema) else {}
            elif key in _VALUES:
                if key in ("const", "enum"):
                    check_value(value)
                found[key] = value
            elif key == "pattern" and isinstance(value, str):
                found[key] = safe_pattern(value)
            elif not asks_for_nothing(key, value, schema):
                check_keyword(key, value)
                found[self._name(key, schema)] = self._inner(value, depth + 1)
        if found.get("format") == "hostname":  # whose length llguidance does not count
            given = found.get("maxLength")
            found["maxLength"] = min(given, _LONGEST_HOST) if isinstance(given, int) else _LONGEST_HOST
        return found

    def _inner(self, value: Any, depth: int) -> Any:
        if isinstance(value, Mapping):
            return self.schema(value, depth)
        return [self._inner(part, depth) for part in value] if isinstance(value, list) else value

    def _name(self, key: str, schema: Mapping[Any, Any]) -> str:
        if key != "oneOf" or "anyOf" in schema or not self._has_one_base:
            return key
        return "anyOf" if self._exclusion.of_each_other(schema["oneOf"], schema.get("type")) else key
