from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picompile_runtime.serving.tool_formats import FORMATS, HERMES, LLAMA, ToolFormat
from picompile_runtime.serving.tool_parser import AnswerDelta, ToolCallDelta, ToolCallParser, parse_answer

each_format = pytest.mark.parametrize("style", FORMATS, ids=lambda style: style.name)
STYLES = st.sampled_from(FORMATS)
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


def streamed(style: ToolFormat, parts: Sequence[str], **options: Any) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(style, **options)
    return joined([*(parser.feed(part) for part in parts), parser.finish()])


@each_format
def test_calls_are_read_as_they_are_written(style: ToolFormat) -> None:
    calls = CALLS[: style.most_calls]
    content, found = parse_answer(style, style.write(calls))
    assert content == "" and [(call.name, call.arguments) for call in found] == calls
    assert len({call.id for call in found}) == len(calls)
    wanted = "[a-zA-Z0-9]{9}" if style.has_short_ids else "call_[0-9a-f]{24}"
    assert all(re.fullmatch(wanted, call.id) for call in found)


@each_format
def test_text_around_calls_is_content(style: ToolFormat) -> None:
    for text in ("", "Hello.\n\n", " < [TOOL <tool_cal {", '{"a": 1}'):
        assert parse_answer(style, text) == (text, ())
    if not style.is_whole:
        content, calls = parse_answer(style, f"Let me see. \n\n{style.write(CALLS)}")
        assert content == "Let me see." and [call.name for call in calls] == ["get_weather", "now"]
        content, calls = parse_answer(style, f"\n\n{style.write(CALLS)}\n")
        assert content == "" and len(calls) == 2


def test_a_call_that_must_be_the_whole_answer_is_one_at_the_beginning_alone() -> None:
    text = f"Like this: {LLAMA.write(CALLS[:1])}"
    assert parse_answer(LLAMA, text) == (text, ())
    assert streamed(HERMES, [f"a {HERMES.write(CALLS)}"], has_schema=True) == (f"a {HERMES.write(CALLS)}", [])
    assert streamed(HERMES, [HERMES.write(CALLS)], has_schema=True) == ("", CALLS)


@settings(max_examples=150)
@given(style=STYLES, data=st.data())
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
@given(style=STYLES, data=st.data())
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
        content, calls = parse_answer(style, whole[:end])
        written = whole[:end].partition(CALLS[0][0] + style.before_arguments)[2]
        assert content == "" and len(calls) == bool(f"{CALLS[0][0]}{style.before_arguments}" in whole[:end])
        assert all(written.startswith(call.arguments) and CALLS[0][1].startswith(call.arguments) for call in calls)


def test_what_only_begins_like_a_call_is_content() -> None:
    for text in (
        "a  <tool_call>no",
        "a <tool_call>\n{} b",
        '<tool_call>\n{"name": "a b',
        '<tool_call>\n{"name": "a" }',
    ):
        assert parse_answer(HERMES, text) == (text, ())
        assert streamed(HERMES, list(text)) == (text, [])
    first = HERMES.write(CALLS[1:])
    for rest in ("and more", '<tool_call>\n{"name": "a b"'):  # behind a call
        for parts in ([first + "\n" + rest], list(first + "\n" + rest)):
            content, calls = streamed(HERMES, parts)
            assert content.strip() == rest and calls == CALLS[1:]
