"""Chat templates and ends of an answer in GGUF files."""

from pathlib import Path

import pytest

from helpers.gguf_vocabularies import (
    CONTROL,
    USER_DEFINED,
    listed,
    pieces,
    read_vocabulary_file,
    trained_bytes,
    with_tokens,
)
from picompile_runtime.sampling.chat_template import named_templates


def test_named_templates(tmp_path: Path) -> None:
    lists = pieces(["▁", "a"])
    one = read_vocabulary_file(tmp_path, **lists, **{"tokenizer.chat_template": "plain"})
    assert one.tokenizer_config["chat_template"] == "plain"
    named = {"tokenizer.chat_template.tool_use": "tools", "tokenizer.chat_template.rag": "papers"}
    several = {"tokenizer.chat_template": "plain", "tokenizer.chat_templates": ["tool_use", "rag"], **named}
    found = read_vocabulary_file(tmp_path, **lists, **several).tokenizer_config
    assert found["chat_template"][0] == {"name": "default", "template": "plain"}
    assert named_templates(found) == {"default": "plain", "tool_use": "tools", "rag": "papers"}
    assert "chat_template" not in read_vocabulary_file(tmp_path, **lists).tokenizer_config


@pytest.mark.parametrize(
    ("names", "more", "ends"),
    [
        (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], {"eos_token_id": 0}, [0, 2]),
        (["<x>", "<|eot_id|>", "<|eom_id|>", "<y>"], {"eos_token_id": 0, "eot_token_id": 3}, [0, 3, 1, 2]),
        (["<start_of_turn>", "<end_of_turn>"], {}, [1]),
        (["<|return|>", "<|call|>", "<|end|>", "<|start|>"], {"eos_token_id": 0}, [0, 1]),
        (["<|fim_prefix|>", "<|fim_pad|>", "<|file_sep|>", "<|im_end|>"], {"eos_token_id": 3}, [3, 1, 2]),
        (["<｜end▁of▁sentence｜>", "<｜User｜>"], {}, [0]),
    ],
)
def test_ends_of_an_answer(tmp_path: Path, names: list[str], more: dict[str, int], ends: list[int]) -> None:
    from tokenizers import pre_tokenizers

    lists = listed(trained_bytes(pre_tokenizers.ByteLevel(add_prefix_space=False), size=257), pre="gpt-2")
    more = {key: 257 + number for key, number in more.items()}
    found = read_vocabulary_file(tmp_path, **with_tokens(lists, names, CONTROL, **more))
    assert found.eos_token_ids == tuple(257 + number for number in ends)


def test_html_does_not_end_an_answer(tmp_path: Path) -> None:
    lists = with_tokens(pieces(["▁", "a"], eos_token_id=1), ["<tool>", "<|tool_response>"], USER_DEFINED)
    lists["tokens"][2], lists["token_type"][2] = "</s>", USER_DEFINED
    assert read_vocabulary_file(tmp_path, **lists).eos_token_ids == (1, 262)


@pytest.mark.parametrize("kind", ["bert", "rwkv", "plamo2", "none", "no_vocab", "newer"])
def test_vocabularies_without_a_tokenizer(tmp_path: Path, kind: str) -> None:
    found = read_vocabulary_file(tmp_path, **{**pieces(["▁", "a"]), "model": kind, "eos_token_id": 2})
    assert found.tokenizer_json is None and found.eos_token_ids == (2,)
    assert f"which is {kind}: " in str(found.reason) and "\n" not in str(found.reason)


def test_tokens_that_are_never_chosen_are_named(tmp_path: Path) -> None:
    (note,) = read_vocabulary_file(tmp_path, **pieces(["▁", "a"]), suppress_tokens=[1, 2]).notes
    assert note.startswith("tokenizer.ggml.suppress_tokens would change which tokens come")
