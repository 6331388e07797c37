"""Tokenizers of Hugging Face folders, against transformers' own reading of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, pre_tokenizers

from helpers.tokenizer_folders import CHATML, LINES, ROWS, assert_equal_ids, in_artifact, save_folder, train_byte_level
from picompile.errors import UnsupportedModelError
from picompile.frontend.tokenizer.read import read_tokenizer
from picompile.frontend.tokenizer.templates import folder_templates
from picompile_runtime.sampling.tokenizer import Tokenizer

TEXTS = [*LINES, "", "  a  b", "<|im_start|>user\nhi<|im_end|>\n", "12345678", "<tool><|pad|>  x"]
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}


@pytest.fixture(scope="module")
def trained() -> Any:
    return train_byte_level(pre_tokenizers.Digits(individual_digits=True))


def auto(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_an_unchanged_file_is_copied(tmp_path: Path, trained: Any) -> None:
    folder = save_folder(tmp_path, trained, tokenizer_config__json=CONFIG)
    files = read_tokenizer(folder, ROWS)
    assert files.tokenizer_json == (folder / "tokenizer.json").read_text()
    assert files.tokenizer_config == CONFIG
    assert files.notes == ()
    assert_equal_ids(in_artifact(folder), auto(folder), TEXTS)


def test_tokens_that_stand_outside_tokenizer_json(tmp_path: Path, trained: Any) -> None:
    """In added_tokens.json, special_tokens_map.json and tokenizer_config.json's three places."""
    more: dict[str, Any] = {
        "added_tokens__json": {"<tool>": trained.get_vocab_size(), "<|pad|>": trained.get_vocab_size() + 1}
    }
    more |= {"special_tokens_map__json": {"bos_token": "<|endoftext|>", "pad_token": "<|pad|>"}}
    folder = save_folder(tmp_path / "old", trained, tokenizer_config__json=CONFIG, **more)
    ours, theirs = in_artifact(folder), auto(folder)
    first = trained.get_vocab_size()
    assert ours.encode("<tool>x<|pad|>")[0] == first and ours.special_tokens["<|pad|>"] == first + 1
    assert_equal_ids(ours, theirs, TEXTS)
    chat = [{"role": "user", "content": "hi"}]
    with_bos = Tokenizer(
        json.dumps(json.loads(trained.to_str())),
        {**read_tokenizer(folder, ROWS).tokenizer_config, "chat_template": "{{ bos_token }}{{ messages[0].content }}"},
    )
    assert with_bos.render_chat(chat) == "<|endoftext|>hi"
    listed = {first: {"content": "<tool>", "special": False}, first + 1: {"content": "<|pad|>", "special": True}}
    config = {**CONFIG, "added_tokens_decoder": listed, "extra_special_tokens": {"tool_token": "<tool>"}}
    folder = save_folder(tmp_path / "new", trained, tokenizer_config__json=config)
    assert read_tokenizer(folder, ROWS).tokenizer_config["tool_token"] == "<tool>"
    assert_equal_ids(in_artifact(folder), auto(folder), TEXTS)
    config = {**CONFIG, "additional_special_tokens": ["<tool>"], "unk_token": "<|endoftext|>"}
    folder = save_folder(tmp_path / "more", trained, tokenizer_config__json=config)
    assert_equal_ids(in_artifact(folder), auto(folder), TEXTS)


def test_added_tokens_whose_ids_leave_a_gap(tmp_path: Path, trained: Any) -> None:
    """transformers gives them the next ids, whose rows in the model are other tokens' or none's."""
    listed = {"700": {"content": "<tool>", "special": False}}
    for name, content in (("added_tokens", {"<tool>": 700}), ("tokenizer_config", {"added_tokens_decoder": listed})):
        folder = save_folder(tmp_path / name, trained, **{f"{name}__json": content})
        with pytest.raises(
            UnsupportedModelError, match=f"{name}.json: the added token '<tool>' has the id 700, but is"
        ):
            read_tokenizer(folder, ROWS)
    content = json.loads(trained.to_str())
    content["added_tokens"].append({**content["added_tokens"][0], "content": "<tool>", "id": 700})
    folder = save_folder(tmp_path / "tokenizer", None, tokenizer__json=content)
    with pytest.raises(UnsupportedModelError, match="added token '<tool>' has the id 700, but is"):
        read_tokenizer(folder, ROWS)


