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


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_rendered_as_transformers_does(name: str) -> None:
    template, rendered = TEMPLATES[name], 0
    tokenizer = Tokenizer(TEXT, CONFIG, template)
    for chat in CHATS.values():
        for tools in (None, [], TOOLS):
            for generate in (True, False):
                expected = of_transformers(template, chat, tools=tools, add_generation_prompt=generate)
                if expected is None and chat[0] is SYSTEM:
                    # A system message that a template rejects is the user's.
                    question = {"role": "user", "content": f"{SYSTEM['content']}\n\n{USER['content']}"}
                    chat = [question, *chat[2:]]
                    expected = of_transformers(template, chat, tools=tools, add_generation_prompt=generate)
                if expected is None:
                    with pytest.raises(RequestError, match="rejects these messages"):
                        tokenizer.render_chat(chat, generate, tools)
                    continue
                assert tokenizer.render_chat(chat, generate, tools) == expected
                rendered += 1
    assert rendered >= 12  # and not all of them failed


EXPRESSIONS = (
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
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "{{ 1 / 0 }}",
    "{{ messages.append(1) }}",
    "{% generation %}a {{ messages[0].content }} b{% endgeneration %}",
    "  {% generation -%}\n  a\n{%- endgeneration %}  \n  b",
    "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{{ raise_exception('no') }}",
    "{% for key, value in messages[0].items() %}{{ key }}={{ value }};{% endfor %}",
    "{{ messages[0]['missing'] is defined }} {{ messages[0].get('missing') }}",
    "{{ enable_thinking }} {{ level | default('high') }}",
    "{{ 'abc' | reverse | list | join('-') }} {{ [3, 1] | sort }} {{ 'x'.format() }} {{ '%s' | format(1) }}",
)


def test_expressions_have_the_value_that_they_have_in_transformers() -> None:
    """Those that fail there fail here, too. A process renders each template, so all others are one."""
    arguments = {"enable_thinking": False}

    def expected(template: str) -> str | None:
        return of_transformers(template, [USER], add_generation_prompt=True, **arguments)

    wrong = [expression for expression in EXPRESSIONS if expected(expression) is None]
    assert 4 <= len(wrong) <= 8
    whole = "\n|".join(expression for expression in EXPRESSIONS if expression not in wrong)
    assert Tokenizer(TEXT, CONFIG, whole).render_chat([USER], arguments=arguments) == expected(whole)
    for expression in wrong:
        with pytest.raises(RequestError, match="rejects these messages"):
            Tokenizer(TEXT, CONFIG, expression).render_chat([USER], arguments=arguments)


def test_templates_that_fail_are_named() -> None:
    for template, says in (("{{ raise_exception('no\\nsystem') }}", ": no system$"), ("{% for", "")):
        with pytest.raises(RequestError, match=f"rejects these messages{says}"):
            Tokenizer(TEXT, {}, template).encode_chat([USER])


def test_arguments_of_a_template() -> None:
    tokenizer = Tokenizer(TEXT, CONFIG, HERMES)
    thinking = tokenizer.render_chat([USER])
    quick = tokenizer.render_chat([USER], arguments={"enable_thinking": False})
    assert quick == thinking + "<think>\n\n</think>\n\n"
    own = Tokenizer(TEXT, CONFIG, "{{ bos_token }}{{ documents }}")
    assert own.render_chat([USER], arguments={"bos_token": "<B>", "documents": [1]}) == "<B>[1]"
    wrong: tuple[tuple[Any, str], ...] = (
        ({"messages": []}, "messages cannot be an argument of a chat template; give it by itself"),
        ({"tools": []}, "tools cannot be an argument of a chat template; give it by itself"),
        ([1], "arguments of a chat template must be a JSON object, not"),
        ({1: 2}, "arguments of a chat template must be a JSON object, not"),
        ({"a": {1}}, "arguments of a chat template must be JSON, not"),
    )
    for arguments, says in wrong:
        with pytest.raises(RequestError, match=says):
            tokenizer.encode_chat([USER], arguments=arguments)
    with pytest.raises(RequestError, match="tools must be JSON, not"):
        tokenizer.encode_chat([USER], tools=[{"type": {1}}])


NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
FILE = {"chat_template.jinja": "file"}


def test_the_forms_of_the_configuration() -> None:
    rag, default = {"name": "rag", "template": "r"}, {"name": "default", "template": "d"}
    broken = [{"name": "default"}, None, {"template": "x"}, {"name": 1, "template": "y"}]
    good = {"text": ["text"], "r": [[rag]], "d": [[rag, default]]}
    for expected, configs in {**good, "": [broken, None, "", rag, 5]}.items():
        for config in configs:
            tokenizer = Tokenizer(TEXT, {"chat_template": config})
            assert tokenizer.chat_template() == expected
            assert tokenizer.has_chat_template == bool(expected)


def test_a_file_counts_more_than_the_configuration(make_artifact: Callable[..., Path]) -> None:
    """Where there is none, a model may have a template for tools."""
    texts = {"tokenizer.json": TEXT, "tokenizer_config.json": json.dumps({"chat_template": NAMED})}
    for name, file, expected in (("config", {}, ["plain", "0 tools", "2 tools"]), ("file", FILE, ["file"] * 3)):
        artifact = open_artifact(make_artifact(name, texts=texts | file))
        tokenizer = Tokenizer.of(artifact)
        assert [tokenizer.render_chat([USER], tools=tools) for tools in (None, [], TOOLS)] == expected
        artifact.close()
    assert Tokenizer(TEXT, {"chat_template": NAMED}).chat_template(with_tools=True) == NAMED[1]["template"]
    with pytest.raises(RequestError, match=r"has no tokenizer.json; give token ids"):
        Tokenizer.of(open_artifact(make_artifact("bare")))


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
