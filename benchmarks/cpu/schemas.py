"""JSON schemas for json_schemas.py: drawn after the categories of JSONSchemaBench, or read from a folder of it.

JSONSchemaBench (Geng et al. 2025, arXiv 2501.10868) groups real schemas: arguments of functions (GlaiveAI), trivial to
ultra hard ones from GitHub, events (Snowplow), Kubernetes, a news site's API, and JSON Schema Store. The draws have
what these groups have: flat objects of described parameters; nested objects with arrays; definitions that are referred
to, also by themselves; unions; formats, patterns and bounds; maps; tuples. Some have keywords that are refused.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Schema = dict[str, Any]

_WORDS = (
    "name",
    "id",
    "city",
    "unit",
    "count",
    "price",
    "tags",
    "status",
    "created_at",
    "items",
    "größe",
    "a b",
    "x-y",
)
_FORMATS = (
    "date-time",
    "date",
    "time",
    "email",
    "uuid",
    "ipv4",
    "ipv6",
    "uri",
    "hostname",
    "duration",
    "int64",
    "color",
)
_PATTERNS = (r"^[A-Z]{2,3}-\d{4}$", r"^\S+@\S+$", r"[aeiou]{2}", r"^(red|green|blue)$", r"^#[0-9a-f]{6}$", r"^.{1,12}$")


def drawn(count: int, seed: int) -> Iterator[tuple[str, Schema]]:
    """Yield the names of categories and schemas of them, the categories in turn."""
    for number in range(count):
        name, draw = list(_CATEGORIES.items())[number % len(_CATEGORIES)]
        yield name, draw(random.Random(f"{seed} {number}"))


def read(folder: Path, count: int, seed: int) -> Iterator[tuple[str, Schema]]:
    """Yield schemas of a folder: files of JSONSchemaBench's maskbench, which have them as `schema`, or of a schema."""
    files = sorted(folder.rglob("*.json"))
    for path in random.Random(seed).sample(files, min(count, len(files))):
        content = json.loads(path.read_text(encoding="utf-8"))
        yield path.stem.partition("---")[0].partition("_")[0], content.get("schema", content)


def _words(rng: random.Random, most: int) -> list[str]:
    return rng.sample(_WORDS, rng.randint(1, most))


def _text(rng: random.Random) -> Schema:
    kinds: list[Callable[[], Schema]] = [
        dict,
        lambda: {"minLength": rng.randint(0, 3), "maxLength": rng.randint(4, 20)},
        lambda: {"pattern": rng.choice(_PATTERNS)},
        lambda: {"format": rng.choice(_FORMATS)},
        lambda: {"enum": _words(rng, 5)},
        lambda: {"const": rng.choice(_WORDS)},
        lambda: {"description": 'say "it"', "examples": ["a"], "default": ""},
    ]
    return {"type": "string", **rng.choice(kinds)()}


def _number(rng: random.Random) -> Schema:
    low = rng.randint(-1000, 1000)
    bounds: list[Schema] = [
        {},
        {"minimum": low},
        {"maximum": low},
        {"minimum": low, "maximum": low + rng.randint(0, 5000)},
        {"exclusiveMinimum": low, "exclusiveMaximum": low + 100},
        {"multipleOf": rng.choice((2, 5, 0.25, 0.01))},
    ]
    return {"type": rng.choice(("integer", "number")), **rng.choice(bounds)}


def _leaf(rng: random.Random) -> Schema:
    plain: list[Callable[[], Schema]] = [
        lambda: {"type": "boolean"},
        lambda: {"type": ["string", "null"]},
        lambda: {"type": ["integer", "boolean", "null"]},
        lambda: {"enum": [1, "two", None, True, 2.5, ["x"], {"y": 1}]},
    ]
    return rng.choice([_text, _text, _number, _number, lambda rng: rng.choice(plain)()])(rng)


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    bounds: list[Schema] = [{}, {"minItems": least}, {"maxItems": 4}, {"minItems": least, "maxItems": least + 2}]
    if rng.random() < 0.2:
        return {"type": "array", "prefixItems": [_any(rng, depth - 1) for _ in range(2)], "items": False}
    return {"type": "array", "items": _any(rng, depth - 1), **rng.choice(bounds)}


