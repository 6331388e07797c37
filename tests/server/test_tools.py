"""OpenAI's tools and tool_choice, how a model's template says that it writes calls, and prompts with tools."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from helpers.chat_templates import TEMPLATES
from helpers.tool_styles import STYLES
from helpers.toys.toy_tool_models import tool_model
from picompile_runtime import RequestError, Tokenizer
from picompile_server.tool_format import ToolFormat
from picompile_server.tool_formats import FORMATS, HERMES, find_format
from picompile_server.tool_use import ToolUse
from picompile_server.tools import ToolOffer, read_offer

each_format = pytest.mark.parametrize("style", STYLES)


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


def test_nothing_is_offered() -> None:
    for tools, choice in ((None, None), ([], None), ([], "none"), ([], "auto"), ([NOW], "none")):
        assert read_offer(tools, choice) is None


@pytest.mark.parametrize(
    ("tools", "named"),
    [
        ([NOW, NOW], "two tools are called now"),
        ([tool("a", parameters={"type": "string"})], "the parameters of a"),
    ],
)
def test_tools_that_make_no_sense_are_refused(tools: Any, named: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_offer(tools)
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_choices_that_make_no_sense_are_refused() -> None:
    with pytest.raises(RequestError, match=r"tool_choice names .then., and the tools are now"):
        read_offer([NOW], {"type": "function", "function": {"name": "then"}})


def test_some_tools_may_be_called_and_all_are_described() -> None:
    tools = [tool(name) for name in ("a", "b", "c")]
    for mode in ("auto", "required"):
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": name}} for name in "ca"]}
        offer = read_offer(tools, {"type": "allowed_tools", "allowed_tools": allowed}, parallel=False)
        assert offer is not None and (offer.mode, offer.most_calls) == (mode, 1)
        assert [function.name for function in offer.functions] == ["a", "c"]
        everything = read_offer(tools)
        assert everything is not None and offer.template_tools == everything.template_tools
    allowed["tools"].append({"type": "function", "function": {"name": "d"}})
    with pytest.raises(RequestError, match=r"tool_choice names .d., and the tools are a, b, c"):
        read_offer(tools, {"type": "allowed_tools", "allowed_tools": allowed})


def test_arguments_have_no_names_of_their_own() -> None:
    closed = {"additionalProperties": False}
    for parameters, expected in (
        (None, {"properties": {}, **closed}),
        ({}, {}),
        ({"properties": {"a": {}}}, {"properties": {"a": {}}, **closed}),
        ({"properties": {}, "additionalProperties": True}, {"properties": {}, "additionalProperties": True}),
        ({"properties": {}, "anyOf": [{}]}, {"properties": {}, "anyOf": [{}]}),
        ({"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}),
    ):
        offer = read_offer([tool("a", parameters=parameters)])
        assert offer is not None and offer.functions[0].arguments_schema == {"type": "object", **expected}


def test_a_format_is_known_by_the_template() -> None:
    for style in FORMATS:
        assert find_format(TEMPLATES[style.name]) == style
        assert style.write([("a", "{}")]).startswith(style.trigger)
    for name in ("", "chatml", "gemma", "zephyr", "smollm", "unknown"):
        assert find_format(TEMPLATES.get(name, "")) is None


# Prompts: they describe the tools, and have the calls and results of earlier turns.

OFFER = read_offer([tool("weather", description="Söme", parameters={"type": "object", "properties": {}})])
USER = {"role": "user", "content": "Hi"}


def called(arguments: Any = '{"city": "Köln", "days": 2}', **more: Any) -> dict[str, Any]:
    call = {"id": "call_0123456789", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


RESULT = {"role": "tool", "tool_call_id": "call_0123456789", "content": "rain"}
CHAT = [USER, called(), RESULT]


def prompt(name: str, messages: Any, offer: Any = OFFER, **options: Any) -> str:
    """The text of the tokens of a chat, of special tokens, too."""
    tokenizer = tool_model(name)
    ids = ToolUse(tokenizer).encode(messages, offer, **options)
    return str(tokenizer._tokenizer.decode(ids, skip_special_tokens=False))


@each_format
def test_tools_and_calls_of_earlier_turns_are_written_as_the_model_writes_them(style: ToolFormat) -> None:
    text = prompt(style.name, [USER])
    assert text.count("Söme") == 1 and text.count("Hi") == 1
    assert "weather" not in prompt(style.name, [USER], None)
    text, arguments = prompt(style.name, CHAT), '{"city": "Köln", "days": 2}'
    ways = [style.write([("weather", arguments)])]
    if style.arguments is None:
        ways += [f"weather{style.before_arguments}{arguments}", f'"arguments": {arguments}']
        ways += [style.proof.replace("functions.f<", "functions.weather<").replace('{"needle": 1}', arguments)]
    assert any(way in text for way in ways)
    assert text.count("rain") == 1
    assert prompt(style.name, [USER, called({"city": "Köln", "days": 2}), RESULT]) == text  # as objects, too
    assert "weather" in prompt(style.name, CHAT, None)  # also where nothing is offered any more


def test_short_ids_are_the_same_for_call_and_result() -> None:
    text = prompt("mistral", CHAT)
    name = text.partition('"id": "')[2][:9]
    assert name.isalnum() and f'"call_id": "{name}"' in text
    kept = [USER, called(), {**RESULT, "tool_call_id": "abcdef123"}]
    kept[1]["tool_calls"][0]["id"] = "abcdef123"
    assert prompt("mistral", kept).count("abcdef123") == 2


def test_what_a_template_refuses_beside_reasoning_becomes_a_part_of_it() -> None:
    said = called(content="I look.", reasoning_content="Hm.")
    text = prompt("gpt-oss", [USER, said, RESULT])
    assert "<|channel|>analysis<|message|>Hm.\n\nI look.<|end|><|start|>assistant to=functions.weather" in text
    assert "<think>Hm.</think>I look.<|tool_calls_section_begin|>" in prompt("kimi", [USER, said, RESULT])


def test_ids_of_numbered_calls_name_the_function_and_count_on() -> None:
    second = called("{}")
    second["tool_calls"][0]["id"] = "c2"
    text = prompt("kimi", [*CHAT, second, {**RESULT, "tool_call_id": "c2", "content": "sun"}])
    assert "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{" in text
    assert "## Return of functions.weather:0\nrain" in text and "## Return of functions.weather:1\nsun" in text


@pytest.mark.parametrize("name", ["chatml", "zephyr", "", "deepseek-plain"])
def test_models_that_know_no_tools_are_told_of_them(name: str) -> None:
    brief = {"role": "system", "content": "Be brief."}
    text = prompt(name, [brief, USER])
    assert text.index("Be brief.") < text.index("# Tools") < text.index("Söme") < text.index("Hi")
    if name == "deepseek-plain":  # whose template writes calls, but does not describe tools
        assert "<｜tool▁call▁begin｜>function name<｜tool▁sep｜>" in text
        return
    text = prompt(name, [brief, *CHAT])
    assert HERMES.write([("function name", '{"parameter": "value"}')]) in text
    assert HERMES.write([("weather", '{"city": "Köln", "days": 2}')]) in text
    assert "<tool_response>\nrain\n</tool_response>" in text
    assert ToolUse(tool_model(name)).style == HERMES


def test_a_template_that_describes_tools_is_the_only_one_that_does() -> None:
    """However its calls are written: they are the content of the answer, and the template's own words are all."""
    tools = ToolUse(tool_model("unknown"))
    assert OFFER is not None and tools.style is None and tools.is_described
    # Clients read calls from the content, where they need the tokens of which calls are made.
    assert set(tools.shown_tokens.values()) == {"<call to=", "</call>"}
    text = prompt("unknown", [USER, called(), RESULT])
    assert text.startswith("<declare>[") and text.endswith("<tool>rain<assistant>") and "# Tools" not in text
    assert '<call to=weather>{"city": "Köln", "days": 2}</call>' in text and "<tool_call>" not in text
    assert tools.parser(OFFER) is None and tools.grammar(None, OFFER) is None  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="none can be required; set tool_choice to auto"):
        tools.grammar(None, replace(OFFER, mode="required"))  # type: ignore[arg-type]


