"""Answers that call tools: parsed as they come, constrained as the model's tokens, decoded with the tokens of calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.grammars import allowed, draw_answer, follow, takes
from helpers.tool_styles import STYLES
from helpers.toys.toy_tokenizers import EOS
from helpers.toys.toy_tool_models import SPECIAL, tool_model
from picompile_runtime import RequestError, StreamDecoder
from picompile_server.grammar import GrammarCompiler
from picompile_server.tool_format import ToolFormat
from picompile_server.tool_formats import FORMATS, HERMES, KIMI, LLAMA
from picompile_server.tool_grammar import lark_text, tool_grammar
from picompile_server.tool_parser import AnswerDelta, ToolCallDelta, ToolCallParser
from picompile_server.tool_use import ToolUse
from picompile_server.tools import ToolOffer, read_offer

each_format = pytest.mark.parametrize("style", STYLES)
ANY_STYLE = st.sampled_from(FORMATS)
CALLS = [("get_weather", '{"city": "Köln \\"}{", "days": [1, {"a": "\\\\"}]}'), ("now", "{}")]


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    places = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


def joined(deltas: Sequence[AnswerDelta]) -> tuple[str, list[tuple[str, str]]]:
    """The content and the calls of all deltas, which come as OpenAI's do: the name first, then the arguments."""
    calls: list[tuple[str, str]] = []
    for delta in (call for answer in deltas for call in answer.calls):
        if delta.name is not None:
            assert delta.index == len(calls) and delta.id
            calls.append((delta.name, ""))
        assert delta.index == len(calls) - 1  # the latest call
        calls[-1] = calls[-1][0], calls[-1][1] + delta.arguments
    return "".join(delta.content for delta in deltas), calls


def streamed(style: ToolFormat, parts: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(style)
    return joined([*(parser.feed(part) for part in parts), parser.finish()])


@each_format
def test_calls_are_read_as_they_are_written(style: ToolFormat) -> None:
    calls = CALLS[: style.most_calls]
    parser = ToolCallParser(style)
    deltas = [parser.feed(style.write(calls)), parser.finish()]
    assert joined(deltas) == ("", calls)
    ids = {call.id for delta in deltas for call in delta.calls if call.id is not None}
    assert len(ids) == len(calls)
    wanted = "[a-zA-Z0-9]{9}" if style.has_short_ids else "call_[0-9a-f]{24}"
    wanted = r"functions\.(get_weather:0|now:1)" if style.is_numbered else wanted
    assert all(re.fullmatch(wanted, id_) for id_ in ids)


@each_format
def test_text_around_calls_is_content(style: ToolFormat) -> None:
    for text in ("", "Hello.\n\n", " < [TOOL <tool_cal {", '{"a": 1}'):
        assert streamed(style, [text]) == (text, [])
    if not style.is_whole:
        content, calls = streamed(style, [f"Let me see. \n\n{style.write(CALLS)}"])
        assert content == "Let me see." and [name for name, _ in calls] == ["get_weather", "now"]
        content, calls = streamed(style, [f"\n\n{style.write(CALLS)}\n"])
        assert content == "" and len(calls) == 2


def test_a_call_that_must_be_the_whole_answer_is_one_at_the_beginning_alone() -> None:
    text = f"Like this: {LLAMA.write(CALLS[:1])}"
    assert streamed(LLAMA, [text]) == (text, [])


@settings(max_examples=150)
@given(style=st.sampled_from([style for style in FORMATS if style.arguments is None]), data=st.data())
def test_pieces_are_read_like_the_whole(style: ToolFormat, data: st.DataObject) -> None:
    content = data.draw(st.sampled_from(["", "a", "Hm. \n", " <|tool", "[TOOL"])) if not style.is_whole else ""
    values = st.dictionaries(st.text(max_size=3), st.text(max_size=5) | st.lists(st.integers(), max_size=2), max_size=2)
    arguments = st.builds(lambda value: json.dumps(value, ensure_ascii=False), values)
    names = st.from_regex("[a-zA-Z0-9_.-]{1,6}", fullmatch=True)
    calls = data.draw(st.lists(st.tuples(names, arguments), min_size=1, max_size=min(3, style.most_calls)))
    text = content + style.write(calls)
    cuts = data.draw(st.lists(st.integers(0, 10_000), max_size=30))
    assert streamed(style, pieces(text, cuts)) == (content.rstrip(), calls)


@settings(max_examples=300)
@given(style=ANY_STYLE, data=st.data())
def test_any_text_is_read_alike_however_it_is_cut(style: ToolFormat, data: st.DataObject) -> None:
    """A model without a grammar may write anything."""
    whole = style.write(CALLS)
    alphabet = st.sampled_from([*filter(None, style.texts), whole, whole[:20], "{", "}", '"', "\\", " ", "\n", "a"])
    text = "".join(data.draw(st.lists(alphabet, max_size=8)))
    cuts = data.draw(st.lists(st.integers(0, 10_000), max_size=30))
    content, calls = streamed(style, [text])
    assert streamed(style, pieces(text, cuts)) == (content, calls)
    assert streamed(style, list(text)) == (content, calls)
    if style.trigger not in text:
        assert (content, calls) == (text, [])


def test_content_comes_as_soon_as_it_is_known() -> None:
    parser = ToolCallParser(HERMES)
    assert [parser.feed(piece).content for piece in ("Hi", " <", "b> ", "x <tool_", "ball", "\n", "\n.")] == [
        *("Hi", "", " <b>", " x", " <tool_ball", "", "\n\n.")
    ]


def test_a_call_comes_piece_by_piece() -> None:
    parser = ToolCallParser(HERMES)
    found = [parser.feed(piece).calls for piece in ("<tool_call>\n{", '"name": "f', '", "arguments": {"a', '": 1', "}")]
    assert found[0] == found[1] == () and not found[2][0].arguments
    assert found[2][0].name == "f" and found[2][1] == ToolCallDelta(0, '{"a')
    assert found[3:] == [(ToolCallDelta(0, '": 1'),), (ToolCallDelta(0, "}"),)]
    assert parser.has_calls and parser.feed("}\n</tool_call>") == parser.finish() == AnswerDelta()


@each_format
def test_a_call_that_is_cut_has_what_there_is_of_its_arguments(style: ToolFormat) -> None:
    whole = style.write(CALLS[:1])
    for end in range(len(style.trigger), len(whole)):
        content, calls = streamed(style, [whole[:end]])
        name = CALLS[0][0] + ":0" * style.is_numbered
        _, opening, written = whole[:end].partition(name + style.before_arguments)
        # a name ends where something follows it
        assert content == "" and len(calls) == bool(opening and (style.before_arguments or written))
        assert all(CALLS[0][1].startswith(given) for _, given in calls)
        assert style.arguments is not None or all(written.startswith(given) for _, given in calls)


def test_what_only_begins_like_a_call_is_content() -> None:
    for text in (
        "a  <tool_call>no",
        "a <tool_call>\n{} b",
        '<tool_call>\n{"name": "a b',
        '<tool_call>\n{"name": "a" }',
    ):
        assert streamed(HERMES, [text]) == (text, [])
        assert streamed(HERMES, list(text)) == (text, [])
    first = HERMES.write(CALLS[1:])
    for rest in ("and more", '<tool_call>\n{"name": "a b"'):  # behind a call
        for parts in ([first + "\n" + rest], list(first + "\n" + rest)):
            content, calls = streamed(HERMES, parts)
            assert content.strip() == rest and calls == CALLS[1:]


# Grammars of answers that call tools, as tokens.


CITY = {"type": "object", "properties": {"city": {"enum": ["Köln", "Ulm"]}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "get", "parameters": CITY}},
    {"type": "function", "function": {"name": "get_now"}},
]
CALL, NOW = ("get", '{"city": "Ulm"}'), ("get_now", "{}")


