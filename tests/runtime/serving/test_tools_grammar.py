"""Answers that call tools: constrained as the model's tokens, decoded with the tokens of calls, and parsed."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from helpers.grammars import allowed, draw_answer, follow, takes
from helpers.toys.toy_tokenizers import EOS
from helpers.toys.toy_tool_models import SPECIAL, tool_model
from picompile_runtime import RequestError, StreamDecoder
from picompile_runtime.serving.grammar import GrammarCompiler
from picompile_runtime.serving.tool_formats import FORMATS, HERMES, LLAMA, ToolFormat
from picompile_runtime.serving.tool_grammar import lark_text, tool_grammar
from picompile_runtime.serving.tool_use import ToolUse
from picompile_runtime.serving.tools import ToolOffer, read_offer

CITY = {"type": "object", "properties": {"city": {"enum": ["Köln", "Ulm"]}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "get", "parameters": CITY}},
    {"type": "function", "function": {"name": "get_now"}},
]
CALL, NOW = ("get", '{"city": "Ulm"}'), ("get_now", "{}")

each_format = pytest.mark.parametrize("style", FORMATS, ids=lambda style: style.name)


@cache
def compiler(name: str, has_end: bool = True) -> GrammarCompiler:
    tokenizer = tool_model(name)
    return GrammarCompiler(tokenizer, len(tokenizer.vocabulary()), [EOS] if has_end else [])


def offered(choice: Any = "auto", parallel: bool = True, tools: Any = TOOLS) -> ToolOffer:
    offer = read_offer(tools, choice, parallel)
    assert offer is not None
    return offer


def fits(style: ToolFormat, offer: ToolOffer, text: str, schema: Any = None) -> bool:
    tokenizer = tool_model(style.name)
    maker = ToolUse(tokenizer).grammar(compiler(style.name), offer, schema)
    return takes(maker, tokenizer, text, EOS)


OTHERS = [("put", "{}"), ("get", '{"city": "Bonn"}'), ("get", "{}"), ("get_now", '{"city": "Ulm"}'), ("get_now", "[]")]


@each_format
def test_an_answer_must_call_where_it_is_required(style: ToolFormat) -> None:
    offer, named = offered("required"), offered({"type": "function", "function": {"name": "get_now"}})
    assert fits(style, offer, style.write([CALL])) and fits(style, offer, style.write([NOW]))
    assert fits(style, offer, style.write([CALL, NOW, CALL])) == (style.most_calls > 1)
    for text in ("", "Hello", f"Hello {style.write([CALL])}", f"{style.write([CALL])} Hello"):
        assert not fits(style, offer, text), text
    for call in OTHERS:
        assert not fits(style, offer, style.write([call])) and not fits(style, offered("auto"), style.write([call]))
    assert fits(style, named, style.write([NOW])) and not fits(style, named, style.write([CALL]))
    assert not fits(style, named, style.write([NOW, NOW]))


@each_format
def test_an_answer_may_call_or_not(style: ToolFormat) -> None:
    offer = offered("auto")
    for text in ("", "Hello", '{"a": 1}', "é🙂\n\n", style.write([CALL]), "<tool", "[TOOL_CALL"):
        assert fits(style, offer, text), text
    assert fits(style, offer, style.write([CALL, NOW])) == (style.most_calls > 1)
    behind = f"Let me see.\n{style.write([CALL])}"
    assert fits(style, offer, behind)  # as text, if a call must be the whole answer
    assert not style.is_whole or fits(style, offer, f"{behind}!")


@each_format
def test_one_call_is_all_where_calls_are_not_parallel(style: ToolFormat) -> None:
    for choice in ("required", "auto"):
        offer = offered(choice, parallel=False)
        assert fits(style, offer, style.write([CALL])) and not fits(style, offer, style.write([CALL, NOW]))
    tools, ids = ToolUse(tool_model(style.name)), tool_model(style.name).encode(style.write([CALL]))
    assert follow(tools.grammar(compiler(style.name), offered("required", parallel=False))(), ids) is True
    # Without an end token an answer ends with its call.
    assert follow(tools.grammar(compiler(style.name, has_end=False), offered("required"))(), ids) is True


@each_format
def test_behind_the_trigger_there_is_only_a_call(style: ToolFormat) -> None:
    if not style.is_whole:
        tokenizer = tool_model(style.name)
        grammar = ToolUse(tokenizer).grammar(compiler(style.name), offered("auto"))()
        assert follow(grammar, tokenizer.encode(f"Well: {style.trigger}")) is False
        opening = (style.begin + style.before_name + "get")[len(style.trigger) :]
        mask = allowed(grammar)
        assert mask[tokenizer.encode(opening)[0]] and not mask[EOS] and mask.sum() < 10


def test_llama_may_say_that_code_follows() -> None:
    tokenizer = tool_model("llama")
    tag, maker = tokenizer.special_tokens["<|python_tag|>"], ToolUse(tokenizer).grammar(compiler("llama"), offered())
    assert follow(maker(), [tag, *tokenizer.encode(LLAMA.write([CALL]))]) is True
    assert follow(maker(), [tag, *tokenizer.encode("print")]) is None


@each_format
def test_an_answer_may_be_json_where_it_does_not_call(style: ToolFormat) -> None:
    schema = {"type": "object", "properties": {"name": {"const": "get"}, "x": {"type": "string"}}, "required": ["name"]}
    if style.is_whole:
        with pytest.raises(RequestError, match="give tools or a response_format, not both"):
            fits(style, offered("auto"), "", schema)
        return
    assert fits(style, offered("auto"), '{"name": "get"}', schema)
    assert fits(style, offered("auto"), style.write([CALL, NOW]), schema)
    assert not fits(style, offered("auto"), "Hello", schema)
    assert not fits(style, offered("auto"), f"Hello {style.write([CALL])}", schema)
    assert not fits(style, offered("required"), '{"name": "get"}', schema)


HARD = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def test_a_schema_that_cannot_be_enforced_is_not_if_it_is_not_strict() -> None:
    loose = {"type": "function", "function": {"name": "loose", "parameters": HARD}}
    offer = offered("required", tools=[loose, TOOLS[0]])
    assert fits(HERMES, offer, HERMES.write([("loose", '{"a": [1, 1], "b": 2}')]))
    assert not fits(HERMES, offer, HERMES.write([("loose", "[]")]))
    assert not fits(HERMES, offer, HERMES.write([("get", '{"city": "Bonn"}')]))  # the others' are


def test_a_strict_schema_that_cannot_be_enforced_is_refused() -> None:
    strict = {"type": "function", "function": {"name": "strict", "parameters": HARD, "strict": True}}
    with pytest.raises(RequestError, match=r'the parameters of strict: .* not supported: "uniqueItems"'):
        fits(HERMES, offered("required", tools=[strict, TOOLS[0]]), "")


def test_definitions_of_one_function_are_not_those_of_another() -> None:
    tools = []
    for name in ("one", "two"):
        parameters = {"$defs": {"a": {"const": name}}, "properties": {"x": {"$ref": "#/$defs/a"}}}
        tools.append({"type": "function", "function": {"name": name, "parameters": parameters}})
    offer = offered("required", tools=tools)
    assert fits(HERMES, offer, HERMES.write([("one", '{"x": "one"}'), ("two", '{"x": "two"}')]))
    assert not fits(HERMES, offer, HERMES.write([("one", '{"x": "two"}')]))


def test_a_list_that_is_too_large_is_refused() -> None:
    large = {"parameters": {"type": "object", "title": "x" * 4000}, "strict": True}
    tools = [{"type": "function", "function": {"name": f"f{number}", **large}} for number in range(100)]
    with pytest.raises(RequestError, match=r"the list of tools has 4.*,.* bytes, and may have 262,144"):
        fits(HERMES, offered("required", tools=tools), "")


@each_format
def test_random_answers_are_calls_of_what_is_offered(style: ToolFormat) -> None:
    tokenizer, tools = tool_model(style.name), ToolUse(tool_model(style.name))
    texts = [tokenizer.decode([token])[:1] for token in range(len(tokenizer.vocabulary()))]
    closing = np.array([text in ('"', "}", "]", "") for text in texts])
    maker = tools.grammar(compiler(style.name), offered("required"))
    for seed in range(3):
        ids = draw_answer(maker, np.random.default_rng(seed), 2000, closing)
        assert ids is not None
        decoder, parser = StreamDecoder(tokenizer, tools.shown_tokens), tools.parser()
        deltas = [parser.feed(decoder.push(token)) for token in ids if token != EOS]
        deltas += [parser.feed(decoder.flush()), parser.finish()]
        assert "".join(delta.content for delta in deltas) == "" and parser.has_calls
        calls: list[list[str]] = []
        for call in (call for delta in deltas for call in delta.calls):
            if call.name is not None:
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
        for name, arguments in calls:
            assert json.loads(arguments) in ([{}] if name == "get_now" else [{"city": "Köln"}, {"city": "Ulm"}])


@each_format
def test_tokens_of_calls_have_their_text_in_a_stream(style: ToolFormat) -> None:
    tokenizer = tool_model(style.name)
    text = f"Well. {style.write([CALL])}"
    ids = tokenizer.encode(text)
    shown = ToolUse(tokenizer).shown_tokens
    expected = {name for name in SPECIAL.get(style.name, ()) if name in style.write([CALL, CALL])}
    assert set(shown.values()) == expected
    decoder = StreamDecoder(tokenizer, shown)
    assert "".join([*(decoder.push(token) for token in ids), decoder.flush()]) == text
    plain = StreamDecoder(tokenizer)
    hidden = "".join([*(plain.push(token) for token in ids), plain.flush()])
    assert (hidden == text) == (not shown)


def test_names_of_special_tokens_stand_for_the_tokens() -> None:
    special = {"<a>": 7, "<a>>": 8}
    assert lark_text('x<a>>"\n<a>', special) == '"x" <[8]> "\\"\\n" <[7]>'
    assert lark_text("", special) == "" and lark_text("é", {}) == '"\\u00e9"'


def test_an_error_that_is_not_of_a_function_is_raised() -> None:
    with pytest.raises(RequestError):
        tool_grammar(compiler("hermes"), replace(HERMES, before_name="\ud83d"), offered("required"), {})
