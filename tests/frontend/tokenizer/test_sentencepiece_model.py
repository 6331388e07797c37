"""Folders with a tokenizer.model alone."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from helpers.sentencepiece_files import BPE, UNIGRAM, WORDS, field, save_model
from helpers.tokenizer_folders import CHATML, ROWS, in_artifact, save_folder
from picompile.errors import UnsupportedModelError
from picompile.frontend.tokenizer.read import read_tokenizer
from picompile.frontend.tokenizer.sentencepiece_model import read_sentencepiece


def names(folder: Path, text: str, around: bool = False) -> list[str]:
    ours = in_artifact(folder)
    known = {number: name for name, number in ours.vocabulary().items()}
    return [known[number] for number in ours.encode(text, around)]


def save(folder: Path, model: dict[str, Any] | None = None, **files: Any) -> Path:
    save_folder(folder, None, **files)
    save_model(folder / "tokenizer.model", **(model or {}))
    return folder


def test_a_text_is_prepared_and_cut_as_the_model_says(tmp_path: Path) -> None:
    folder = save(tmp_path / "prefix")
    assert names(folder, "hello", around=True) == ["<s>", "▁hello"]
    assert names(folder, "  hello") == ["▁▁", "▁hello"]
    assert names(folder, "é") == ["▁", "<0xC3>", "<0xA9>"]
    assert in_artifact(folder).decode(in_artifact(folder).encode(" hello é")) == " hello é"
    plain = save(tmp_path / "plain", {"prefix": False, "extra": True})
    assert names(plain, " hello   hello ") == ["h", "el", "lo", "▁hello"]
    assert names(save(tmp_path / "unigram", {"kind": UNIGRAM}), "lo h") == ["▁", "lo", "▁h"]


def test_special_tokens_and_ends(tmp_path: Path) -> None:
    folder = save(tmp_path / "own")
    files = read_tokenizer(folder, ROWS)
    assert {name: files.tokenizer_config[f"{name}_token"] for name in ("bos", "eos", "unk")} == {
        "bos": "<s>",
        "eos": "</s>",
        "unk": "<unk>",
    }
    assert files.eos_token_ids == (2,) and files.notes == ()
    assert names(folder, "<turn>hello</s>") == ["<turn>", "▁hello", "</s>"]
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "eos_token": "<turn>"}
    more: dict[str, Any] = {"added_tokens__json": {"<|im_end|>": len(WORDS)}, "chat_template__jinja": CHATML}
    folder = save(tmp_path / "more", tokenizer_config__json=config, **more)
    assert names(folder, "hello<|im_end|>", around=True) == ["▁hello", "<|im_end|>"]
    assert read_tokenizer(folder, ROWS).eos_token_ids == (3, len(WORDS))


def test_what_is_no_model_of_sentencepiece(tmp_path: Path) -> None:
    for content in (b"IQ== 0\nIg== 1\n", b"", b"\x0a\xff\xff", bytes(100)):
        save_folder(tmp_path, None)
        (tmp_path / "tokenizer.model").write_bytes(content)
        assert read_sentencepiece(tmp_path / "tokenizer.model") is None
        with pytest.raises(
            UnsupportedModelError, match=r"tokenizer\.model is no model of sentencepiece; add the"
        ) as caught:
            read_tokenizer(tmp_path, ROWS)
        assert str(caught.value).isprintable()
    save_model(tmp_path / "tokenizer.model", kind=3)
    with pytest.raises(UnsupportedModelError, match="its pieces are words or letters"):
        read_tokenizer(tmp_path, ROWS)


@pytest.mark.parametrize("kind", [BPE, UNIGRAM])
def test_the_space_before_a_text_where_legacy_is_false(tmp_path: Path, kind: int) -> None:
    """It is before the beginning alone, as by sentencepiece, and not behind special tokens (transformers#25073)."""
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": False}
    folder = save(tmp_path / "once", {"kind": kind}, tokenizer_config__json=config)
    for text, expected in (
        ("hello</s>lo", ["▁hello", "</s>", "lo"]),
        ("</s>hello", ["</s>", "h", "el", "lo"]),
        ("hello</s> hello", ["▁hello", "</s>", "▁hello"]),
        ("  hello<turn>lo", ["▁▁", "▁hello", "<turn>", "lo"]),
        ("▁lo", ["▁▁", "lo"]),
    ):
        assert names(folder, text) == expected
    assert in_artifact(folder).decode(in_artifact(folder).encode("  hello<turn>lo")) == "  hello<turn>lo"
    folder = save(tmp_path / "none", {"kind": kind}, tokenizer_config__json={**config, "add_prefix_space": False})
    assert names(folder, "hello</s>lo") == ["h", "el", "lo", "</s>", "lo"]
    folder = save(tmp_path / "extra", {"kind": kind, "extra": True}, tokenizer_config__json=config)
    assert names(folder, "  hello</s>  lo ") == ["▁hello", "</s>", "▁", "lo"]
    assert names(folder, "hello   lo") == ["▁hello", "▁", "lo"]


def test_pieces_of_equal_scores(tmp_path: Path) -> None:
    """The leftmost is joined first where an order of merges can say so; otherwise a line names a text."""
    letters = [(letter, -1.0, 1) for letter in "abc"]
    folder = save(tmp_path / "row", {"pieces": [*WORDS, ("bc", 0.0, 1), ("ab", 0.0, 1), *letters]})
    assert names(folder, "abc") == ["▁", "ab", "c"] and read_tokenizer(folder, ROWS).notes == ()
    circle = [(piece, 0.0, 1) for piece in ("bc", "ab", "ca")]
    (note,) = read_tokenizer(save(tmp_path / "circle", {"pieces": [*WORDS, *circle, *letters]}), ROWS).notes
    assert "tokens have equal scores, so that '" in note and ", by sentencepiece and llama.cpp into '" in note


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (field(2, field(24, 1)), "treat_whitespace_as_suffix is set"),
        (field(3, field(5, 0)), "escape_whitespaces is not set"),
        (field(5, field(2, b"table")), "denormalizer_spec has a table"),
    ],
)
def test_fields_that_are_not_read_are_refused(tmp_path: Path, more: bytes, said: str) -> None:
    folder = save(tmp_path)
    file = folder / "tokenizer.model"
    file.write_bytes(file.read_bytes() + more)
    with pytest.raises(UnsupportedModelError, match=rf"tokenizer\.model: {said}"):
        read_tokenizer(folder, ROWS)