# Writes calls and results in a way of its own, and describes no tools.
WRITES_TURNS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is not none and m.content is defined %}[{{ m.content }}]"
    "{% endif %}{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }})"
    "{% endfor %}{% endfor %}"
)


def test_a_template_that_writes_turns_with_calls_writes_them_though_it_describes_no_tools() -> None:
    tokenizer = with_template(WRITES_TURNS)
    text = tokenizer.decode(ToolUse(tokenizer).encode(CHAT, None))
    assert text == '<user>[Hi]<assistant>weather({"city": "Köln", "days": 2})<tool>[rain]'
    text = tokenizer.decode(ToolUse(tokenizer).encode([{"role": "developer", "content": "Be."}, *CHAT], OFFER))
    assert text.startswith("<system>[Be.\n\n# Tools") and text.count("<system>") == 1 and "weather({" in text
    # One that leaves out results knows no tools.
    tokenizer = with_template("{% set messages = messages | rejectattr('role', 'eq', 'tool') %}" + WRITES_TURNS)
    text = tokenizer.decode(ToolUse(tokenizer).encode(CHAT, None))
    assert "<user>[<tool_response>\nrain\n</tool_response>]" in text and "weather({" not in text


def test_a_call_without_content_has_none_unless_the_template_needs_a_text() -> None:
    """An empty text is something else than none for templates that ask."""
    adds = WRITES_TURNS.replace("m.content is not none and m.content is defined", "true")
    adds = adds.replace("{{ m.content }}", "{{ m.content + '' }}")
    for template, expected in ((WRITES_TURNS, "<assistant>weather("), (adds, "<assistant>[]weather(")):
        tokenizer = with_template(template)
        assert expected in tokenizer.decode(ToolUse(tokenizer).encode(CHAT, None))
        empty = [USER, called(content=""), RESULT]
        assert "<assistant>[]weather(" in tokenizer.decode(ToolUse(tokenizer).encode(empty, None))


