"""A model's prompt describes the tools, and has the calls and results of earlier turns."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.toys.toy_tool_models import tool_model
from picompile_runtime import RequestError
from picompile_runtime.serving.tool_formats import FORMATS, HERMES, ToolFormat
from picompile_runtime.serving.tool_use import ToolUse
from picompile_runtime.serving.tools import read_offer

TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Söme", "parameters": {"type": "object", "properties": {}}},
    }
]
OFFER = read_offer(TOOLS)
USER = {"role": "user", "content": "Hi"}


def called(arguments: Any = '{"city": "Köln", "days": 2}', **more: Any) -> dict[str, Any]:
    call = {"id": "call_0123456789", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


RESULT = {"role": "tool", "tool_call_id": "call_0123456789", "content": "rain"}
CHAT = [USER, called(), RESULT]

each_format = pytest.mark.parametrize("style", FORMATS, ids=lambda style: style.name)


def prompt(name: str, messages: Any, offer: Any = OFFER, **options: Any) -> str:
    """The text of the tokens of a chat, of special tokens, too."""
    tokenizer = tool_model(name)
    ids = ToolUse(tokenizer).encode(messages, offer, **options)
    return str(tokenizer._tokenizer.decode(ids, skip_special_tokens=False))


@each_format
def test_tools_are_in_the_prompt_once(style: ToolFormat) -> None:
    text = prompt(style.name, [USER])
    assert text.count("Söme") == 1 and text.count("Hi") == 1
    assert "weather" not in prompt(style.name, [USER], None)


@each_format
def test_calls_of_earlier_turns_are_written_as_the_model_writes_them(style: ToolFormat) -> None:
    text = prompt(style.name, CHAT)
    arguments = '{"city": "Köln", "days": 2}'
    assert f"weather{style.before_arguments}{arguments}" in text or f'"arguments": {arguments}' in text
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


def test_templates_that_do_not_describe_tools_get_a_description() -> None:
    text = prompt("deepseek-plain", [{"role": "system", "content": "Be brief."}, USER])
    assert text.index("Be brief.") < text.index("# Tools") < text.index("Söme") < text.index("Hi")
    assert "<｜tool▁call▁begin｜>function name<｜tool▁sep｜>" in text  # in the model's own form


@pytest.mark.parametrize("name", ["chatml", "zephyr", "xml", ""])
def test_models_that_know_no_tools_are_told_of_them(name: str) -> None:
    text = prompt(name, [{"role": "system", "content": "Be brief."}, *CHAT])
    assert text.index("Be brief.") < text.index("# Tools") < text.index("Söme") < text.index("Hi")
    assert HERMES.write([("function name", '{"parameter": "value"}')]) in text
    assert HERMES.write([("weather", '{"city": "Köln", "days": 2}')]) in text
    assert "<tool_response>\nrain\n</tool_response>" in text
    assert ToolUse(tool_model(name)).style == HERMES


def test_templates_without_a_system_message_get_it_in_the_first_question() -> None:
    text = prompt("gemma", CHAT)
    assert text.startswith("<s><start_of_turn>user\n# Tools") and text.index("</tools>") < text.index("Hi")
    with pytest.raises(RequestError, match="System role not supported"):
        prompt("gemma", [{"role": "system", "content": "Be brief."}, USER])


def test_results_that_follow_each_other_are_one_turn() -> None:
    """Templates that know no tools want the roles to alternate."""
    two = called(content="Let me see.")
    two["tool_calls"] = two["tool_calls"] * 2
    text = prompt(
        "gemma", [USER, two, RESULT, {**RESULT, "content": "sun"}, {"role": "assistant", "content": "So."}, USER]
    )
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


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (called("{"), "the arguments of a call of weather in a message are not JSON"),
        (called("[" * 100_000), "the arguments of a call of weather in a message are not JSON"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "a tool call in a message needs a function with a name"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}, "needs a function with a name"),
    ],
)
@pytest.mark.parametrize("name", ["hermes", "chatml"])
def test_calls_that_make_no_sense_are_refused(name: str, message: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        prompt(name, [USER, message])


def test_a_call_without_arguments_has_none() -> None:
    for arguments in (None, "", "{}"):
        assert '"arguments": {}}' in prompt("hermes", [USER, called(arguments), RESULT])


def test_the_result_of_a_template_is_not_taken_for_a_call() -> None:
    """The content of messages is not changed."""
    text = json.dumps({"name": "weather", "arguments": {}})
    assert text in prompt("hermes", [{"role": "user", "content": text}])