def test_files_that_transformers_leaves_out_are_named(tmp_path: Path, trained: Any) -> None:
    config = {**CONFIG, "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}}}
    more = {"added_tokens__json": {"<tool>": 900}, "special_tokens_map__json": {"eos_token": {"content": "</s>"}}}
    folder = save_folder(tmp_path, trained, tokenizer_config__json=config, **more)
    first, second = read_tokenizer(folder, ROWS).notes
    assert "added_tokens.json has '<tool>'" in first
    assert "special_tokens_map.json has eos_token '</s>'; tokenizer_config.json holds, with '<|im_end|>'" in second


def test_options_that_are_not_applied_are_named(tmp_path: Path, trained: Any) -> None:
    config = {**CONFIG, "split_special_tokens": True, "clean_up_tokenization_spaces": True}
    folder = save_folder(tmp_path, trained, tokenizer_config__json=config)
    (note,) = read_tokenizer(folder, ROWS).notes  # the spaces of merged pieces stay in transformers, too
    assert note.endswith("has split_special_tokens, which is not applied: special tokens in a text are special")
    assert in_artifact(folder).encode("<|im_end|>") == [2]


def test_a_class_that_reads_the_file_otherwise(tmp_path: Path) -> None:
    """GPT2Tokenizer builds a pre-tokenizer of its own, without the split of digits (transformers#45920)."""
    tokenizer = train_byte_level()
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    folder = save_folder(tmp_path, tokenizer, tokenizer_config__json={**CONFIG, "tokenizer_class": "GPT2Tokenizer"})
    files = read_tokenizer(folder, ROWS)
    (note,) = files.notes
    assert "transformers' GPT2Tokenizer reads tokenizer.json otherwise: '1 12 123" in note
    assert in_artifact(folder).encode(LINES[0]) == tokenizer.encode(LINES[0]).ids
    assert files.tokenizer_config["bos_token"] == "<|endoftext|>"


def test_options_that_a_class_applies_over_the_file(tmp_path: Path) -> None:
    config = {**CONFIG, "tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}
    folder = save_folder(tmp_path, train_byte_level(), tokenizer_config__json=config)
    ours = in_artifact(folder)
    assert ours.encode("Hello") == ours.encode(" Hello")
    assert read_tokenizer(folder, ROWS).notes == ()
    assert_equal_ids(ours, auto(folder), TEXTS)


def test_the_split_of_mistrals_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers replaces it where the folder says so, or else warns (transformers#42299)."""
    monkeypatch.setattr(
        tokenizers.Tokenizer, "get_vocab_size", lambda *_, **__: 131072
    )  # it asks after large ones only
    tokenizer = train_byte_level(pre_tokenizers.Split("e", "isolated"))
    mistral = {"model_type": "mistral", "transformers_version": "4.50.0"}
    saved = {**CONFIG, "fix_mistral_regex": True}
    folder = save_folder(tmp_path / "mended", tokenizer, config__json=mistral, tokenizer_config__json=saved)
    assert_equal_ids(in_artifact(folder), auto(folder), TEXTS)
    assert read_tokenizer(folder, ROWS).notes == ()
    folder = save_folder(tmp_path / "said", tokenizer, config__json=mistral, tokenizer_config__json=CONFIG)
    (note,) = read_tokenizer(folder, ROWS).notes
    assert "tokenizer.json has a wrong regular expression, by which " in note
    assert note.endswith('"fix_mistral_regex": true in tokenizer_config.json mends it')
    assert_equal_ids(in_artifact(folder), auto(folder), TEXTS)


def test_added_tokens_without_a_row(tmp_path: Path, trained: Any) -> None:
    rows = trained.get_vocab_size()
    templates = [
        {"name": "default", "template": "{{ pad_token }}{{ messages[0].content }}"},
        {"name": "x", "template": ""},
    ]
    config = {**CONFIG, "pad_token": "<|pad|>", "chat_template": templates}
    folder = save_folder(tmp_path, trained, tokenizer_config__json=config)
    files = read_tokenizer(folder, rows)
    assert files.notes == (f"{folder}: the model has no row for the added token '<|pad|>' ({rows}): it is text",)
    assert "pad_token" not in files.tokenizer_config
    assert max(in_artifact(folder, rows).encode("a<|pad|>b")) < rows
    with pytest.raises(UnsupportedModelError, match="it belongs to another model"):
        read_tokenizer(folder, rows - 1)


def test_a_template_that_writes_a_token_without_a_row_is_refused(tmp_path: Path, trained: Any) -> None:
    config = {**CONFIG, "pad_token": "<|pad|>", "chat_template": "{% for m in messages %}<|pad|>{% endfor %}"}
    folder = save_folder(tmp_path, trained, tokenizer_config__json=config)
    with pytest.raises(UnsupportedModelError, match=r"the chat template writes '<\|pad\|>', a token that"):
        read_tokenizer(folder, trained.get_vocab_size())


def test_templates_by_the_files_that_have_them(tmp_path: Path) -> None:
    config = {"chat_template": [{"name": "default", "template": "config"}, {"name": "rag", "template": "r"}]}
    save_folder(tmp_path, None, chat_template__json={"chat_template": "old"})
    assert folder_templates(tmp_path, {}) == {"chat_template": "old"}
    assert folder_templates(tmp_path, config) == config
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (tmp_path / "chat_template.jinja").write_text("file")
    listed = [{"name": "default", "template": "file"}, {"name": "tool_use", "template": "tools"}]
    assert folder_templates(tmp_path, config) == {"chat_template": listed}
    with pytest.raises(UnsupportedModelError, match="chat_template must be a text"):
        folder_templates(save_folder(tmp_path / "other", None), {"chat_template": 5})


@pytest.mark.slow("starts a renderer for each template, several times")
def test_templates_of_all_files(tmp_path: Path, trained: Any) -> None:
    config = {**CONFIG, "chat_template": [{"name": "default", "template": "config"}]}
    folder = save_folder(tmp_path, trained, tokenizer_config__json=config, chat_template__json={"chat_template": "old"})
    chat, tools = [{"role": "user", "content": "x"}], [{"type": "function", "function": {"name": "f"}}]

    def rendered() -> list[str]:
        ours, theirs = in_artifact(folder), auto(folder)
        both = [ours.render_chat(chat), ours.render_chat(chat, tools=tools)]
        assert both == [theirs.apply_chat_template(chat, tokenize=False, tools=each) for each in (None, tools)]
        return both

    assert rendered() == ["config", "config"]
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert rendered() == ["x", "x"]
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert rendered() == ["x", "tools"]
    save_folder(folder, None, tokenizer_config__json=CONFIG)
    for path in ("additional_chat_templates/tool_use.jinja", "chat_template.jinja"):
        (folder / path).unlink()
    assert in_artifact(folder).render_chat(chat) == "old"
    save_folder(folder, None, tokenizer_config__json={**CONFIG, "chat_template": 5})
    with pytest.raises(UnsupportedModelError, match="chat_template must be a text"):
        read_tokenizer(folder, ROWS)


def test_a_broken_description_is_refused_by_name(tmp_path: Path, trained: Any) -> None:
    for name, content, says in (
        ("tokenizer_config__json", {"bos_token": 5}, "bos_token has to be either str or AddedToken"),
        ("added_tokens__json", "[]", "added_tokens.json: not a JSON object"),
        ("tokenizer__json", "{}", "tokenizer.json is no tokenizer"),
    ):
        folder = save_folder(tmp_path / name, trained, **{name: content})
        with pytest.raises(UnsupportedModelError, match=says) as caught:
            read_tokenizer(folder, ROWS)
        assert "\n" not in str(caught.value)


def test_a_vocabulary_in_another_file(tmp_path: Path) -> None:
    """transformers' class reads it where it is its own file; otherwise a line says that there is no tokenizer."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "##s", "world"]
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    folder = save_folder(tmp_path / "bert", None, vocab__txt="\n".join(words), tokenizer_config__json=config)
    assert in_artifact(folder).encode("Hellos world") == [2, 5, 6, 7, 3]
    assert_equal_ids(in_artifact(folder), auto(folder), ["Hellos world", "hello [MASK]", "x"])
    for name, says in (
        (
            "vocab.txt",
            "no tokenizer is made of vocab.txt: transformers chooses LlamaTokenizer, which reads no such file",
        ),
        ("qwen.tiktoken", "no tokenizer is made of qwen.tiktoken: transformers chooses LlamaTokenizer, which"),
        ("tokenizer.model.v3", "no tokenizer is made of tokenizer.model.v3: transformers chooses"),
        ("source.spm", "no tokenizer is made of source.spm: transformers chooses"),
        ("notes.md", "has no file of a tokenizer, such as tokenizer.json; the model is prompted with token ids"),
    ):
        folder = save_folder(tmp_path / name, None, tokenizer_config__json={"tokenizer_class": "LlamaTokenizer"})
        (folder / name).write_text("x")
        files = read_tokenizer(folder, ROWS)
        assert files.tokenizer_json is None and files.reason is not None
        assert says in files.reason and "\n" not in files.reason
    folder = save_folder(tmp_path / "link", None)
    (folder / "vocab.txt").symlink_to("nowhere")
    with pytest.raises(UnsupportedModelError, match=r"vocab\.txt: is a link to nowhere"):
        read_tokenizer(folder, ROWS)


def test_a_folder_without_tokenizer_json(tmp_path: Path, trained: Any) -> None:
    """GPT-2's vocab.json and merges.txt."""
    trained.add_special_tokens([AddedToken("<|endoftext|>")])
    content = json.loads(trained.to_str())["model"]
    merges = "\n".join(("#version: 0.2", *(" ".join(pair) for pair in content["merges"])))
    files: dict[str, Any] = {"vocab__json": content["vocab"], "merges__txt": merges}
    config = {"tokenizer_class": "GPT2Tokenizer", "chat_template": CHATML}
    folder = save_folder(tmp_path, None, config__json={"model_type": "gpt2"}, tokenizer_config__json=config, **files)
    assert_equal_ids(in_artifact(folder), auto(folder), TEXTS)
    assert read_tokenizer(folder, ROWS).tokenizer_config["chat_template"] == CHATML
