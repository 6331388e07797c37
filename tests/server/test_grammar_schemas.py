"""JSON schemas are rewritten before llguidance has them: each is enforced as it is, or refused."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import grammars
from helpers.grammars import compiler
from picompile_runtime import RequestError
from picompile_server.json_disjoint import Exclusion
from picompile_server.json_nothing import FORMATS
from picompile_server.json_schema import json_rule
from picompile_server.json_values import safe_pattern


def fits(schema: Any, value: Any) -> bool:
    return grammars.fits(compiler().json_schema(schema), json.dumps(value, ensure_ascii=False))


def test_formats_that_are_known_are_enforced() -> None:
    values = {
        "date-time": "2026-11-23T10:00:00Z",
        "time": "10:00:00Z",
        "date": "2026-11-23",
        "duration": "P1DT2H",
        "email": "a@b.org",
        "hostname": "example.org",
        "ipv4": "10.0.0.1",
        "ipv6": "::1",
        "uuid": "123e4567-e89b-12d3-a456-426614174000",
        "uri": "https://example.org/a?b",
    }
    assert values.keys() == {*FORMATS}
    for name, value in values.items():
        schema = {"type": "string", "format": name}
        assert fits(schema, value) and not fits(schema, "§ nothing of that kind"), name
    # A host name is no longer than names of hosts.
    schema = {"type": "string", "format": "hostname"}
    assert fits(schema, ".".join(["a" * 61] * 4)) and not fits(schema, ".".join(["a" * 61] * 5))
    assert not fits({**schema, "maxLength": 3}, "a.bc")


def test_other_formats_are_annotations() -> None:
    for name in ("int64", "password", "color", "idn-email", "regex", "json-pointer"):
        assert fits({"type": "string", "format": name}, "anything")
        assert fits({"properties": {"format": {"const": name}}, "required": ["format"]}, {"format": name})
        assert fits({"const": {"format": name}}, {"format": name})


ASKING_FOR_NOTHING: list[dict[str, Any]] = [
    {"uniqueItems": False},
    {"dependencies": {}, "dependentRequired": {}, "dependentSchemas": {}},
    {"propertyNames": {}},
    *({"propertyNames": schema} for schema in (True, {"type": "string"}, {"type": ["null", "string"], "minLength": 0})),
    {"propertyNames": {"pattern": "^.*$", "title": "a name"}, "unevaluatedProperties": {"description": "any"}},
    {"not": False, "contains": {"const": 1}, "minContains": 0, "maxItems": 1, "uniqueItems": True},
    {"not": {"type": ["null", "integer"]}},
    {"title": "a", "description": "b", "default": {}, "examples": [], "$comment": "c"},
    {"minProperties": 0, "additionalProperties": True, "patternProperties": {}, "required": []},
    {"unevaluatedProperties": True, "unevaluatedItems": {}},
    {"if": {"type": "string"}},
    {"then": {"type": "string"}, "else": {"type": "null"}},
    {"$schema": "http://json-schema.org/schema#"},
    {"x-order": 1, "nullable": True, "discriminator": {"propertyName": "a"}},
    {"x-guidance": {"whitespace_flexible": True, "lenient": True}},
]


def test_what_asks_for_nothing_changes_nothing() -> None:
    for more in ASKING_FOR_NOTHING:
        inner = {"type": "object", "properties": {"a": {"type": "integer"}}, **more}
        schema = {"type": "object", "properties": {"inner": inner}, "required": ["inner"], **more}
        assert fits(schema, {"inner": {"a": 1}}) and not fits(schema, {"inner": {"a": "b"}}), more


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "array", "uniqueItems": True}, "keywords that are not supported"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "keywords that are not supported"),
        *(
            ({"type": "object", "propertyNames": names}, "keywords that are not supported")
            for names in ({"maxLength": 3}, {"type": "integer"}, {"format": "date"}, {"minLength": 1}, False)
        ),
        ({"type": "array", "contains": {}}, "keywords that are not supported"),
        ({"type": "number", "not": {"type": "integer"}}, "keywords that are not supported"),
        ({"if": {"type": "string"}, "then": {"minLength": 1}}, "keywords that are not supported"),
        ({"type": "array", "contains": {"type": "string"}}, "keywords that are not supported"),
        ({"type": "object", "unevaluatedProperties": False}, "keywords that are not supported"),
        # A key can occur twice where the schema does not name it, and would be counted twice.
        ({"type": "object", "minProperties": 2}, "minProperties of 2 is supported only where as many are required"),
        ({"type": "object", "minProperties": 3, "required": ["a", "b"]}, "minProperties of 3 is supported only"),
        ({"const": "a\x7fb"}, r"U\+007F is not supported in const and enum"),
        ({"enum": ["a", {"b": ["\x00"]}]}, r"U\+0000"),
        ({"const": {"\x01": 1}}, r"U\+0001"),
        ({"enum": [2**53 + 1]}, r"beyond 2\^53 are not supported"),
        ({"const": [-(2**60)]}, r"beyond 2\^53"),
        ({"type": "integer", "minimum": 2**53 + 1}, r"beyond 2\^53"),
        ({"type": "number", "maximum": -1e20}, r"beyond 2\^53"),
        ({"type": "string", "maxLength": 2**40}, "maxLength may be 2147483647 at most"),
    ],
)
def test_what_would_be_changed_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        compiler().json_schema({"type": "object", "properties": {"inner": schema}})


def test_properties() -> None:
    assert not fits({"type": "object", "minProperties": 1}, {})
    assert fits({"type": "object", "minProperties": 2, "required": ["a", "b"]}, {"a": 1, "b": 2})
    # A property may have any name, and names may be patterns.
    names = ["properties", "const", "enum", "$ref", "if", "minProperties", "uniqueItems", "required", "x-guidance"]
    properties = {name: {"type": "integer"} for name in names}
    schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    assert fits(schema, dict.fromkeys(names, 1)) and not fits(schema, dict.fromkeys(names, "a"))
    schema = {"type": "object", "patternProperties": {'^[^"]$': {"type": "integer"}}, "additionalProperties": False}
    assert fits(schema, {"a": 1}) and not fits(schema, {'"': 1})


def test_a_constant_is_itself() -> None:
    for value in (2**53, -(2**53), 0.1, "a\n\t\b", {"a": [1.5]}, ""):
        assert fits({"const": value}, value) and fits({"enum": [value, "other"]}, value)


PIECES = [*'"aé', r"\\", r"\n", r"\]", r"\-", r"\x00-\x1f", r"\x08-\x0d", r"\x1f-\x7e", r" -~", "0-9"]
PIECES += [r"\s", r"\S", r"\d", r"\D", r"\w", r"\W"]
CHARACTERS = ['"', "\\", "\n", "\t", "\r", "\b", "\f", "a", "z", "0", " ", "é", "-", "]", "\x01", "\x1f"]


@settings(max_examples=40, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=3, unique=True), negated=st.booleans())
def test_a_class_has_the_characters_that_it_names(pieces: list[str], negated: bool) -> None:
    pattern = f"^[{'^' * negated}{''.join(pieces)}]$"
    expected = [letter for letter in CHARACTERS if re.fullmatch(pattern[1:-1], letter, re.ASCII)]
    writable = [letter for letter in expected if letter >= " " or letter in "\n\t\r\b\f"]
    try:
        found = [letter for letter in CHARACTERS if fits({"type": "string", "pattern": pattern}, letter)]
    except RequestError:  # no character of it can be written
        found = []
    assert found == writable


def test_other_patterns_stay_as_they_are() -> None:
    for pattern in (r"a\[b", "[a-z]+", "(?:x|[0-9])", "[]", "[^]", "[a", r"\\"):
        assert safe_pattern(pattern) == pattern


def test_schemas_that_hold_always_or_never() -> None:
    assert json_rule(True).startswith("%json {")
    assert '"not": {}' in json_rule(False)


def thing(kind: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "object", **({"properties": {"kind": {"const": kind}}} if kind else {}), **more}


DEFINED = {
    "cat": thing("cat", required=["kind"]),
    "dog": thing("dog", required=["kind"]),
    "link": {"$ref": "#/$defs/dog"},
    "a/b~c": {"type": "string"},
}
EXCLUDING: dict[str, list[Any]] = {
    "types": [{"type": "string"}, {"type": ["number", "null"]}, {"type": "object"}],
    "values": [{"const": 1}, {"const": "1"}, {"enum": [True, None, 2.5]}],
    "references": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/link"}, {"$ref": "#/$defs/a~1b~0c"}],
    "a property is forbidden": [
        thing(required=[name], properties={name: {}}, additionalProperties=False) for name in ("a", "b")
    ],
}
NOT_EXCLUDING: dict[str, Any] = {
    "integers are numbers": [{"type": "integer"}, {"type": "number"}],
    "equal numbers": [{"const": 1}, {"const": 1.0}],
    "equal objects": [{"const": {"a": 1}}, {"const": {"a": 1.0}}],
    "not only objects": [{"required": ["a"]}, {"additionalProperties": False}],
    "optional": [thing("a"), thing("b")],
    "patterns": [thing(required=["a"]), thing(patternProperties={"^a": {}}, additionalProperties=False)],
    "itself": [{"$ref": "#"}, {"$ref": "#"}],
    "elsewhere": [{"$ref": "other.json"}, {"$ref": "#/$defs/cat"}],
    "a neighbour of a reference": [{"$ref": "#/$defs/a~1b~0c", "const": text} for text in ("x", "y")],
    "no list": {},
    "true": [True, True],
}


def test_alternatives_that_exclude_each_other() -> None:
    for case, alternatives in EXCLUDING.items():
        root = {"$defs": DEFINED, "oneOf": alternatives}
        assert Exclusion(root).of_each_other(alternatives), case
        compiler().json_schema(root)
    for case, alternatives in NOT_EXCLUDING.items():
        assert not Exclusion({"$defs": DEFINED}).of_each_other(alternatives), case
    # The type around alternatives counts.
    alternatives = [{"required": ["a"], "properties": {"a": {"const": n}}} for n in (1, 2)]
    assert not Exclusion({}).of_each_other(alternatives)
    assert Exclusion({}).of_each_other(alternatives, "object")
    # Parts with identifiers are left to llguidance.
    part = {"$id": "http://a.b/part", "$ref": "#/$defs/cat"}
    with pytest.raises(RequestError):
        compiler().json_schema({"$defs": DEFINED, "oneOf": [part, {"$ref": "#/$defs/dog"}]})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.5, 1.0, "", "a"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
SCHEMAS = st.recursive(
    st.one_of(
        st.fixed_dictionaries({"type": TYPES | st.lists(TYPES, min_size=1, max_size=2, unique=True)}),
        st.fixed_dictionaries({"const": VALUES}),
        st.fixed_dictionaries({"enum": st.lists(VALUES, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"$ref": st.sampled_from(["#/$defs/cat", "#/$defs/link", "#/$defs/missing"])}),
        st.booleans(),
    ),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": st.just("object"),
            "properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
            "required": st.lists(st.sampled_from("ab"), max_size=2, unique=True),
            "additionalProperties": st.booleans(),
        },
    ),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@given(first=SCHEMAS, second=SCHEMAS, values=st.lists(VALUES, min_size=5, max_size=10))
def test_no_value_satisfies_two_alternatives_that_exclude_each_other(first: Any, second: Any, values: Any) -> None:
    root = {"$defs": {**DEFINED, "missing": True}}
    if not Exclusion(root).of_each_other([first, second]):
        return
    for draft in (jsonschema.Draft7Validator, jsonschema.Draft202012Validator):
        for value in values:
            valid = [draft({**root, "allOf": [each]}).is_valid(value) for each in (first, second)]
            assert valid != [True, True]


def test_recursive_alternatives_are_not_followed_for_ever() -> None:
    """They have exponentially many pairs of parts, which would take hours: nine levels of ten names each."""
    names = [f"p{number}" for number in range(10)]

    def tree(name: str) -> Any:
        part = {"$ref": f"#/$defs/{name}"}
        return {"type": "object", "required": names, "properties": dict.fromkeys(names, part)}

    root = {"$defs": {"a": tree("a"), "b": tree("b")}, "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}
    assert not Exclusion(root).of_each_other(root["oneOf"])
    assert json_rule(root).count("oneOf") == 1
