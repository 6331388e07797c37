"""Tokenizers of GGUF files, against transformers' own reader of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.gguf_files import byte_level_metadata, save_example, sentencepiece_metadata
from picompile.errors import UnsupportedModelError
from picompile.frontend.gguf.header import read_header
from picompile.frontend.gguf.tokenizer import read_gguf_tokenizer
from picompile.frontend.tokenizer.read import read_tokenizer
from picompile.frontend.tokenizer_files import TokenizerFiles

TEXTS = ["hello world", "he said:  hello\n\nworld 12345", "</s>", "日本"]
KINDS = {"bytes": byte_level_metadata(), "pieces": sentencepiece_metadata()}


def read(folder: Path, **more: Any) -> TokenizerFiles:
    return read_gguf_tokenizer(read_header(save_example(folder, **more)))


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
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": [259, 260]}
    # transformers' GPT-2 class adds `<|endoftext|>` behind the vocabulary, where the model has no row.
    added = json.loads(found.tokenizer_json or "")["added_tokens"]
    assert {token["content"] for token in added} == {"<s>", "</s>", "<|eot|>"}
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == found.tokenizer_config


def test_sampling_parameters_are_those_of_the_file(tmp_path: Path) -> None:
    more = {"temp": 0.7, "top_k": 20, "top_p": 1.5, "penalty_repeat": 1.05, "xtc_probability": 0.0, "sequence": "edsk"}
    metadata = byte_level_metadata() | {f"general.sampling.{key}": value for key, value in more.items()}
    found = read(tmp_path, **metadata)
    expected = {"temperature": 0.7, "top_k": 20, "top_p": 1.0, "repetition_penalty": 1.05, "eos_token_id": [259, 260]}
    assert found.generation_config == expected and found.notes == ()
    found = read(tmp_path, **byte_level_metadata(), **{"general.sampling.temp": -1.0, "general.sampling.mirostat": 2})
    assert found.generation_config["temperature"] == 0
    assert found.notes == (
        "general.sampling.mirostat would change which tokens come, and picompile does not read them",
    )
    with pytest.raises(UnsupportedModelError, match=r"general\.sampling\.\*: min_p must be from 0 to 1, not 2"):
        read(tmp_path, **byte_level_metadata(), **{"general.sampling.min_p": 2.0})


def test_files_without_a_tokenizer(tmp_path: Path) -> None:
    found = read(tmp_path)
    assert found.tokenizer_json is None and "holds no tokenizer" in str(found.reason)
    found = read(tmp_path, **{**byte_level_metadata(), "tokenizer.ggml.model": "bert"})
    assert found.tokenizer_json is None and "which is bert: WordPiece of encoders" in str(found.reason)
    assert "\n" not in str(found.reason) and found.eos_token_ids == (259, 260)


def test_lists_that_contradict_each_other(tmp_path: Path) -> None:
    pieces, long = sentencepiece_metadata(), [f"{number}{'a' * 8000}" for number in range(2)]
    more = {"tokens": long, "scores": [-1.0, -2.0], "token_type": [1, 1]}
    more = {key: [*pieces[f"tokenizer.ggml.{key}"], *values] for key, values in more.items()}
    for metadata, changes, says in (
        (byte_level_metadata(), {"tokens": [1, 2, 3]}, "tokens has elements of another type than str"),
        (byte_level_metadata(), {"scores": [1, 2]}, "scores has elements of another type than float"),
        (byte_level_metadata(), {"scores": [1.0, 2.0]}, "300 tokens, but 2 tokenizer.ggml.scores"),
        (byte_level_metadata(), {"merges": ["h e", "hello"]}, "merges has hello, not two tokens"),
        (byte_level_metadata(), {"tokens": ["a" * 9000]}, "9,000 bytes long; 8192 are read"),
        (pieces, more, "too long to find them"),
    ):
        with pytest.raises(UnsupportedModelError) as caught:
            read(tmp_path, **(metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}))
        assert says in str(caught.value)


def test_more_merges_than_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that lists no merges has those that its tokens can be cut at."""
    metadata = sentencepiece_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    normal = set(tokens[259:])
    found = sum(token[:at] in normal and token[at:] in normal for token in normal for at in range(1, len(token)))
    assert found > 0
    monkeypatch.setattr("picompile.frontend.vocabulary.merges.MOST_MERGES", found)
    assert read(tmp_path, **metadata).reason is None
    monkeypatch.setattr("picompile.frontend.vocabulary.merges.MOST_MERGES", found - 1)
    with pytest.raises(UnsupportedModelError, match=f"in more than {found - 1} ways of others"):
        read(tmp_path, **metadata)


def test_gemma4_begins_with_no_token(tmp_path: Path) -> None:
    metadata = {**byte_level_metadata(), "tokenizer.ggml.add_bos_token": True}
    assert read(tmp_path, **metadata).tokenizer_config["add_bos_token"] is True
    found = read(tmp_path, **{**metadata, "tokenizer.ggml.model": "gemma4"})
    assert found.tokenizer_config["add_bos_token"] is False
    assert read(tmp_path, **{**metadata, "tokenizer.ggml.add_bos_token": 1}).tokenizer_config["add_bos_token"] is True


def test_vocabularies_that_are_too_large(tmp_path: Path) -> None:
    metadata = byte_level_metadata()
    more = {**metadata, "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], "more"]}
    with pytest.raises(UnsupportedModelError, match="the tokenizer has 301 tokens, the model only 300"):
        read(tmp_path, **{key: value for key, value in more.items() if "type" not in key})
    for limit, says in (("_MOST_TOKENS", "300 tokens"), ("_MOST_SPECIAL_TOKENS", "3 special")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"picompile.frontend.gguf.tokenizer.lists.{limit}", 2)
            with pytest.raises(UnsupportedModelError, match=f"{says}.* in its vocabulary; at most 2 are read"):
                read(tmp_path, **metadata)
