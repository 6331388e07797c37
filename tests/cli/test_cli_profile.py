"""`picompile profile` on the command line."""

import json
import random
from pathlib import Path

import pytest

from helpers.refusals import assert_refused
from helpers.support import Cli


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(random.choices("abcdef \n", k=2500)) + ".")
    return path


def test_profile(cli: Cli, tiny_model: Path, text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "profile"
    words = ("profile", tiny_model, "-o", folder, "--calibration", "-", "--window", "64", "--samples", "10")
    ended = cli(*words, stdin=text.read_text())
    assert (ended.code, ended.err) == (0, "")
    first, source, held_out, *layers = ended.out.splitlines()
    assert first == f"{folder}: tiny-model, 2368 tokens in windows of 64"
    assert source.endswith("standard input") and held_out.endswith("128 tokens: the end of standard input")
    assert [line.split()[:2] for line in layers] == [["layer", "0"], ["layer", "1"]]
    again = cli(*words, "--json", stdin=text.read_text())
    assert (again.code, again.err) == (0, f"{folder}: is complete already\n")
    facts = json.loads(again.out)
    assert facts == json.loads((folder / "profile.json").read_text())
    assert facts["complete"] is True and facts["samples"] == 10 and facts["schema"] == 1
    assert {"layer", "neurons", "threshold", "firing_share", "never_fired"} <= set(facts["layers"][0])
    for option in (("--seed", "3"), ("--by", "contribution")):
        other = cli(*words, *option, stdin=text.read_text())
        assert_refused(other, 2, f"{folder}: holds a profile of other inputs; give --overwrite to overwrite it")


def test_bad_input(cli: Cli, tiny_model: Path, text: Path, tmp_path: Path) -> None:
    binary, empty, short = tmp_path / "x.bin", tmp_path / "empty.txt", tmp_path / "short.txt"
    binary.write_bytes(b"abc\xff\xfe")
    empty.touch()
    short.write_text("too short")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").touch()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    output = tmp_path / "new" / "profile"
    for words, message in (
        ((tiny_model, "--calibration", binary), f"{binary}: not UTF-8 text (byte 3)"),
        ((tiny_model, "--calibration", text, "--calibration", empty), f"{empty}: is empty"),
        ((tiny_model, "--calibration", short), f"{short}: 10 tokens are too few"),
        ((tiny_model, "--calibration", tmp_path / "no"), f"{tmp_path / 'no'}: no such file"),
        ((tiny_model, "--calibration", "-"), "standard input: is empty"),
        ((tiny_model, "--calibration", "-", "--held-out", "-"), "standard input (-) is given twice"),
        ((tiny_model, "--calibration", text, "--window", "257"), "more than the model's 256 positions"),
        ((tiny_model, "--calibration", text, "--accuracy-bound", "much"), "--accuracy-bound: 'much' is no share"),
        ((tmp_path / "no",), "no such file or folder"),
        ((tiny_model, "--calibration", text, "--by", "energy"), "'energy' is not one of 'magnitude', 'contribution'"),
        ((tiny_model, "--calibration", text, "-o", taken), "has no profile.json"),
        ((tiny_model, "--calibration", text, "-o", link), "a link to nowhere"),
    ):
        assert_refused(cli("profile", *(words if "-o" in words else (*words, "-o", output))), 2, message)
        assert not output.parent.exists()
    assert list(taken.iterdir()) == [taken / "mine"]
    assert not (tmp_path / "nowhere").exists()
