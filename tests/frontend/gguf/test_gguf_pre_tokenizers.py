"""Splits of byte-level vocabularies: one that was trained with a split gives the same tokens out of a GGUF file."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from helpers.gguf_vocabularies import TEXTS, listed, made, read_vocabulary_file, trained_bytes
from picompile.errors import UnsupportedModelError
from picompile.frontend.gguf.tokenizer.pre_tokenizers import PRE_TOKENIZERS

# The names that llama.cpp's src/llama-vocab.cpp (November 2026) has for byte-level vocabularies.
LLAMA_CPP = (
    "a.x-4.0 afmoe bailingmoe bailingmoe2 bloom chameleon chatglm-bpe codeshell cohere2moe command-r dbrx "
    "deepseek-coder deepseek-llm deepseek-r1-qwen deepseek-v3 default exaone exaone-moe exaone4 f2llmv2 "
    "falcon falcon-h1 falcon3 gigachat glm4 glm5 gpt-2 gpt-4o gpt3-finnish granite-docling "
    "granite-embed-multi-97m grok-2 hunyuan hunyuan-dense hy_v4 jais jais-2 jina-de jina-es jina-v1-en "
    "jina-v2-code jina-v2-de jina-v2-es jina-v5-nano joyai-llm kanana2 kimi-k2 kormo laguna lfm2 "
    "llada-moe llama-bpe llama-v3 llama3 llama4 megrez mellum mellum2 midm-2.0 minerva-7b minicpm5 "
    "minimax-m2 modern-bert mpt olmo phi-2 pixtral poro-chat qwen2 qwen35 refact roberta-bpe seed-coder "
    "smaug-bpe smollm solar-open spark2_5 stablelm2 starcoder superbpe talkie tekken tiny_aya trillion "
    "ufakzeka viking youtu "
)


def byte_level(*before: Any, use_regex: bool = True) -> Any:
    return pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)])


def isolated(expression: str) -> Any:
    return byte_level(pre_tokenizers.Split(Regex(expression), "isolated"), use_regex=False)


def of_class(name: str) -> Any:
    """The split of a tokenizer class of transformers."""
    import transformers

    return getattr(transformers, name)(vocab={"a": 0}, merges=[]).backend_tokenizer.pre_tokenizer


# Splits as transformers' own classes have them, and as tokenizers' components describe published ones.
SPLITS = {
    "gpt-2": lambda: of_class("GPT2Tokenizer"),
    "mpt": lambda: of_class("GPTNeoXTokenizer"),
    "qwen2": lambda: of_class("Qwen2Tokenizer"),
    "qwen35": lambda: of_class("Qwen3_5Tokenizer"),
    "command-r": lambda: of_class("CohereTokenizer"),
    "starcoder": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True)),
    # tiktoken's cl100k_base.
    "llama-bpe": lambda: isolated(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


def test_all_names_are_known() -> None:
    assert sorted(PRE_TOKENIZERS) == sorted(LLAMA_CPP.split())


def test_every_split_keeps_the_whole_text() -> None:
    bytes_only = {letter: number for number, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    text = "".join(TEXTS)
    for name, split in PRE_TOKENIZERS.items():
        parsed = pre_tokenizer(split.to_json())
        letters = "".join(piece for piece, _ in parsed.pre_tokenize_str(text))
        assert len(letters) == len(text.encode()) and set(letters) <= set(bytes_only), name


def pre_tokenizer(description: dict[str, Any]) -> Any:
    import json

    content = json.loads(trained_bytes(byte_level(), size=256).to_str())
    return Tokenizer.from_str(json.dumps({**content, "pre_tokenizer": description})).pre_tokenizer


@pytest.mark.parametrize("name", SPLITS)
def test_tokens_are_those_of_the_trained_tokenizer(tmp_path: Path, name: str) -> None:
    theirs = trained_bytes(SPLITS[name]())
    if name in ("mpt", "qwen2", "qwen35", "command-r"):
        theirs.normalizer = normalizers.NFC()
    ours = made(tmp_path, **listed(theirs, pre=name, add_bos_token=False))
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text).ids, text
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text).ids)


def test_digits_in_groups() -> None:
    for name, groups in {
        "gpt-2": ["1234567"],
        "smollm": list("1234567"),
        "llama-bpe": ["123", "456", "7"],
        "falcon": ["123", "456", "7"],
        "deepseek-v3": ["123", "456", "7"],
        "superbpe": ["1", "234", "567"],
        "afmoe": ["1", "234", "567"],
        "tiny_aya": ["1", "234", "567"],
        "tekken": list("1234567"),
        "deepseek-llm": list("1234567"),
    }.items():
        found = pre_tokenizer(PRE_TOKENIZERS[name].to_json()).pre_tokenize_str("1234567")
        assert [piece for piece, _ in found] == groups, name


def test_a_whole_piece_that_is_a_token(tmp_path: Path) -> None:
    """Llama 3's vocabulary has tokens to which no merges lead; GPT-2's merges alone decide."""
    lists = listed(trained_bytes(byte_level(), size=257))
    lists |= {"tokens": [*lists["tokens"], "zebra"], "token_type": [*lists["token_type"], 1]}
    for name, whole in {"llama-bpe": True, "tekken": True, "glm4": True, "gpt-2": False, "qwen2": False}.items():
        ids = made(tmp_path, **lists, pre=name, add_bos_token=False).encode("zebra").ids
        assert (ids == [257]) == whole, name


def test_a_split_that_is_not_known_is_refused(tmp_path: Path) -> None:
    lists = listed(trained_bytes(byte_level(), size=257))
    with pytest.raises(
        UnsupportedModelError, match=r"splits texts by newer-bpe \(tokenizer.ggml.pre\), which is not"
    ) as caught:
        read_vocabulary_file(tmp_path, **lists, pre="newer-bpe")
    assert caught.value.exit_code == 3 and "\n" not in str(caught.value)


def test_a_split_that_is_not_named(tmp_path: Path) -> None:
    lists = listed(trained_bytes(byte_level(), size=257))
    (note,) = read_vocabulary_file(tmp_path, **lists).notes
    assert "does not say how texts are split" in note and "\n" not in note
    named = read_vocabulary_file(tmp_path, "falcon", **lists, pre="falcon")
    assert read_vocabulary_file(tmp_path, "falcon", **lists) == named
    assert named.notes == ()


def test_merges_that_are_not_listed(tmp_path: Path) -> None:
    """Kimi K2's follow from the order of its tokens, as with tiktoken."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    lists = {"model": "gpt2", "tokens": [*letters, "he", "ll", "hell", "llo", "hello"], "token_type": [1] * 261}
    assert made(tmp_path, **lists, pre="kimi-k2").encode("hellohelp").tokens == ["hello", "he", "l", "p"]
    with pytest.raises(UnsupportedModelError, match="lists no merges"):
        read_vocabulary_file(tmp_path, **lists, pre="qwen2")


def test_merges_of_tokens_that_are_not_there(tmp_path: Path) -> None:
    lists = listed(trained_bytes(byte_level(), size=257))
    with pytest.raises(UnsupportedModelError, match="its merges have zq, which is no token"):
        read_vocabulary_file(tmp_path, **{**lists, "merges": ["z q"]}, pre="gpt-2")
