"""Templates are rendered as transformers renders them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from helpers.chat_templates import CHATML, HERMES, TEMPLATES
from helpers.toys.toy_tokenizers import byte_level, metaspace
from picompile_runtime import RequestError, Tokenizer, open_artifact

TEXT = byte_level()._tokenizer.to_str()
CONFIG = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The weather, "today" <now>.',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {}}},
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": '{"sky": "blue"}'}
SYSTEM, USER = {"role": "system", "content": " Be brief. "}, {"role": "user", "content": " Hällo <b>\n "}
ANSWER = {"role": "assistant", "content": "Wörld"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "question": [USER],
    "with a system message": [SYSTEM, USER],
    "three turns": [USER, ANSWER, USER],
    "long": [SYSTEM, USER, ANSWER, USER, ANSWER, USER, ANSWER, USER],
    "call": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT],
    "call without content": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT, ANSWER, USER],
    "reasoning": [USER, {**ANSWER, "reasoning": "because"}, USER],
}


def of_transformers(template: str, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str | None:
    """Return what transformers renders, None if the template fails."""
    backend = tokenizers.Tokenizer.from_str(TEXT)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **CONFIG)
    try:
        return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **arguments))
    except Exception:  # whatever a template raises
        return None


def of_ours(template: str, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str | None:
    try:
        return Tokenizer(TEXT, CONFIG, template).render_chat(messages, **arguments)
    except RequestError:
        return None


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_rendered_as_transformers_does(name: str) -> None:
    template, rendered = TEMPLATES[name], 0
    tokenizer = Tokenizer(TEXT, CONFIG, template)
    for chat in CHATS.values():
        for tools in (None, [], TOOLS):
            for generate in (True, False):
                expected = of_transformers(template, chat, tools=tools, add_generation_prompt=generate)
                if expected is None:
                    with pytest.raises(RequestError, match="rejects these messages"):
                        tokenizer.render_chat(chat, generate, tools)
                    continue
                assert tokenizer.render_chat(chat, generate, tools) == expected
                rendered += 1
    assert rendered >= 12  # and not all of them failed


@pytest.mark.parametrize(
    "expression",
    [
        "{{ bos_token }} {{ eos_token }} {{ pad_token }} {{ unknown }}",
        "{{ tools is defined }} {{ tools is none }} {{ documents is none }} {{ custom is defined }}",
        "{{ messages[0] | tojson(indent=2) }} {{ messages | tojson(separators=(',', ':'), sort_keys=true) }}",
        "{{ 'ä' | tojson(ensure_ascii=true) }} {{ 'ä<&>' | tojson }}",
        "{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}",
        "{% set ns = namespace({'a': 2}, b=3) %}{{ ns.a + ns.b }}",
        "{% set ns = namespace() %}{% set ns._a = 1 %}{{ ns._a }}",
        "{{ namespace(_a=1)._a }}",
        "{{ dict(a=1) }} {{ dict([('b', 2)]) | tojson }}",
        "{{ ''.__class__ }}",
        "{{ messages.append(1) }}",
        "{% generation %}a {{ messages[0].content }} b{% endgeneration %}",
        "  {% generation -%}\n  a\n{%- endgeneration %}  \n  b",
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "{{ raise_exception('no') }}",
        "{% for key, value in messages[0].items() %}{{ key }}={{ value }};{% endfor %}",
        "{{ messages[0]['missing'] is defined }} {{ messages[0].get('missing') }}",
        "{{ enable_thinking }} {{ level | default('high') }}",
        "{{ 'abc' | reverse | list | join('-') }} {{ [3, 1] | sort }} {{ 'x'.format() }} {{ '%s' | format(1) }}",
    ],
)
def test_expressions_have_the_value_that_they_have_in_transformers(expression: str) -> None:
    messages, arguments = [USER], {"enable_thinking": False}
    assert of_ours(expression, messages, arguments=arguments) == of_transformers(
        expression, messages, add_generation_prompt=True, **arguments
    )


def test_arguments_of_a_template() -> None:
    tokenizer = Tokenizer(TEXT, CONFIG, HERMES)
    thinking = tokenizer.render_chat([USER])
    quick = tokenizer.render_chat([USER], arguments={"enable_thinking": False})
    assert quick == thinking + "<think>\n\n</think>\n\n"
    own = Tokenizer(TEXT, CONFIG, "{{ bos_token }}{{ documents }}")
    assert own.render_chat([USER], arguments={"bos_token": "<B>", "documents": [1]}) == "<B>[1]"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"messages": []}, "messages cannot be an argument of a chat template; give it by itself"),
        ({"tools": []}, "tools cannot be an argument of a chat template; give it by itself"),
        ([1], "arguments of a chat template must be a JSON object, not"),
        ({1: 2}, "arguments of a chat template must be a JSON object, not"),
        ({"a": {1}}, "arguments of a chat template must be JSON, not"),
    ],
)
def test_arguments_that_cannot_be_given_raise(arguments: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        Tokenizer(TEXT, CONFIG, CHATML).encode_chat([USER], arguments=arguments)


def test_tools_that_are_no_json_raise() -> None:
    with pytest.raises(RequestError, match="tools must be JSON, not"):
        Tokenizer(TEXT, CONFIG, CHATML).encode_chat([USER], tools=[{"type": {1}}])


NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]


def test_a_model_may_have_a_template_for_tools() -> None:
    tokenizer = Tokenizer(TEXT, {"chat_template": NAMED})
    assert tokenizer.render_chat([USER]) == "plain"
    assert tokenizer.render_chat([USER], tools=TOOLS) == "2 tools"
    assert tokenizer.render_chat([USER], tools=[]) == "0 tools"
    assert tokenizer.chat_template() == "plain" and tokenizer.chat_template(with_tools=True) == NAMED[1]["template"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("text", "text"),
        ([{"name": "rag", "template": "r"}], "r"),
        ([{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "default"}, None, {"template": "x"}, {"name": 1, "template": "y"}], ""),
        ("", ""),
        (None, ""),
        ({"default": "d"}, ""),
        (5, ""),
    ],
)
def test_the_forms_of_the_configuration(given: Any, expected: str) -> None:
    tokenizer = Tokenizer(TEXT, {"chat_template": given})
    assert tokenizer.chat_template() == expected
    assert tokenizer.has_chat_template == bool(expected)


def test_a_file_counts_more_than_the_configuration(make_artifact: Callable[..., Path]) -> None:
    config = json.dumps({"chat_template": NAMED})
    for file, tools, expected in ((None, TOOLS, "2 tools"), ("file", TOOLS, "file"), ("file", None, "file")):
        texts = {"tokenizer.json": TEXT, "tokenizer_config.json": config}
        texts |= {} if file is None else {"chat_template.jinja": file}
        artifact = open_artifact(make_artifact(f"{file}{tools is None}", texts=texts))
        assert Tokenizer.of(artifact).render_chat([USER], tools=tools) == expected
        artifact.close()


def test_a_model_without_a_template_gets_a_plain_one() -> None:
    tokenizer = Tokenizer(TEXT)
    assert not tokenizer.has_chat_template and tokenizer.chat_template() == ""
    expected = "Be brief.\n\nUser: Hällo <b>\n\nAssistant: Wörld\n\nUser: Hällo <b>\n\nAssistant:"
    assert tokenizer.render_chat([SYSTEM, USER, ANSWER, USER], plain=True) == expected
    ids = tokenizer.encode_chat([SYSTEM, USER, ANSWER, USER], plain=True)
    assert tokenizer.decode(ids) == expected
    assert tokenizer.render_chat([USER, ANSWER], False, plain=True) == "User: Hällo <b>\n\nAssistant: Wörld"
    assert all(stop.lstrip("\n") in expected for stop in tokenizer.chat_stops)
    with pytest.raises(RequestError, match="has no chat template"):
        tokenizer.encode_chat([USER])


def test_a_plain_chat_begins_as_texts_do_and_others_do_not() -> None:
    bos = 1
    plain, own = metaspace(), Tokenizer(metaspace()._tokenizer.to_str(), {}, CHATML)
    assert plain.encode_chat([USER], plain=True)[0] == bos
    assert own.encode_chat([USER], plain=True)[0] != bos and own.chat_stops == ()
    assert own.encode_chat([USER], plain=True) == own.encode_chat([USER])