@cache
def compiler(name: str, has_end: bool = True) -> GrammarCompiler:
    tokenizer = tool_model(name)
    return GrammarCompiler(tokenizer, len(tokenizer.vocabulary()), [EOS] if has_end else [])


def offered(choice: Any = "auto", parallel: bool = True, tools: Any = TOOLS) -> ToolOffer:
    offer = read_offer(tools, choice, parallel)
    assert offer is not None
    return offer


def fits(style: ToolFormat, offer: ToolOffer, text: str) -> bool:
    tokenizer = tool_model(style.name)
    maker = ToolUse(tokenizer).grammar(compiler(style.name), offer)
    return takes(maker, tokenizer, text, EOS)


OTHERS = [("put", "{}"), ("get", '{"city": "Bonn"}'), ("get", "{}"), ("get_now", '{"city": "Ulm"}')]


@each_format
def test_an_answer_must_call_where_it_is_required(style: ToolFormat) -> None:
    offer, named = offered("required"), offered({"type": "function", "function": {"name": "get_now"}})
    assert fits(style, offer, style.write([CALL])) and fits(style, offer, style.write([NOW]))
    assert fits(style, offer, style.write([CALL, NOW, CALL])) == (style.most_calls > 1)
    for text in ("", "Hello", f"Hello {style.write([CALL])}", f"{style.write([CALL])} Hello"):
        assert not fits(style, offer, text), text
    for call in [*OTHERS, *([("get_now", "[]")] if style.arguments is None else [])]:
        assert not fits(style, offer, style.write([call])) and not fits(style, offered("auto"), style.write([call]))
    assert fits(style, named, style.write([NOW])) and not fits(style, named, style.write([CALL]))
    assert not fits(style, named, style.write([NOW, NOW]))


@each_format
def test_an_answer_may_call_or_not(style: ToolFormat) -> None:
    offer = offered("auto")
    for text in ("", "Hello", '{"a": 1}', "é🙂\n\n", style.write([CALL]), "<tool", "[TOOL_CALL"):
        assert fits(style, offer, text) != (style.is_whole and text.startswith(style.trigger) and "get" not in text)
    assert fits(style, offer, style.write([CALL, NOW])) == (style.most_calls > 1)
    assert fits(style, offer, f"{style.before_text}Hello")
    behind = f"Let me see.\n{style.write([CALL])}"
    if style.before_text:  # there is no text with its special tokens
        return
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


HARD = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def test_a_number_may_be_cut_from_its_name() -> None:
    text = KIMI.write([("add", "{}"), ("add", '{"n": 1}')])
    for cut in range(len(text)):
        assert streamed(KIMI, [text[:cut], text[cut:]]) == ("", [("add", "{}"), ("add", '{"n": 1}')])
    spoilt = text.replace("add:0", "add#0")
    assert streamed(KIMI, [spoilt]) == streamed(KIMI, list(spoilt)) == (spoilt, [])


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
        ids = draw_answer(maker, np.random.default_rng(seed), 4000, closing)
        assert ids is not None
        decoder = StreamDecoder(tokenizer, tools.shown_tokens)
        text = "".join([*(decoder.push(token) for token in ids if token != EOS), decoder.flush()])
        content, calls = streamed(style, [text])
        assert content == "" and calls
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
