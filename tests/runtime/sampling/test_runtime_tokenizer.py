from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.toys.toy_tokenizers import HARD, TEXT, byte_level, metaspace
from picompile_runtime import StreamDecoder, Tokenizer

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "metaspace": metaspace,
    "metaspace, stripped": lambda: metaspace(strip=True),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def stream(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(token) for token in ids), decoder.flush()]


@each_kind
@settings(max_examples=200, deadline=None)
@given(text=TEXT)
def test_pieces_of_text_join_to_the_text(kind: str, text: str) -> None:
    """And never split a character."""
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if kind == "byte level":
        assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@each_kind
@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_pieces_of_any_tokens_join_to_the_full_decoding(kind: str, data: st.DataObject) -> None:
    """A model may say anything, also bytes that are no text, special tokens and ids that do not exist."""
    tokenizer = KINDS[kind]()
    ids = data.draw(st.lists(st.integers(0, 285), max_size=30))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_an_emoji_comes_whole_and_as_soon_as_it_is() -> None:
    """An unfinished character comes at the end, and a decoder can be used again behind it."""
    tokenizer = byte_level()
    assert stream(tokenizer, tokenizer.encode("a🙂b")) == ["a", "", "", "", "🙂", "b", ""]
    decoder, ids = StreamDecoder(tokenizer), tokenizer.encode("a🙂")[:-1]
    for _ in range(2):
        assert [*map(decoder.push, ids), decoder.flush()] == ["a", "", "", "", "\ufffd"]


def test_long_streams_are_decoded_in_short_windows() -> None:
    """Otherwise the time would grow with the square of the length."""
    tokenizer = byte_level()
    lengths: list[int] = []

    class Watched(Tokenizer):
        def decode(self, ids: Sequence[int]) -> str:
            lengths.append(len(ids))
            return tokenizer.decode(ids)

    watched = Watched(tokenizer._tokenizer.to_str())
    ids = tokenizer.encode(HARD * 50)
    assert "".join(stream(watched, ids)) == HARD * 50
    assert max(lengths) <= 12


def test_special_tokens_are_put_around_and_left_out() -> None:
    """Truncation and padding of the file do not matter."""
    assert metaspace().encode("ab")[0] == 1
    assert metaspace().encode("ab", special_tokens=False)[0] != 1
    assert metaspace().encode("") == [1]
    assert metaspace(bos=False).encode("") == []
    assert metaspace().decode([1, 2, *metaspace().encode("ab"), 2]) == "ab"
    assert len(metaspace().encode("a b c d e x y z")) > 8
    assert len(metaspace().encode("a")) == 2
