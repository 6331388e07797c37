"""Folders that transformers' classes save, with vocabularies that are trained here."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from helpers.tokenizer_folders import CHATML, LINES, ROWS, assert_equal_ids, in_artifact, save_folder, train_byte_level
from picompile.frontend.tokenizer.read import read_tokenizer

SPECIAL = ("<|endoftext|>", "<|padding|>", "<|im_end|>", "<unk>", "<s>", "</s>", "<pad>", "<bos>", "<eos>", "<mask>")


def _bytes() -> dict[str, Any]:
    model = json.loads(train_byte_level(special=SPECIAL).to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(pair) for pair in model["merges"]]}


def _pieces() -> dict[str, Any]:
    """Return pieces with merges and a token for each byte, as Llama 2 and Gemma have them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<s>", "</s>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(
        LINES * 9, trainers.BpeTrainer(vocab_size=500, special_tokens=names, show_progress=False)
    )
    model = json.loads(tokenizer.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(pair) for pair in model["merges"]]}


def _unigram() -> dict[str, Any]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(LINES * 9, trainer)
    return {"vocab": [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["vocab"]]}


CLASSES: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "GPT2Tokenizer": (_bytes, {}),
    "GPT2Tokenizer with a space": (_bytes, {"add_prefix_space": True}),
    "GPTNeoXTokenizer": (_bytes, {"add_bos_token": True}),
    "Qwen2Tokenizer": (_bytes, {"eos_token": "<|im_end|>"}),
    "LlamaTokenizer": (_pieces, {}),
    "LlamaTokenizer of old": (_pieces, {"legacy": True, "add_bos_token": True}),
    "LlamaTokenizer without a space": (_pieces, {"add_prefix_space": False, "add_eos_token": True}),
    "CodeLlamaTokenizer": (_pieces, {}),
    "GemmaTokenizer": (_pieces, {"add_bos_token": True}),
    "T5Tokenizer": (_unigram, {"extra_ids": 3}),
    "XGLMTokenizer": (_unigram, {}),
}
# Their classes read what they have saved themselves in another way: without the bos token, and without old spaces.
READ_OTHERWISE = ("GPTNeoXTokenizer", "LlamaTokenizer of old")


def texts(tokenizer: Any, count: int) -> list[str]:
    draw = Random(1)
    ids = sorted(tokenizer.vocabulary().values())
    drawn = (tokenizer.decode([draw.choice(ids) for _ in range(draw.randint(1, 6))]) for _ in range(count))
    special = list(tokenizer.added_tokens) or ["a"]
    rows = ("".join(draw.choice((*special[:20], " ", "b", "\n")) for _ in range(5)) for _ in range(count // 4))
    return [*LINES, "", " a", "  a  b ", "\n\n", "Hello", "12345", *drawn, *rows]


@pytest.mark.slow("builds a tokenizer of each class twice", but=("GPT2Tokenizer with", "LlamaTokenizer]"))
@pytest.mark.parametrize("name", CLASSES)
def test_folders_of_classes_are_read_as_they_were_saved(tmp_path: Path, name: str) -> None:
    import transformers

    train, more = CLASSES[name]
    made = getattr(transformers, name.partition(" ")[0])(**train(), **more, chat_template=CHATML)
    made.save_pretrained(tmp_path)
    save_folder(tmp_path, None)
    files, ours = read_tokenizer(tmp_path, ROWS), in_artifact(tmp_path)
    assert len(files.notes) == (name in READ_OTHERWISE)
    chosen = [text for text in texts(ours, 200) if "<FILL_ME>" not in text]  # Python code of Code Llama's class
    assert_equal_ids(ours, made, chosen)
    if not files.notes:
        assert_equal_ids(ours, transformers.AutoTokenizer.from_pretrained(tmp_path), chosen)
    for text in texts(ours, 50):
        ids = ours.encode(text)
        assert ours.decode(ids) == made.decode(ids, skip_special_tokens=True), text
    for chat in (
        [{"role": "user", "content": "x"}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
    ):
        assert ours.render_chat(chat) == made.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert files.tokenizer_config.get("eos_token") == made.eos_token


def test_an_artifacts_files_are_a_folder_for_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config = {"eos_token": "<|im_end|>", "image_token": "<mask>", "chat_template": CHATML}
    folder = save_folder(tmp_path / "model", train_byte_level(special=SPECIAL), tokenizer_config__json=config)
    written = tmp_path / "artifact"
    written.mkdir()
    read_tokenizer(folder, ROWS).write(written)
    first, second = (AutoTokenizer.from_pretrained(each) for each in (folder, written))
    assert first.special_tokens_map == second.special_tokens_map and first.chat_template == second.chat_template
    for text in (*LINES, "<|im_end|>x<mask>"):
        assert first(text)["input_ids"] == second(text)["input_ids"]
