"""Texts become windows of tokens; those that will not do are refused in one line."""

import importlib
import io
import random
import sys
from pathlib import Path

import pytest
import torch

from helpers.support import ROOT
from picompile.errors import UsageError
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.profile.prepare import own_tokens
from picompile.predictors.profile.text import CalibrationText, is_held_out, library_texts, read_calibration
from picompile.predictors.profile.windows import checkpoint_tokenizer, text_windows, window_size
from picompile_runtime import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    """A token for every byte, and 256 before each text."""
    return checkpoint_tokenizer(tiny_model, 300)


def letters(count: int) -> str:
    return "".join(random.choices("abcdefgh ", k=count - 1)) + "."


def test_files_and_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffnaïve".encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("ünder".encode())))
    texts = read_calibration([tmp_path / "a.txt", Path("-"), CalibrationText("given", "x")])
    assert [(text.source, text.text) for text in texts] == [
        (str(tmp_path / "a.txt"), "naïve"),
        ("standard input", "ünder"),
        ("given", "x"),
    ]


def test_files_that_are_no_text_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.bin"
    for data, message in (
        (b" \n\t ", "is empty"),
        (b"ab\xffcd", r"not UTF-8 text \(byte 2\)"),
        (b"abc\0d", "byte 3 is zero"),
        ("an ä".encode()[:-1], r"not UTF-8 text \(byte 3\)"),
    ):
        path.write_bytes(data)
        with pytest.raises(UsageError, match=f"^{path}: .*{message}"):
            read_calibration([path])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        with pytest.raises(UsageError, match=f"^standard input: .*{message}"):
            read_calibration([Path("-")])
    for paths, message in (
        ([tmp_path / "none"], "no such file"),
        ([tmp_path], "a folder"),
        (["-", "-"], "given twice"),
    ):
        with pytest.raises(UsageError, match=message):
            read_calibration([Path(each) for each in paths])
    monkeypatch.setattr("picompile.predictors.profile.text._MOST_BYTES", 7)
    path.write_text("äääää")
    assert read_calibration([path])[0].text == "äää"


def test_the_end_of_a_text_is_held_out(tokenizer: Tokenizer) -> None:
    text = letters(8000)
    options = ProfileOptions((CalibrationText("t", text),), tokens=4096, window=64)
    windows = text_windows(tokenizer, 64, options)
    ids = [256, *map(int, tokenizer.encode(text)[1:])]
    assert windows.calibration.flatten().tolist() == ids[:4096]
    # 5 % of all that is used.
    assert windows.held_out.shape == (3, 64)
    assert windows.held_out.flatten().tolist() == ids[4096 : 4096 + 192]
    assert windows.calibration.dtype == torch.int32


def test_several_texts_share_the_tokens(tokenizer: Tokenizer) -> None:
    texts = [CalibrationText(name, name[0] * count) for name, count in (("short", 299), ("long", 9000), ("mid", 5000))]
    windows = text_windows(tokenizer, 64, ProfileOptions(tuple(texts), tokens=3000, window=64))
    of = {token: int((windows.calibration == token).sum()) for token in windows.calibration.unique().tolist()}
    short, long, mid = (of[tokenizer.encode(letter)[1]] for letter in "slm")
    # The short one whole but for its end; the others half and half of the rest.
    assert 270 < short < 299 and abs(long - mid) < 64 and long > 1200
    for letter in "slm":
        assert (windows.held_out == tokenizer.encode(letter)[1]).any() or letter == "s"
    assert windows.sources == ("short", "long", "mid")


def test_texts_that_are_too_short_are_refused(tokenizer: Tokenizer) -> None:
    def windows(length: int, held_out: int = 0, window: int = 64) -> None:
        separate = (CalibrationText("h", letters(held_out)),) if held_out else ()
        text_windows(
            tokenizer, window, ProfileOptions((CalibrationText("t", letters(length)),), separate, window=window)
        )

    windows(1024 + 128 - 1)
    with pytest.raises(UsageError, match=r"^t: 1151 tokens are too few; 1024 to profile on and 128 held out"):
        windows(1024 + 128 - 2)
    windows(1023, held_out=127)
    with pytest.raises(UsageError, match=r"^t: 1023 tokens are too few; at least 1024"):
        windows(1022, held_out=500)
    with pytest.raises(UsageError, match=r"^h: 127 tokens are too few; at least 128"):
        windows(5000, held_out=126)
    with pytest.raises(UsageError, match="at least 2000"):
        windows(1999 - 1, held_out=5000, window=1000)


@pytest.mark.slow("reads the texts of the library again and again")
def test_the_library_holds_out_what_the_training_of_examples_holds_out(monkeypatch: pytest.MonkeyPatch) -> None:
    held_out, others = ({text.source for text in library_texts(kept, seed=1)} for kept in (True, False))
    assert held_out.isdisjoint(others)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    texts = importlib.import_module("relu_lm.texts")
    assert held_out == {*texts.read_library(True), *texts.read_documents(True)}
    assert 0.01 < len(held_out) / len(held_out | others) < 0.06
    assert any(name.startswith("topics/") for name in others)
    assert all(is_held_out(name) for name in held_out)
    first, second = ([text.source for text in library_texts(True, seed=seed)] for seed in (1, 2))
    assert first != second


def test_sizes_of_windows_and_texts(tokenizer: Tokenizer) -> None:
    assert [window_size(ProfileOptions(window=given), 300) for given in (None, 77)] == [300, 77]
    assert window_size(ProfileOptions(), 2048) == 512
    with pytest.raises(UsageError, match="301 tokens is more than the model's 300"):
        window_size(ProfileOptions(window=301), 300)
    for options in ({"window": 1}, {"tokens": 0}, {"samples": 0}, {"held_out_tokens": 0}):
        with pytest.raises(UsageError):
            ProfileOptions(**options)
    # A token of 8 letters, then bytes: more characters for a token than are first read for it.
    text = CalibrationText("t", " word258" * 4000)
    assert text_windows(tokenizer, 64, ProfileOptions((text,), (text,), tokens=3000)).calibration.numel() == 46 * 64


def test_only_small_models_write_text() -> None:
    assert own_tokens(3_500_000, 65_536) == 3276
    assert 256 <= own_tokens(100_000_000, 65_536) < 3276
    assert own_tokens(7_000_000_000, 65_536) == 0
    assert own_tokens(3_500_000, 1024) == 0
