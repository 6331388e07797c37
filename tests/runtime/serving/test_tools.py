"""OpenAI's tools and tool_choice, and how a model's template says that it writes calls."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.chat_templates import TEMPLATES
from picompile_runtime import RequestError
from picompile_runtime.serving.tool_formats import FORMATS, find_format
from picompile_runtime.serving.tools import ToolOffer, read_offer


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


WEATHER = tool("get_weather", description="d", parameters={"type": "object", "properties": {"city": {}}}, strict=True)
NOW = tool("now")


def test_an_offer_has_all_functions() -> None:
    offer = read_offer([WEATHER, NOW])
    assert offer is not None and offer.mode == "auto" and offer.most_calls > 1
    assert [function.name for function in offer.functions] == ["get_weather", "now"]
    assert [function.is_strict for function in offer.functions] == [True, False]
    assert offer.template_tools == [
        tool("get_weather", description="d", parameters={"type": "object", "properties": {"city": {}}}),
        tool("now", description="", parameters={"type": "object", "properties": {}}),
    ]


@pytest.mark.parametrize(
    ("choice", "parallel", "mode", "names", "most_calls"),
    [
        (None, True, "auto", ["get_weather", "now"], ToolOffer.most_calls),
        ("auto", False, "auto", ["get_weather", "now"], 1),
        ("required", True, "required", ["get_weather", "now"], ToolOffer.most_calls),
        ({"type": "function", "function": {"name": "now"}}, True, "required", ["now"], 1),
    ],
)
def test_choices(choice: Any, parallel: bool, mode: str, names: list[str], most_calls: int) -> None:
    offer = read_offer([WEATHER, NOW], choice, parallel)
    assert offer is not None
    assert (offer.mode, [each.name for each in offer.functions], offer.most_calls) == (mode, names, most_calls)


@pytest.mark.parametrize(("tools", "choice"), [(None, None), ([], None), ([], "none"), ([], "auto"), ([NOW], "none")])
def test_nothing_is_offered(tools: Any, choice: Any) -> None:
    assert read_offer(tools, choice) is None


@pytest.mark.parametrize(
    ("tools", "choice", "says"),
    [
        ([], "required", "tool_choice is 'required', and there are no tools"),
        (None, {"type": "function", "function": {"name": "now"}}, "there are no tools"),
        ({"a": 1}, None, "tools must be a list"),
        ("abc", None, "tools must be a list"),
        ([NOW] * 129, None, "tools must be a list of at most 128"),
        ([NOW, NOW], None, "two tools are called now"),
        ([{"type": "search"}], None, "a tool must be"),
        ([None], None, "a tool must be"),
        ([{"function": {"name": "a"}}], None, "a tool must be"),
        ([tool("a b")], None, "a function's name must be"),
        ([tool("")], None, "a function's name must be"),
        ([tool("a" * 65)], None, "a function's name must be"),
        ([tool("a\n")], None, "a function's name must be"),
        ([tool(None)], None, "a function's name must be"),
        ([tool("a", description=5)], None, "the description of a must be a text"),
        ([tool("a", parameters=[])], None, "the parameters of a must be a JSON schema of an object"),
        ([tool("a", parameters={"type": "string"})], None, "the parameters of a must be a JSON schema of an object"),
        ([NOW], "sometimes", "tool_choice must be none, auto, required"),
        ([NOW], {"type": "allowed_tools"}, "tool_choice must be none, auto, required"),
        ([NOW], {"function": {"name": "now"}}, "tool_choice must be none, auto, required"),
        ([NOW], {"type": "function", "function": {"name": "then"}}, "tool_choice names 'then', and the tools are now"),
    ],
)
def test_what_makes_no_sense_is_refused(tools: Any, choice: Any, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_offer(tools, choice)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (None, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({}, {"type": "object"}),
        ({"properties": {"a": {}}}, {"type": "object", "properties": {"a": {}}, "additionalProperties": False}),
        (
            {"properties": {}, "additionalProperties": True},
            {"type": "object", "properties": {}, "additionalProperties": True},
        ),
        ({"properties": {}, "anyOf": [{}]}, {"type": "object", "properties": {}, "anyOf": [{}]}),
        ({"$ref": "#/$defs/a"}, {"type": "object", "$ref": "#/$defs/a"}),
    ],
)
def test_arguments_have_no_names_of_their_own(parameters: Any, expected: Any) -> None:
    offer = read_offer([tool("a", parameters=parameters)])
    assert offer is not None and offer.functions[0].arguments_schema == expected


@pytest.mark.parametrize("style", FORMATS, ids=lambda style: style.name)
def test_a_format_is_known_by_the_template(style: Any) -> None:
    assert find_format(TEMPLATES[style.name]) == style


@pytest.mark.parametrize("name", ["", "chatml", "gemma", "zephyr", "smollm", "xml"])
def test_other_templates_have_no_known_format(name: str) -> None:
    assert find_format(TEMPLATES.get(name, "")) is None


@pytest.mark.parametrize("style", FORMATS, ids=lambda style: style.name)
def test_the_trigger_is_how_calls_begin(style: Any) -> None:
    assert style.write([("a", "{}")]).startswith(style.trigger)
