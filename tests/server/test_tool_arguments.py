"""Arguments of calls in formats that are not JSON: types that the schema has, when read and when made."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.grammars import compiler, takes
from helpers.toys.toy_tokenizers import EOS, byte_level
from helpers.toys.toy_tool_models import tool_model
from picompile_runtime import RequestError
from picompile_server.grammar import GrammarCompiler
from picompile_server.json_types import ALL_TYPES, possible_types
from picompile_server.tool_arguments import python_json, tagged_json
from picompile_server.tool_format import KeywordArguments, ToolFormat
from picompile_server.tool_formats import DEEPSEEK_DSML, FORMATS, GEMMA, GLM_DENSE, LFM, OLMO, QWEN_XML
from picompile_server.tool_grammar import tool_grammar
from picompile_server.tool_parser import ToolCallParser
from picompile_server.tool_use import ToolUse
from picompile_server.tools import ToolOffer, read_offer

STYLES = [style for style in FORMATS if style.arguments is not None]
each_style = pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
ITEM = {"type": "object", "properties": {"x": {"type": "number"}}, "additionalProperties": False}
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "unit": {"enum": ["c", "f"]},
    "items": {"type": "array", "items": {"$ref": "#/$defs/item"}},
    "is_long": {"type": "boolean"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["city"], "$defs": {"item": ITEM}}


def offer_of(schema: Any, strict: bool = False) -> ToolOffer:
    function = {"name": "get", "parameters": schema, "strict": strict}
    offer = read_offer([{"type": "function", "function": function}], "required")
    assert offer is not None
    return offer


def read(style: ToolFormat, parts: list[str], schema: Any = SCHEMA) -> Any:
    """The arguments of the only call, none of whose text is content."""
    parser = ToolCallParser(style, {"get": schema})
    deltas = [*(parser.feed(part) for part in parts), parser.finish()]
    assert not any(delta.content for delta in deltas)
    return json.loads("".join(call.arguments for delta in deltas for call in delta.calls))


# Texts that no format takes for something else: where texts may be null, or have no marks, "null" is not one.
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
ARGUMENTS = st.fixed_dictionaries(
    {"city": TEXTS},
    optional={
        "days": st.integers(-(10**6), 10**6),
        "unit": st.sampled_from("cf"),
        "items": st.lists(st.dictionaries(st.just("x"), st.floats(allow_nan=False, allow_infinity=False)), max_size=2),
        "is_long": st.booleans(),
        "note": st.none() | TEXTS.map(lambda text: f"note {text}"),
    },
)


@settings(max_examples=150)
@given(style=st.sampled_from(STYLES), arguments=ARGUMENTS, cuts=st.lists(st.integers(0, 400), max_size=8))
def test_arguments_have_the_types_of_the_schema_however_they_are_cut(
    style: ToolFormat, arguments: dict[str, Any], cuts: list[int]
) -> None:
    text = style.write([("get", json.dumps(arguments))])
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    assert read(style, [text[start:end] for start, end in pairwise(places)]) == arguments
    assert read(style, list(text)) == arguments


@each_style
def test_a_grammar_holds_arguments_to_the_schema(style: ToolFormat) -> None:
    maker = tool_grammar(compiler(), style, offer_of(SCHEMA), {})
    right = [
        {"city": 'Köln </par\n"x" 5', "days": 3, "unit": "c", "items": [{"x": 1.5}, {}], "is_long": True, "note": None},
        {"city": "", "unit": "f"},
        {"city": "5", "note": "a"},
    ]
    wrong: list[dict[str, Any]] = [
        {},
        {"days": 3},
        {"city": "a", "days": "many"},
        {"city": "a", "unit": "k"},
        {"city": "a", "items": [{"y": 1}]},
        {"city": "a", "is_long": 1},
        {"city": "a", "other": "b"},
    ]
    for arguments in (*right, *wrong):
        text = style.write([("get", json.dumps(arguments, ensure_ascii=False))])
        assert takes(maker, byte_level(), text, EOS) == (arguments in right), text


@each_style
def test_a_function_without_a_schema_takes_any_arguments(style: ToolFormat) -> None:
    maker = tool_grammar(compiler(), style, offer_of({}), {})
    for arguments in ({}, {"a": "b"}, {"a": "b", "c": "d e"}):
        assert takes(maker, byte_level(), style.write([("get", json.dumps(arguments))]), EOS)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'it\\'s'", "it's"),
        ('"a, (b)"', "a, (b)"),
        ("True", True),
        ("None", None),
        ("-1.5e3", -1500.0),
        ("['a', \"b\", (1, 2,), {'k': False}]", ["a", "b", [1, 2], {"k": False}]),
        ('{"a": true, "b": null}', {"a": True, "b": None}),
        ("'\\u00e9\\x41\\q'", "éA\\q"),
        ("Paris", "Paris"),
        ("'True'", "True"),
        ("", ""),
        ("NaN", "NaN"),
    ],
)
def test_python_literals_are_json(text: str, value: Any) -> None:
    assert json.loads(python_json(text)) == value
    found = read(LFM, [f"<|tool_call_start|>[get(a={text}, b=1)]<|tool_call_end|>"])
    assert found == {"a": value, "b": 1}


def test_lists_of_python_in_quotation_marks_of_either_kind_are_allowed() -> None:
    maker = tool_grammar(compiler(), LFM, offer_of(SCHEMA), {})
    text = "<|tool_call_start|>[get(city='it\\'s', unit='c', is_long=False, note='a')]<|tool_call_end|>"
    assert takes(maker, byte_level(), text.replace(", note='a'", ""), EOS)
    olmo = tool_grammar(compiler(), OLMO, offer_of(SCHEMA), {})
    assert takes(olmo, byte_level(), '<function_calls>get(city="a", is_long=false)</function_calls>', EOS)
    assert not takes(olmo, byte_level(), "<function_calls>get(city='a')</function_calls>", EOS)
    for wrong in ("get(city='a', unit='k')", "get(city='a', is_long='a')", "get(, unit='c')", "get(city='a',)"):
        assert not takes(maker, byte_level(), f"<|tool_call_start|>[{wrong}]<|tool_call_end|>", EOS)


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": ["string", "null"]}, "5"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"type": ["string", "null"]}, None),
        ("5", {"type": "integer"}, 5),
        ("five", {"type": "integer"}, "five"),
        ("True", {"type": "boolean"}, True),
        ('["a"]', {"type": "array"}, ["a"]),
        ('["a"]', {"type": "string"}, '["a"]'),
        ("5", {}, 5),
        ("five", {}, "five"),
        ('"five"', {}, '"five"'),
        ("c", {"enum": ["c", "5"]}, "c"),
        ("5", {"enum": ["c", "5"]}, "5"),
        ("5", {"$ref": "#/$defs/name"}, "5"),
        ("5", True, 5),
        ("[" * 100_000, {}, "[" * 100_000),
    ],
)
def test_a_value_between_tags_has_the_type_that_the_schema_allows(value: str, schema: Any, expected: Any) -> None:
    whole = {"properties": {"a": schema}, "$defs": {"name": {"type": "string"}}}
    assert json.loads(tagged_json(value, "a", whole)) == expected


def test_types_of_schemas() -> None:
    for schema, types in (
        ({}, ALL_TYPES),
        (True, ALL_TYPES),
        (False, set()),
        ({"type": "integer"}, {"number"}),
        ({"const": None}, {"null"}),
        ({"enum": [True, 1, "a", [], {}]}, {"boolean", "number", "string", "array", "object"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["string", "number"]}]}, {"string"}),
        ({"$ref": "#/$defs/loop"}, ALL_TYPES),
        ({"oneOf": [{"type": "string"}, {"$ref": "#/$defs/count"}]}, {"string", "number"}),
    ):
        root = {"$defs": {"loop": {"$ref": "#/$defs/loop"}, "count": {"type": "integer"}}}
        assert possible_types(schema, root) == types


def test_strict_functions_are_refused_where_the_format_cannot_hold_them() -> None:
    closed = {"type": "object", "additionalProperties": False}
    for schema, named in (
        ({**closed, "properties": {"a": {"type": "string", "pattern": "a+"}}}, "pattern of a text"),
        ({**closed, "properties": {}, "minProperties": 0, "not": {}}, "properties alone|not"),
        ({"type": "object", "additionalProperties": True, "properties": {"a": {}}}, "properties alone"),
    ):
        with pytest.raises(RequestError, match=named):
            tool_grammar(compiler(), QWEN_XML, offer_of(schema, strict=True), {})
    loose = tool_grammar(compiler(), QWEN_XML, offer_of({**closed, "properties": {"a": {"pattern": "a+"}}}), {})
    assert takes(loose, byte_level(), QWEN_XML.write([("get", '{"a": "b"}')]), EOS)


def test_tags_that_are_special_tokens_end_a_text() -> None:
    tokenizer = tool_model("glm-dense")
    made = GrammarCompiler(tokenizer, len(tokenizer.vocabulary()), [EOS])
    maker = ToolUse(tokenizer).grammar(made, offer_of(SCHEMA))
    assert maker is not None
    assert takes(maker, tokenizer, GLM_DENSE.write([("get", '{"city": "a <b", "days": 3}')]), EOS)
    assert not takes(maker, tokenizer, GLM_DENSE.write([("get", '{"city": "a", "days": "b"}')]), EOS)


def test_a_value_is_what_the_tag_before_it_says() -> None:
    text = DEEPSEEK_DSML.write([("get", '{"city": "5", "days": 3, "note": "[1]"}')])
    assert 'name="city" string="true">5<' in text and 'name="days" string="false">3<' in text
    assert read(DEEPSEEK_DSML, [text], {}) == {"city": "5", "days": 3, "note": "[1]"}
    assert read(DEEPSEEK_DSML, [text.replace(">3<", ">three<")], {})["days"] == "three"
    maker = tool_grammar(compiler(), DEEPSEEK_DSML, offer_of(SCHEMA), {})
    assert not takes(maker, byte_level(), text.replace('"days" string="false"', '"days" string="true"'), EOS)


def braced(arguments: str) -> str:
    return f"<|tool_call>call:get{{{arguments}}}<tool_call|>".replace("'", '<|"|>')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("a:'x, {y}: [z] \"q\"',b:1", {"a": 'x, {y}: [z] "q"', "b": 1}),
        (
            "a:{b-c:'x',d:[1,'2',null,{e:true}]},f:-1.5",
            {"a": {"b-c": "x", "d": [1, "2", None, {"e": True}]}, "f": -1.5},
        ),
        ("a: Paris, b: [x]", {"a": "Paris", "b": "[x]"}),
        ("'a b':1", None),
    ],
)
def test_arguments_in_braces_are_json(text: str, expected: Any) -> None:
    for parts in ([braced(text)], list(braced(text))):
        parser = ToolCallParser(GEMMA, {})
        deltas = [*(parser.feed(part) for part in parts), parser.finish()]
        arguments = "".join(call.arguments for delta in deltas for call in delta.calls)
        assert expected is None or json.loads(arguments) == expected
    written = '{"b": [1, {"d": null, "c": "x"}], "a": true}'
    assert GEMMA.write([("get", written)]) == braced("a:true,b:[1,{c:'x',d:null}]")


def test_values_in_braces_are_held_to_their_schemas() -> None:
    inner = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 3}}, "required": ["x"]}
    loop = {"type": "object", "properties": {"next": {"$ref": "#/$defs/loop"}}, "additionalProperties": False}
    properties = {
        "in": {**inner, "additionalProperties": False},
        "kind": {"enum": ["a", 5, None]},
        "list": {"type": "array", "items": {"type": ["string", "null"]}},
        "loop": {"$ref": "#/$defs/loop"},
        "open": {"type": "object"},
    }
    schema = {"type": "object", "properties": properties, "$defs": {"loop": loop}}
    maker = tool_grammar(compiler(), GEMMA, offer_of(schema), {})
    right = (
        "in:{x:3}",
        "kind:'a'",
        "kind:5,list:[]",
        "list:['a',null]",
        "loop:{next:{next:{}}}",
        "open:{a:[{b:'c'}],d:1}",
    )
    for text in right:
        assert takes(maker, byte_level(), braced(text), EOS), text
    for text in (
        "in:{}",
        "in:{x:2}",
        "in:{x:3,y:1}",
        "kind:'b'",
        "list:[1]",
        "list:'a'",
        "loop:{other:1}",
        "open:1",
        "x:1",
    ):
        assert not takes(maker, byte_level(), braced(text), EOS), text
    strict = {"type": "object", "properties": {"a": {"type": "array", "minItems": 2}}, "additionalProperties": False}
    with pytest.raises(RequestError, match="minItems cannot be enforced"):
        tool_grammar(compiler(), GEMMA, offer_of(strict, strict=True), {})


def test_what_is_no_argument_ends_the_call() -> None:
    for style, text in (
        (QWEN_XML, "<tool_call>\n<function=get>\n<parameter=city>\na\n</parameter>\nand so on"),
        (LFM, '<|tool_call_start|>[get(city="a", "b")]<|tool_call_end|>'),
    ):
        for parts in ([text], list(text)):
            parser = ToolCallParser(style, {"get": SCHEMA})
            deltas = [*(parser.feed(part) for part in parts), parser.finish()]
            assert "".join(call.arguments for delta in deltas for call in delta.calls) == '{"city": "a"}'
            assert "".join(delta.content for delta in deltas) in ("and so on", '"b")]<|tool_call_end|>')


def test_keywords_write_words_as_their_model_does() -> None:
    arguments = '{"a": true, "b": null, "c": [false], "d": "é"}'
    assert KeywordArguments().write(arguments) == 'a=True, b=None, c=[false], d="é"'
    assert KeywordArguments(is_json=True).write(arguments) == 'a=true, b=null, c=[false], d="é"'