def test_a_template_that_only_names_its_tools_variable_describes_none() -> None:
    tokenizer = tool_model("")
    silent = Tokenizer(tokenizer._tokenizer.to_str(), {}, "{# tools #}" + TEMPLATES["chatml"])
    assert not ToolUse(silent).is_described and ToolUse(silent).style == HERMES


def test_a_template_that_only_looks_like_one_of_a_known_format_is_not() -> None:
    """Each has the sign of a format, and writes calls otherwise."""
    for sign in ("<tool_call>", '{"name": "", "parameters": {}}', "[TOOL_CALLS]"):
        text = "{# " + sign + " #}" + TEMPLATES["unknown"].replace("tojson }}</call>", "length }}needle</call>")
        assert find_format(text) is not None
        assert ToolUse(with_template(text)).style is None


def test_the_text_of_a_call_counts_more_than_words() -> None:
    """Bielik's template explains calls without line breaks, and writes them with; Command R has Llama's words."""
    text = TEMPLATES["hermes"].replace("A call:", "A call: <tool_call>{")
    assert find_format(text) != HERMES and ToolUse(with_template(text)).style == HERMES
    text = TEMPLATES["unknown"].replace("<call to={{ call.function.name }}>", '{"tool_name": "f", "parameters": ')
    text = '{# {"name": "", "parameters": #}' + text
    assert find_format(text) is not None and ToolUse(with_template(text)).style is None


def with_template(text: str) -> Tokenizer:
    return Tokenizer(tool_model("")._tokenizer.to_str(), {}, text)


