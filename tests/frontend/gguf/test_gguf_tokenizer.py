"""Tokenizers of GGUF files, against transformers' own reader of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.gguf_files import EXAMPLES, build, byte_level_metadata, sentencepiece_metadata, write_example
from picompile.errors import UnsupportedModelError
from picompile.frontend.gguf import GgufTokenizer, read_gguf_tokenizer, read_header
from picompile.frontend.tokenizer_files import generation_eos, read_tokenizer

TEXTS = ["hello world", "  he said: hello\n\nworld 12345", "<s>hello</s>", "日本"]
KINDS = {"bytes": byte_level_metadata(), "pieces": sentencepiece_metadata()}


def read(folder: Path, **more: Any) -> GgufTokenizer:
    write_example(folder / "model.gguf", EXAMPLES["llama"], build(EXAMPLES["llama"]), **more)
    return read_gguf_tokenizer(read_header(folder / "model.gguf"))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    found = read(tmp_path, **KINDS[kind])
    assert found.reason is None and found.tokenizer_json is not None
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    target = tmp_path / "files"
    target.mkdir()
    found.write(target)
    ours = AutoTokenizer.from_pretrained(target)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours(text)["input_ids"] == ids
        assert ids[0] == theirs.bos_token_id
    assert (ours.bos_token, ours.eos_token) == ("<s>", "</s>")
    vocabulary = 300 if kind == "bytes" else 280
    assert read_tokenizer(target, vocabulary).tokenizer_json == found.tokenizer_json


def test_descriptions(tmp_path: Path) -> None:
    found = read(tmp_path, **byte_level_metadata())
    assert found.eos_token_ids == (259, 260)
    assert found.tokenizer_config == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        "add_bos_token": True,
    }
    found.write(tmp_path)
    assert generation_eos(tmp_path) == (259, 260)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == found.tokenizer_config


def test_files_without_a_tokenizer(tmp_path: Path) -> None:
    found = read(tmp_path)
    assert found.tokenizer_json is None and "holds no tokenizer" in str(found.reason)
    found = read(tmp_path, **{**byte_level_metadata(), "tokenizer.ggml.model": "bert"})
    assert found.tokenizer_json is None and "which is bert: Cannot build a tokenizer" in str(found.reason)
    assert "\n" not in str(found.reason) and found.eos_token_ids == (259, 260)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer.ggml.tokens": [1, 2, 3]}, "tokens has elements of another type than str"),
        ({"tokenizer.ggml.scores": [1, 2]}, "scores has elements of another type than float"),
        ({"tokenizer.ggml.scores": [1.0, 2.0]}, "300 tokens, but 2 tokenizer.ggml.scores"),
        ({"tokenizer.ggml.merges": ["h e", "hello"]}, "merges has hello, not two tokens"),
        ({"tokenizer.ggml.tokens": ["a" * 9000]}, "9,000 bytes long; 8192 are read"),
    ],
)
def test_lists_that_contradict_each_other(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(tmp_path, **{**byte_level_metadata(), **changes})
    assert says in str(caught.value)


def test_merges_that_would_take_too_long(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    long = [f"{number}{'a' * 8000}" for number in range(2)]
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *long]
    metadata["tokenizer.ggml.scores"] = [*metadata["tokenizer.ggml.scores"], -1.0, -2.0]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1, 1]
    with pytest.raises(UnsupportedModelError, match="too long to find them"):
        read(tmp_path, **metadata)


def test_more_merges_than_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that lists no merges has those that its tokens can be cut at."""
    metadata = sentencepiece_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    found = sum(token[:at] in tokens and token[at:] in tokens for token in tokens for at in range(1, len(token)))
    assert found > 0
    monkeypatch.setattr("picompile.frontend.gguf.tokenizer._MOST_MERGES", found)
    assert read(tmp_path, **metadata).reason is None
    monkeypatch.setattr("picompile.frontend.gguf.tokenizer._MOST_MERGES", found - 1)
    with pytest.raises(UnsupportedModelError, match=f"can be made in {found} ways of others"):
        read(tmp_path, **metadata)


def test_more_tokens_than_rows(tmp_path: Path) -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "more"]
    with pytest.raises(UnsupportedModelError, match="the tokenizer has 301 tokens, the model only 300"):
        read(tmp_path, **{key: value for key, value in metadata.items() if "type" not in key and "scores" not in key})


def test_gemma4_begins_with_no_token(tmp_path: Path) -> None:
    metadata = {**byte_level_metadata(), "tokenizer.ggml.add_bos_token": True}
    assert read(tmp_path, **metadata).tokenizer_config["add_bos_token"] is True
    found = read(tmp_path, **{**metadata, "tokenizer.ggml.model": "gemma4"})
    assert found.tokenizer_config["add_bos_token"] is False
    assert read(tmp_path, **{**metadata, "tokenizer.ggml.add_bos_token": 1}).tokenizer_config["add_bos_token"] is True


@pytest.mark.parametrize(("limit", "says"), [("_MOST_TOKENS", "300 tokens"), ("_MOST_SPECIAL_TOKENS", "3 special")])
def test_vocabularies_that_are_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, says: str
) -> None:
    monkeypatch.setattr(f"picompile.frontend.gguf.tokenizer.{limit}", 2)
    with pytest.raises(UnsupportedModelError, match=f"{says}.* in its vocabulary; at most 2 are read"):
        read(tmp_path, **byte_level_metadata())


def test_special_tokens_of_other_models_are_left_out(tmp_path: Path) -> None:
    """transformers' GPT-2 class adds `<|endoftext|>` behind the vocabulary, where the model has no row."""
    found = json.loads(read(tmp_path, **byte_level_metadata()).tokenizer_json or "")
    assert {token["content"] for token in found["added_tokens"]} == {"<s>", "</s>", "<|eot|>"}
