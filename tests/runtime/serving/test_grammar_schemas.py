"""JSON schemas are rewritten before llguidance has them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.grammars import takes
from helpers.toys.toy_tokenizers import EOS, byte_level
from picompile_runtime import RequestError
from picompile_runtime.serving.grammar import GrammarCompiler
from picompile_runtime.serving.json_disjoint import Exclusion
from picompile_runtime.serving.json_schema import FORMATS, json_rule


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_level(), 262, [EOS])


def fits(compiler: GrammarCompiler, schema: Any, value: Any) -> bool:
    return takes(compiler.json_schema(schema), byte_level(), json.dumps(value, ensure_ascii=False), EOS)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_that_are_known_are_enforced(compiler: GrammarCompiler, name: str) -> None:
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
    schema = {"type": "string", "format": name}
    assert fits(compiler, schema, values[name]) and not fits(compiler, schema, "§ nothing of that kind")


@pytest.mark.parametrize("name", ["int64", "password", "color", "idn-email", "regex", "json-pointer"])
def test_other_formats_are_annotations(compiler: GrammarCompiler, name: str) -> None:
    assert fits(compiler, {"type": "string", "format": name}, "anything")
    assert fits(compiler, {"properties": {"format": {"const": name}}, "required": ["format"]}, {"format": name})
    assert fits(compiler, {"const": {"format": name}}, {"format": name})


ASKING_FOR_NOTHING: dict[str, Any] = {
    "repeated": {"uniqueItems": False},
    "no dependencies": {"dependencies": {}, "dependentRequired": {}, "dependentSchemas": {}},
    "any names": {"propertyNames": {}},
    "any others": {"unevaluatedProperties": True, "unevaluatedItems": {}},
    "only if": {"if": {"type": "string"}},
    "only then": {"then": {"type": "string"}, "else": {"type": "null"}},
    "unknown draft": {"$schema": "http://json-schema.org/schema#"},
    "unknown words": {"x-order": 1, "nullable": True, "discriminator": {"propertyName": "a"}},
    "guidance": {"x-guidance": {"whitespace_flexible": True, "lenient": True}},
}


@pytest.mark.parametrize("case", ASKING_FOR_NOTHING)
def test_what_asks_for_nothing_changes_nothing(compiler: GrammarCompiler, case: str) -> None:
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}, **ASKING_FOR_NOTHING[case]}
    schema = {"type": "object", "properties": {"inner": inner}, "required": ["inner"], **ASKING_FOR_NOTHING[case]}
    assert fits(compiler, schema, {"inner": {"a": 1}}) and not fits(compiler, schema, {"inner": {"a": "b"}})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"type": "object", "propertyNames": {"maxLength": 3}},
        {"if": {"type": "string"}, "then": {"minLength": 1}},
        {"type": "array", "contains": {"type": "string"}},
        {"type": "object", "unevaluatedProperties": False},
    ],
)
def test_what_asks_for_something_else_is_refused(compiler: GrammarCompiler, schema: Any) -> None:
    with pytest.raises(RequestError, match="keywords that are not supported"):
        compiler.json_schema(schema)


def test_a_property_may_have_any_name(compiler: GrammarCompiler) -> None:
    names = ["properties", "const", "enum", "$ref", "if", "minProperties", "uniqueItems", "required", "x-guidance"]
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    assert fits(compiler, schema, dict.fromkeys(names, 1)) and not fits(compiler, schema, dict.fromkeys(names, "a"))


def test_a_count_of_properties_that_could_be_repeated_is_refused(compiler: GrammarCompiler) -> None:
    """A key can occur twice where the schema does not name it, and would be counted twice."""
    for schema in ({"minProperties": 2}, {"minProperties": 3, "required": ["a", "b"]}):
        with pytest.raises(RequestError, match=r"minProperties of . is supported only where as many are required"):
            compiler.json_schema({"type": "object", **schema})
    assert not fits(compiler, {"type": "object", "minProperties": 1}, {})
    assert fits(compiler, {"type": "object", "minProperties": 2, "required": ["a", "b"]}, {"a": 1, "b": 2})


def test_schemas_that_hold_always_or_never() -> None:
    assert json_rule(True).startswith("%json {")
    assert '"not": {}' in json_rule(False)


DEFINED = {
    "cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
    "dog": {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]},
    "link": {"$ref": "#/$defs/dog"},
    "a/b~c": {"type": "string"},
}
EXCLUDING: dict[str, list[Any]] = {
    "types": [{"type": "string"}, {"type": ["number", "null"]}, {"type": "object"}],
    "values": [{"const": 1}, {"const": "1"}, {"enum": [True, None, 2.5]}],
    "references": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/link"}, {"$ref": "#/$defs/a~1b~0c"}],
    "a property is forbidden": [
        {"type": "object", "required": ["a"], "properties": {"a": {}}, "additionalProperties": False},
        {"type": "object", "required": ["b"], "properties": {"b": {}}, "additionalProperties": False},
    ],
}
NOT_EXCLUDING: dict[str, list[Any]] = {
    "integers are numbers": [{"type": "integer"}, {"type": "number"}],
    "equal numbers": [{"const": 1}, {"const": 1.0}],
    "equal objects": [{"const": {"a": 1}}, {"const": {"a": 1.0}}],
    "not only objects": [{"required": ["a"]}, {"additionalProperties": False}],
    "optional": [
        {"type": "object", "properties": {"kind": {"const": "a"}}},
        {"type": "object", "properties": {"kind": {"const": "b"}}},
    ],
    "patterns": [
        {"type": "object", "required": ["a"]},
        {"type": "object", "patternProperties": {"^a": {}}, "additionalProperties": False},
    ],
    "itself": [{"$ref": "#"}, {"$ref": "#"}],
    "elsewhere": [{"$ref": "other.json"}, {"$ref": "#/$defs/cat"}],
    "a neighbour of a reference": [
        {"$ref": "#/$defs/a~1b~0c", "const": "x"},
        {"$ref": "#/$defs/a~1b~0c", "const": "y"},
    ],
    "no list": {},  # type: ignore[dict-item]
    "true": [True, True],
}


@pytest.mark.parametrize("case", EXCLUDING)
def test_alternatives_that_exclude_each_other(compiler: GrammarCompiler, case: str) -> None:
    root = {"$defs": DEFINED, "oneOf": EXCLUDING[case]}
    assert Exclusion(root).of_each_other(EXCLUDING[case])
    compiler.json_schema(root)


@pytest.mark.parametrize("case", NOT_EXCLUDING)
def test_alternatives_that_may_hold_together(case: str) -> None:
    assert not Exclusion({"$defs": DEFINED}).of_each_other(NOT_EXCLUDING[case])


def test_the_type_around_alternatives_counts() -> None:
    alternatives = [{"required": ["a"], "properties": {"a": {"const": n}}} for n in (1, 2)]
    assert not Exclusion({}).of_each_other(alternatives)
    assert Exclusion({}).of_each_other(alternatives, "object")


def test_parts_with_identifiers_are_left_to_llguidance(compiler: GrammarCompiler) -> None:
    part = {"$id": "http://a.b/part", "$ref": "#/$defs/cat"}
    with pytest.raises(RequestError):
        compiler.json_schema({"$defs": DEFINED, "oneOf": [part, {"$ref": "#/$defs/dog"}]})


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


@settings(max_examples=500, deadline=None)
@given(first=SCHEMAS, second=SCHEMAS, values=st.lists(VALUES, min_size=5, max_size=20))
def test_no_value_satisfies_two_alternatives_that_exclude_each_other(first: Any, second: Any, values: Any) -> None:
    root = {"$defs": {**DEFINED, "missing": True}}
    if not Exclusion(root).of_each_other([first, second]):
        return
    for draft in (jsonschema.Draft7Validator, jsonschema.Draft202012Validator):
        for value in values:
            valid = [draft({**root, "allOf": [each]}).is_valid(value) for each in (first, second)]
            assert valid != [True, True]
