from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from helpers.toys.toy_tokenizers import HARD, TEXT, byte_level, metaspace
from picompile_runtime import ArtifactError, RequestError, StreamDecoder, Tokenizer, open_artifact

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
@settings(max_examples=300, deadline=None)
@given(text=TEXT)
def test_pieces_of_text_join_to_the_text(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if kind == "byte level":
        assert "".join(pieces) == text


@each_kind
@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_pieces_of_any_tokens_join_to_the_full_decoding(kind: str, data: st.DataObject) -> None:
    """A model may say anything, also bytes that are no text, special tokens and ids that do not exist."""
    tokenizer = KINDS[kind]()
    ids = data.draw(st.lists(st.integers(0, 285), max_size=30))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@each_kind
@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=30))
def test_pieces_never_split_a_character(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    for piece in stream(tokenizer, tokenizer.encode(text)):
        assert "\ufffd" not in piece


def test_an_emoji_comes_whole_and_as_soon_as_it_is() -> None:
    tokenizer = byte_level()
    assert stream(tokenizer, tokenizer.encode("a🙂b")) == ["a", "", "", "", "🙂", "b", ""]


def test_an_unfinished_character_comes_at_the_end() -> None:
    tokenizer = byte_level()
    assert stream(tokenizer, tokenizer.encode("a🙂")[:-1]) == ["a", "", "", "", "\ufffd"]


def test_a_decoder_can_be_used_again_after_flush() -> None:
    tokenizer = metaspace()
    decoder = StreamDecoder(tokenizer)
    ids = tokenizer.encode("ab a")
    for _ in range(2):
        assert "".join([*(decoder.push(token) for token in ids), decoder.flush()]) == "ab a"


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
    assert metaspace().encode("ab")[0] == 1
    assert metaspace().encode("ab", special_tokens=False)[0] != 1
    assert metaspace().encode("") == [1]
    assert metaspace(bos=False).encode("") == []
    assert metaspace().decode([1, 2, *metaspace().encode("ab"), 2]) == "ab"


def test_truncation_and_padding_of_the_file_do_not_matter() -> None:
    assert len(metaspace().encode("a b c d e x y z")) > 8
    assert len(metaspace().encode("a")) == 2


def test_broken_files_and_texts_raise() -> None:
    for text in ("", "{}", "[]", "nonsense", b"\xff"):
        with pytest.raises(ArtifactError, match=r"tokenizer.json cannot be read"):
            Tokenizer(text)
    with pytest.raises(RequestError, match="not valid Unicode"):
        byte_level().encode("\ud83d")


def test_the_tokenizer_of_an_artifact(make_artifact: Callable[..., Path]) -> None:
    texts = {
        "tokenizer.json": byte_level()._tokenizer.to_str(),
        "tokenizer_config.json": '{"eos_token": {"content": "<eos>"}, "chat_template": "old"}',
        "chat_template.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}!",
    }
    artifact = open_artifact(make_artifact(texts=texts))
    tokenizer = Tokenizer.of(artifact)
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hello"}])) == "hello!"
    artifact.close()
    bare = open_artifact(make_artifact("bare"))
    with pytest.raises(RequestError, match=r"has no tokenizer.json; give token ids"):
        Tokenizer.of(bare)
    bare.close()


CHAT = """{{ bos_token }}{% for message in messages %}
    {%- if message.role == 'system' %}{{ raise_exception('no\\nsystem') }}{% endif %}
    {% if message.role == "user" %}
[U] {{ message.content | trim }} {{ message | tojson }}
    {% else %}
[A] {{ message.content }}{% break %}
    {% endif %}
{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"""


@pytest.mark.parametrize("generate", [True, False])
def test_chats_are_rendered_as_transformers_does(generate: bool) -> None:
    messages = [{"role": "user", "content": " hällo <b> "}, {"role": "assistant", "content": "world"}]
    (expected,), _ = render_jinja_template(
        [messages], chat_template=CHAT, add_generation_prompt=generate, bos_token="<B>"
    )
    tokenizer = Tokenizer(byte_level()._tokenizer.to_str(), {"bos_token": "<B>", "chat_template": CHAT})
    assert tokenizer.decode(tokenizer.encode_chat(messages, add_generation_prompt=generate)) == expected


def test_chats_that_cannot_be_rendered_raise() -> None:
    text = byte_level()._tokenizer.to_str()
    messages = [{"role": "system", "content": "x"}]
    with pytest.raises(RequestError, match="has no chat template"):
        Tokenizer(text).encode_chat(messages)
    with pytest.raises(RequestError, match=r"rejects these messages: no system$"):
        Tokenizer(text, {}, CHAT).encode_chat(messages)
    for template in (
        "{% for",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 / 0 }}",
        "{{ nothing.x.y }}",
    ):
        with pytest.raises(RequestError, match="rejects these messages"):
            Tokenizer(text, {}, template).encode_chat(messages)