@pytest.mark.slow("needs the package sentencepiece, which nothing else needs", but=("False-False",))
@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("prefix", [False, True])
def test_texts_are_cut_as_by_sentencepiece(tmp_path: Path, prefix: bool, extra: bool) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = save(tmp_path, {"prefix": prefix, "extra": extra})
    theirs, ours = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model")), in_artifact(folder)
    draw = Random(0)
    for _ in range(500):
        text = "".join(draw.choice(("hello", "hel", "lo", " ", "  ", "w", "é", "1", "\n")) for _ in range(6))
        assert ours.encode(text, False) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text)), text


def test_mistrals_tekken(tmp_path: Path) -> None:
    """transformers reads its newer files, which list their special tokens."""
    import base64

    tokens = [bytes([byte]) for byte in range(256)] + [b"he", b"ll", b"hell", b" hell"]
    vocabulary = [{"rank": n, "token_bytes": base64.b64encode(token).decode()} for n, token in enumerate(tokens)]
    special = [{"rank": n, "token_str": name, "is_control": True} for n, name in enumerate(("<unk>", "<s>", "</s>"))]
    config = {"pattern": r"\s?\p{L}+|\p{N}|\s+", "default_vocab_size": len(tokens) + 3, "version": "v7"}
    tekken = {"config": {**config, "default_num_special_tokens": 3}, "vocab": vocabulary, "special_tokens": special}
    folder = save_folder(tmp_path, None, config__json={"model_type": "mistral"}, tekken__json=tekken)
    ours = in_artifact(folder)
    assert ours.encode("hello</s>", False) == [3 + 258, 3 + ord("o"), 2]
    assert ours.decode(ours.encode("hello é")) == "hello é"