def _object(rng: random.Random, depth: int) -> Schema:
    names = _words(rng, 6)
    found: Schema = {"type": "object", "properties": {name: _any(rng, depth - 1) for name in names}}
    found |= {"required": rng.sample(names, rng.randint(0, len(names)))} if rng.random() < 0.8 else {}
    return found | rng.choice(({}, {"additionalProperties": False}, {"additionalProperties": {"type": "integer"}}))


def _map(rng: random.Random, depth: int) -> Schema:
    inner = _any(rng, depth - 1)
    kinds: list[Schema] = [
        {"additionalProperties": inner, "minProperties": 1},
        {"patternProperties": {"^[a-z]+$": inner}, "additionalProperties": False},
        {"additionalProperties": inner, "maxProperties": 3},
    ]
    return {"type": "object", **rng.choice(kinds)}


def _any(rng: random.Random, depth: int) -> Schema:
    if depth <= 0:
        return _leaf(rng)
    draw = rng.choice((_leaf, _leaf, _array, _object, _object, _map))
    return draw(rng) if draw is _leaf else draw(rng, depth)  # type: ignore[operator]


def _function(rng: random.Random) -> Schema:
    names = _words(rng, 5)
    described = {name: {**_leaf(rng), "description": f"The {name} of it."} for name in names}
    return {"type": "object", "properties": described, "required": rng.sample(names, rng.randint(0, len(names)))}


def _union(rng: random.Random) -> Schema:
    tagged = [
        {"type": "object", "properties": {"kind": {"const": kind}, "value": _leaf(rng)}, "required": ["kind", "value"]}
        for kind in _words(rng, 4)
    ]
    defined = {f"kind{number}": schema for number, schema in enumerate(tagged)}
    references = [{"$ref": f"#/$defs/{name}"} for name in defined]
    kinds: list[Schema] = [
        {"anyOf": tagged},
        {"oneOf": tagged},
        {"$defs": defined, "oneOf": references},
        {"oneOf": [{"type": "string"}, {"type": "object", "required": ["id"]}, {"type": "null"}]},
        {"anyOf": [_leaf(rng), _object(rng, 1)]},
    ]
    return rng.choice(kinds)


def _recursive(rng: random.Random) -> Schema:
    node = {
        "type": "object",
        "properties": {
            "value": _leaf(rng),
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
        },
        "required": ["value"],
        "additionalProperties": False,
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": {"node": node}, "$ref": "#/$defs/node"}


def _combined(rng: random.Random) -> Schema:
    return {
        "allOf": [_object(rng, 1), {"type": "object", "properties": {"version": _number(rng)}, "required": ["version"]}]
    }


def _refused(rng: random.Random) -> Schema:
    some = _any(rng, 1)
    kinds: list[Schema] = [
        {"not": {"type": "object"}},
        {"type": "array", "items": some, "uniqueItems": True},
        {"type": "array", "contains": some},
        {"if": {"type": "string"}, "then": {"minLength": 1}},
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        {"type": "string", "pattern": "(?=a)b"},
    ]
    return rng.choice(kinds)


_CATEGORIES: dict[str, Callable[[random.Random], Schema]] = {
    "function": _function,
    "trivial": lambda rng: _object(rng, 1),
    "easy": lambda rng: _object(rng, 2),
    "medium": lambda rng: _object(rng, 3),
    "map": lambda rng: _map(rng, 2),
    "array": lambda rng: _array(rng, 2),
    "union": _union,
    "recursive": _recursive,
    "combined": _combined,
    "refused": _refused,
}
