from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from helpers.toys.toy_tokenizers import EOS, TEXT, byte_level, metaspace
from picompile_runtime import RequestError, Tokenizer
from picompile_server.text import TextAssembler, TokenTexts

TOKENIZERS = {"byte level": byte_level(), "metaspace": metaspace(), "strip": metaspace(bos=False, strip=True)}


def assembled(assembler: TextAssembler, tokens: list[int]) -> str:
    text = ""
    for token in tokens:
        text += assembler.push(token)
        assert assembler.shown == len(text) <= assembler.decoded
    text += assembler.finish()
    assert assembler.shown == len(text)
    return text


@given(text=TEXT, stop=st.text(st.characters(codec="utf-8"), min_size=1, max_size=3))
def test_text_ends_at_the_first_stop_text_wherever_tokens_are_cut(text: str, stop: str) -> None:
    tokenizer = byte_level()
    assembler = TextAssembler(tokenizer, [stop])
    tokens = tokenizer.encode(text + stop + text, special_tokens=False)
    assert assembled(assembler, tokens) == (text + stop + text).partition(stop)[0]
    assert assembler.is_stopped


def test_an_empty_stop_text_is_refused() -> None:
    with pytest.raises(RequestError, match="must not be empty"):
        TextAssembler(byte_level(), [""])


def test_the_name_of_a_special_token_is_a_stop() -> None:
    """The token has no text, and what is held back before it is shown."""
    tokenizer = byte_level()
    tokens = tokenizer.encode("he<", special_tokens=False)
    special = tokenizer.special_tokens["<eos>"]
    assembler = TextAssembler(tokenizer, ["<b>", "<eos>"])
    assert assembled(assembler, [*tokens, special]) == "he<" and assembler.is_stopped
    assembler = TextAssembler(tokenizer, ["e", "<eos>"])
    assert assembled(assembler, [*tokens, special]) == "h"
    assembler = TextAssembler(tokenizer, ["<eos"])
    assert assembled(assembler, [*tokens, special]) == "he<" and not assembler.is_stopped


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_prompts_last_characters_are_not_the_answers(name: str) -> None:
    """Bytes of characters are held back, but those of the prompt are known."""
    tokenizer = TOKENIZERS[name]
    for before in ("Hello\n", "caf\u00e9", "\u4e2d\U0001f600", "a"):
        prompt = tokenizer.encode(before, special_tokens=False)
        tokens = tokenizer.encode(f"{before}hello", special_tokens=False)[len(prompt) :]
        expected = tokenizer.decode(prompt + tokens)[len(tokenizer.decode(prompt)) :]
        assert assembled(TextAssembler(tokenizer, (), prompt), tokens) == expected
        assert assembled(TextAssembler(tokenizer, (), prompt), []) == ""
        stopped = TextAssembler(tokenizer, ["\n"], prompt)
        assert assembled(stopped, tokens) == expected and not stopped.is_stopped
    # An answer completes the character in which a prompt ends.
    *prompt, last = tokenizer.encode("a\u4e2d", special_tokens=False)
    plain = tokenizer.encode("b", special_tokens=False)[-1:]
    assert assembled(TextAssembler(tokenizer, (), prompt), [last, *plain]).startswith("\u4e2d")


@given(count=st.integers(1, 200), rest=TEXT)
def test_bytes_that_are_no_text_come_before_the_end(count: int, rest: str) -> None:
    """And joined the pieces are the text of all tokens: a first byte of a character, again and again."""
    tokenizer = byte_level()
    lead = tokenizer.encode("\u4e2d", special_tokens=False)[:1]
    tokens = lead * count + tokenizer.encode(rest, special_tokens=False)
    assembler = TextAssembler(tokenizer)
    pieces = [assembler.push(token) for token in lead * count]
    assert len("".join(pieces)) >= count - 32
    assert assembled(TextAssembler(tokenizer), tokens) == tokenizer.decode(tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXT)
def test_bytes_of_tokens_joined_are_those_of_the_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    texts = TokenTexts(tokenizer)
    tokens = tokenizer.encode("a" + text, special_tokens=False)
    joined = b"".join(texts.bytes_of(token) for token in tokens)
    assert joined.removeprefix(b" ").decode() == tokenizer.decode(tokens).removeprefix(" ")


def test_texts_of_single_tokens() -> None:
    tokenizer = byte_level()
    texts = TokenTexts(tokenizer)
    tokens = tokenizer.encode("é", special_tokens=False)
    assert [texts.bytes_of(token) for token in tokens] == [b"\xc3", b"\xa9"]
    assert [texts.text_of(token) for token in tokens] == ["\\xc3", "\\xa9"]
    # Special tokens have a text, and unknown ones none.
    assert (texts.text_of(EOS), texts.text_of(10**6)) == ("<eos>", "")
    # Added tokens that are no bytes have their own.
    inner = tokenizers.Tokenizer.from_str(tokenizer._tokenizer.to_str())
    inner.add_tokens(["two words"])
    tokenizer = Tokenizer(inner.to_str())
    (token,) = tokenizer.encode("two words", special_tokens=False)
    assert TokenTexts(tokenizer).bytes_of(token) == b"two words"