def test_arguments_are_texts_only_for_templates_that_cannot_write_objects() -> None:
    """Some write objects member by member, and a text as it is; others make no JSON of an object."""
    members, end = "{% for k, v in tc", "{% endfor %}</tool_call>"
    text = "{% if tc.function.arguments is string %}{{ tc.function.arguments }}{% else %}"
    glm = TEMPLATES["glm"].replace(members, text + members).replace(end, "{% endfor %}{% endif %}</tool_call>")
    ids = ToolUse(with_template(glm)).encode([USER, called(), RESULT], OFFER)
    assert "<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>" in tool_model("").decode(ids)
    python = TEMPLATES["unknown"].replace("call.function.arguments | tojson", "call.function.arguments | string")
    ids = ToolUse(with_template(python)).encode([USER, called(), RESULT], OFFER)
    assert '<call to=weather>{"city": "Köln", "days": 2}</call>' in tool_model("").decode(ids)


def test_calls_that_a_template_leaves_out_are_content() -> None:
    """LFM 2's writes no calls of earlier turns, and its text of an answer has them."""
    text = prompt("lfm", [USER, called(content="Let me see."), RESULT])
    assert 'Let me see.<|tool_call_start|>[weather(city="Köln", days=2)]<|tool_call_end|>' in text
    with pytest.raises(RequestError, match="the arguments of a call of weather in a message are not a JSON object"):
        prompt("lfm", [USER, called("[]")])
    # Kimi K2's has a format that is not known, and writes no calls either.
    silent = ToolUse(with_template("{% if tools %}{{ tools }}{% endif %}" + TEMPLATES["chatml"]))
    text = tool_model("").decode(silent.encode([USER, called()], OFFER))
    assert 'assistant\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}<|im_end|>' in text


def test_templates_without_a_system_message_get_it_in_the_first_question() -> None:
    text = prompt("gemma", CHAT)
    assert text.startswith("<s><start_of_turn>user\n# Tools") and text.index("</tools>") < text.index("Hi")
    text = prompt("gemma", [{"role": "system", "content": "Be brief."}, USER])
    assert text.count("<start_of_turn>user") == 1
    assert text.index("Be brief.") < text.index("# Tools") < text.index(USER["content"])


def test_results_that_follow_each_other_are_one_turn() -> None:
    """Templates that know no tools want the roles to alternate."""
    two = called(content="Let me see.")
    two["tool_calls"] = two["tool_calls"] * 2
    results = [RESULT, {**RESULT, "content": "sun"}]
    text = prompt("gemma", [USER, two, *results, {"role": "assistant", "content": "So."}, USER])
    assert "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response><end_of_turn>" in text
    assert "model\nLet me see.\n<tool_call>" in text


def test_a_chat_without_tools_is_what_it_is_without_them() -> None:
    for name in ("hermes", "chatml", "gemma"):
        tokenizer = tool_model(name)
        assert ToolUse(tokenizer).encode([USER], None) == tokenizer.encode_chat([USER])
    assert ToolUse(tool_model("")).encode([USER], None) == tool_model("").encode_chat([USER], plain=True)


def test_arguments_of_the_template_are_passed_on() -> None:
    text = prompt("hermes", [USER], arguments={"enable_thinking": False})
    assert text.endswith("<think>\n\n</think>\n\n")
    assert prompt("hermes", [USER], add_generation_prompt=False).endswith("Hi<|im_end|>\n")


@pytest.mark.parametrize("name", ["hermes", "chatml"])
def test_calls_that_make_no_sense_are_refused(name: str) -> None:
    for arguments in ("{", "[" * 100_000):
        with pytest.raises(RequestError, match="the arguments of a call of weather in a message are not JSON"):
            prompt(name, [USER, called(arguments)])
    for call in ({"id": "a"}, {"function": {"name": 5}}):
        with pytest.raises(RequestError, match="needs a function with a name"):
            prompt(name, [USER, {"role": "assistant", "tool_calls": [call]}])


def test_only_calls_are_taken_for_calls() -> None:
    for arguments in (None, "", "{}"):
        assert '"arguments": {}}' in prompt("hermes", [USER, called(arguments), RESULT])
    text = json.dumps({"name": "weather", "arguments": {}})
    assert text in prompt("hermes", [{"role": "user", "content": text}])  # the content of messages is not changed
