"""Tokenizers that would end, or never leave, the process that reads them."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.tokenizer_folders import ROWS, save_folder, train_byte_level
from picompile.errors import UnsupportedModelError
from picompile.frontend.tokenizer.read import read_tokenizer

TABLE = {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="}  # says that it has four gigabytes
BOOK = {"type": "Replace", "pattern": {"String": ""}, "content": "y" * 10_000}
ROBERTA = {"type": "RobertaProcessing", "sep": ["</s>", 10**6], "cls": ["<s>", 10**6]}
ROBERTA |= {"trim_offsets": True, "add_prefix_space": False}


@pytest.mark.slow("starts a process per tokenizer", but=("table", "around"))
@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("normalizer", TABLE, r"tokenizer\.json is no tokenizer: "),
        ("normalizer", BOOK, r"tokenizer\.json is no tokenizer: "),
        ("decoder", BOOK, r"tokenizer\.json is no tokenizer: a text of 11 letters becomes"),
        ("post_processor", ROBERTA, "puts a token around texts that the model has no row for"),
    ],
    ids=["table", "book", "written", "around"],
)
def test_they_are_refused_in_one_line(tmp_path: Path, part: str, value: Any, says: str) -> None:
    content = json.loads(train_byte_level().to_str())
    folder = save_folder(tmp_path, None, tokenizer__json={**content, part: value})
    with pytest.raises(UnsupportedModelError, match=says) as caught:
        read_tokenizer(folder, ROWS)
    assert str(caught.value).isprintable()


def test_half_of_a_surrogate_pair_is_written(tmp_path: Path) -> None:
    files: dict[str, Any] = {"generation_config__json": {"x": "\ud800é"}}
    folder = save_folder(tmp_path, train_byte_level(), **files)
    read_tokenizer(folder, ROWS).write(folder)
    assert json.loads((folder / "generation_config.json").read_text()) == files["generation_config__json"]
