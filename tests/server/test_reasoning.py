"""Reasoning apart from the answer: found by the template, split as it comes, and free where a grammar restricts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.chat_templates import TEMPLATES
from helpers.grammars import allowed, takes
from helpers.toys.toy_tokenizers import EOS, byte_level
from picompile_runtime import RequestError, Tokenizer
from picompile_server.grammar import GrammarCompiler
from picompile_server.reasoning import ReasoningSplitter
from picompile_server.reasoning_formats import (
    HARMONY,
    REASONING_FORMATS,
    THINK,
    ReasoningFormat,
    find_reasoning_format,
    is_closed,
    is_open,
)
from picompile_server.reasoning_grammar import ReasoningGrammar, ReasoningTokens

each_format = pytest.mark.parametrize("style", REASONING_FORMATS, ids=lambda style: style.name)


def split(style: ReasoningFormat, parts: Sequence[str], opened: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(style, opened)
    pieces = [*(splitter.feed(part) for part in parts), splitter.finish()]
    return "".join(piece for piece, _ in pieces), "".join(piece for _, piece in pieces)


def written(style: ReasoningFormat, reasoning: str, answer: str) -> str:
    return f"{style.begin}{reasoning}{style.end}{style.between}{style.before_answer}{answer}"


def test_a_format_is_known_by_the_template() -> None:
    for style in REASONING_FORMATS:
        assert find_reasoning_format(f"{{{{ '{style.begin}' + m.reasoning_content + '{style.end}' }}}}") == style
    assert find_reasoning_format(TEMPLATES["deepseek"]) == find_reasoning_format(TEMPLATES["hermes"]) == THINK
    for name in ("", "chatml", "llama", "mistral", "gemma", "unknown"):
        assert find_reasoning_format(TEMPLATES.get(name, "")) is None


@each_format
def test_a_prompt_may_have_begun_the_reasoning(style: ReasoningFormat) -> None:
    assert is_open(style, f"<assistant>{style.begin}\n") and is_open(style, style.begin.rstrip())
    closed = f"{style.begin}\n\n{style.end}\n\n"
    assert is_closed(style, closed) and not is_closed(style, f"{closed}<assistant>")
    assert not is_open(style, closed) and not is_open(style, f"{style.begin}<assistant>")


@each_format
def test_reasoning_is_split_from_the_answer(style: ReasoningFormat) -> None:
    for spaces in ("", "\n", "\n\n"):
        text = written(style, f"{spaces}I see.\n\nYes{spaces}", f"{'' if style.between else spaces}It is so.\n")
        assert split(style, [text]) == split(style, list(text)) == ("I see.\n\nYes", "It is so.\n")
        opened = text.removeprefix(style.begin)
        assert split(style, [opened], True) == split(style, list(opened), True) == ("I see.\n\nYes", "It is so.\n")
        assert split(style, [text], True) == ("I see.\n\nYes", "It is so.\n")  # begun again


@each_format
def test_an_answer_without_reasoning_is_all_there_is(style: ReasoningFormat) -> None:
    for text in ("Hi", "\n<b>", "", "  ", style.begin[:4], f"Hi {style.begin}x{style.end}"):
        assert split(style, [text]) == split(style, list(text)) == ("", text)
    assert split(style, [f"{style.before_answer}Hi"]) == ("", "Hi")
    assert split(style, [f"{style.begin}\n\n{style.end}{style.between}\n\nHi"]) == (
        "",
        "Hi" if not style.between else "\n\nHi",
    )


@each_format
def test_reasoning_that_is_cut_off_is_no_answer(style: ReasoningFormat) -> None:
    whole = f"{style.begin}I see.{style.end}"
    for cut in range(len(style.begin), len(whole)):
        reasoning, answer = split(style, list(whole[:cut]))
        assert answer == "" and reasoning.startswith("I see."[: max(0, cut - len(style.begin))].rstrip())
    splitter = ReasoningSplitter(style)
    assert not splitter.is_reasoning
    splitter.feed(f"{style.begin}I see")
    assert splitter.is_reasoning
    splitter.feed(style.end)
    assert not splitter.is_reasoning and ReasoningSplitter(style, True).is_reasoning


@settings(max_examples=200)
@given(style=st.sampled_from(REASONING_FORMATS), data=st.data())
def test_any_text_is_split_alike_however_it_is_cut(style: ReasoningFormat, data: st.DataObject) -> None:
    alphabet = st.sampled_from([*filter(None, style.texts), style.begin[:3], " ", "\n", "a", "<"])
    text = "".join(data.draw(st.lists(alphabet, max_size=8)))
    opened = data.draw(st.booleans())
    assert split(style, [text], opened) == split(style, list(text), opened)


# Grammars: tokens of bytes, and tokens of the format's own texts as models have them.


def tokenizer(*special: str, words: Sequence[str] = ()) -> Tokenizer:
    made = tokenizers.Tokenizer.from_str(byte_level()._tokenizer.to_str())
    made.add_special_tokens(list(special))
    made.add_tokens(list(words))
    return Tokenizer(made.to_str())


def tokens_of(made: Tokenizer, style: ReasoningFormat) -> ReasoningTokens:
    return ReasoningTokens(style, made, len(made.vocabulary()), frozenset([EOS]))


class Followed:
    """Whether answers fit a grammar of "yes" behind reasoning."""

    def __init__(self, made: Tokenizer, style: ReasoningFormat, opened: bool = False, is_text: bool = True) -> None:
        vocab = len(made.vocabulary())
        self.tokenizer, self._tokens = made, tokens_of(made, style)
        self._make = GrammarCompiler(made, vocab, [EOS]).regex("yes|no")
        self._opened, self._is_text = opened, is_text

    def grammar(self) -> ReasoningGrammar:
        return ReasoningGrammar(self._tokens, self._make, self._opened, self._is_text)

    def fits(self, text: str) -> bool:
        return takes(self.grammar, self.tokenizer, text, EOS)


TOKENS: Any = [tokenizer(), tokenizer(words=["<think>", "</think>"]), tokenizer("<think>", "</think>")]


@pytest.mark.parametrize("made", TOKENS, ids=["bytes", "words", "special"])
def test_what_follows_the_reasoning_is_restricted(made: Tokenizer) -> None:
    answer = Followed(made, THINK)
    for text in ("yes", "no", "<think>any < </b> yes</think>yes", "<think></think>no", "<think>\n.\n</think>\nyes"):
        assert answer.fits(text), text
    for text in (
        "maybe",
        "",
        "<think>yes",
        "<think>a</think>maybe",
        "<think>a</think>",
        "\nyes",
        "<think>a</think>\n\nyes",
    ):
        assert not answer.fits(text), text
    opened = Followed(made, THINK, opened=True)
    assert opened.fits("So.</think>yes") and opened.fits("yes</think>no") and not opened.fits("yes")


def test_an_end_token_does_not_end_the_reasoning() -> None:
    grammar = Followed(TOKENS[1], THINK, opened=True).grammar()
    assert not allowed(grammar)[EOS] and allowed(grammar).sum() == len(TOKENS[1].vocabulary()) - 1


def test_a_token_that_ends_the_reasoning_has_no_answer() -> None:
    made = byte_level((">y", "> "))
    answer = Followed(made, THINK)
    assert answer.fits("<think>x >y </think> yes")
    spoilt = made.encode("<think>a</think", special_tokens=False)
    grammar = answer.grammar()
    for token in spoilt:
        assert allowed(grammar)[token]
        assert not grammar.accept(token)
    vocabulary = made.vocabulary()
    assert allowed(grammar)[vocabulary[">Ġ"]] and not allowed(grammar)[vocabulary[">y"]]
    with pytest.raises(RequestError, match="ends the reasoning and begins the answer"):
        grammar.accept(vocabulary[">y"])


def test_harmonys_channels() -> None:
    made = tokenizer("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    text = Followed(made, HARMONY)
    assert text.fits(f"{thought}<|channel|>final<|message|>yes")
    for wrong in ("yes", f"{thought}yes", "<|channel|>final<|message|>yes"):
        assert not text.fits(wrong), wrong
    calls = Followed(made, HARMONY, is_text=False)
    assert (
        calls.fits(f"{thought}yes") and calls.fits("yes") and not calls.fits(f"{thought}<|channel|>final<|message|>yes")
    )
