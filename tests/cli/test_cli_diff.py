"""`picompile diff`: two dumps, two folders of them, the page, and what it refuses."""

import json
import re
import sys
from pathlib import Path

import pytest

from helpers.refusals import assert_refused
from helpers.support import Cli
from picompile.cli import main
from picompile.testing import LLAMA, build
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Dump, Pipeline


@pytest.fixture(scope="module")
def ir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dumps as `compile --dump-ir` writes them, of a graph of two layers; one of them is partitioned."""
    folder = tmp_path_factory.mktemp("ir")
    Pipeline((InsertPredictors(), Partition({1: (3, 4)}), Quantize("q8")), Dump(folder))(build(LLAMA))
    return folder


@pytest.fixture(scope="module")
def other_ir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return dumps of a pipeline that partitions nothing, quantizes to q4, and has one more pass."""
    folder = tmp_path_factory.mktemp("other")
    passes = (InsertPredictors(), InsertPredictors(), Partition({}), Quantize("q4"))
    Pipeline(passes, Dump(folder))(build(LLAMA))
    return folder


def test_two_dumps(cli: Cli, ir: Path) -> None:
    ended = cli("diff", ir / "000_input.txt", ir / "001_insert-predictors.txt")
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert re.fullmatch(r"000_input.txt +stage canonical, \d+ nodes, \d+ of them weights", lines[0])
    assert re.fullmatch(r"2 removed, 4 added, 2 changed, \d+ the same", lines[2])
    assert [line[:4].strip() for line in lines[5:9]] == ["-", "+", "+", "~"]
    assert re.fullmatch(r"  - ffn +picompile\.ffn float32\[\w+, 24\]  became predict, sparse_ffn", lines[5])
    assert lines[6].endswith("threshold=0.0)  from insert-predictors(ffn)")
    assert lines[8].endswith("other: ffn → sparse_ffn")
    assert lines[9:] == ["layer 1: as layer 0"]
    assert "\x1b" not in ended.out
    ended = cli("diff", ir / "000_input.txt", ir / "000_input.txt")
    assert (ended.code, ended.out.splitlines()[2:]) == (0, ["no difference"])


def test_colour_is_for_terminals(ir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["diff", str(ir / "000_input.txt"), str(ir / "001_insert-predictors.txt")]) == 0
    out = capsys.readouterr().out
    assert "\x1b[31m  - ffn" in out and "\x1b[32m  + predict" in out
    # Nothing is wrapped: each change is one line.
    assert len(out.splitlines()) == 10


def test_json_of_two_dumps(cli: Cli, ir: Path) -> None:
    found = json.loads(cli("diff", ir / "001_insert-predictors.txt", ir / "002_partition.txt", "--json").out)
    assert found["before"]["file"] == "001_insert-predictors.txt"
    assert (found["before"]["stage"], found["after"]["stage"]) == ("predicted", "partitioned")
    assert found["after"]["nodes"] == found["same"] + len(found["added"]) + len(found["changed"])
    assert found["before"]["nodes"] == found["same"] + len(found["removed"]) + len(found["changed"])
    added = {row["name"]: row for row in found["added"]}
    row = added["layer_1_hot_neurons"]
    assert (row["layer"], row["shape"]) == (1, "int64[2]")
    assert row["from"] == {"pass": "partition", "sources": ["sparse_ffn_1"]}
    (removed,) = [row for row in found["removed"] if row["name"] == "predict_1"]
    assert set(removed["became"]) == {row["name"] for row in found["added"] if "picompile.predict" in row["expression"]}
    (change,) = found["changed"]
    assert change["changes"]["other"][0] == "sparse_ffn_1"
    assert found["alike"] == [[1]]


def test_two_folders(cli: Cli, ir: Path, other_ir: Path, tmp_path: Path) -> None:
    ended = cli("diff", ir, other_ir)
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.split("\n\n")[0].splitlines()
    assert [line.partition("  ")[0] for line in lines] == [
        "000_input.txt",
        "001_insert-predictors.txt",
        "002_partition.txt → 003_partition.txt",
        "003_quantize.txt → 004_quantize.txt",
        "002_insert-predictors.txt",
    ]
    assert [line.endswith("no difference") for line in lines] == [True, True, False, False, False]
    assert lines[-1].endswith("only in B") and "format: 'q8' → 'q4'" in ended.out
    # Pairs that do not differ are not on the page.
    assert cli("diff", ir, other_ir, "--html", tmp_path / "page.html").code == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert re.findall(r"<h1><span>(.*?)</span>", text) == ["002_partition.txt", "003_quantize.txt"]
    found = json.loads(cli("diff", ir, other_ir, "--json").out)
    assert [row["before"]["file"] for row in found["compared"]] == sorted(path.name for path in ir.iterdir())
    assert found["compared"][0]["added"] == []
    assert (found["only_before"], found["only_after"]) == ([], ["002_insert-predictors.txt"])


def test_a_page(cli: Cli, ir: Path, tmp_path: Path) -> None:
    html = tmp_path / "made" / "page.html"
    ended = cli("diff", ir / "000_input.txt", ir / "001_insert-predictors.txt", "--html", html)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines()[3:] == [f"{html}: both graphs"]
    text = html.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and 'data-node="sparse_ffn"' in text
    same = ("diff", ir / "000_input.txt", ir / "000_input.txt", "--html", html, "--json")
    assert_refused(cli(*same), 2, "--overwrite")
    assert html.read_text(encoding="utf-8") == text
    ended = cli(*same, "--overwrite")
    assert ended.code == 0 and json.loads(ended.out)["added"] == []
    assert html.read_text(encoding="utf-8") != text


def test_what_cannot_be_compared(cli: Cli, ir: Path, tmp_path: Path) -> None:
    dump, nothing = ir / "000_input.txt", tmp_path / "no-such.txt"
    (tmp_path / "empty").mkdir()
    cut, binary, notes = (tmp_path / name for name in ("cut.txt", "binary.txt", "notes.txt"))
    cut.write_text("".join(dump.read_text().splitlines(keepends=True)[:9]))
    binary.write_bytes(b"\xff\xfe\x00")
    notes.write_text("mine")
    for words, says in (
        ((nothing, dump), "no-such.txt: no such file or folder"),
        ((dump, nothing, "--html", tmp_path / "made" / "page.html"), "no-such.txt: no such file or folder"),
        ((ir, dump), "is a folder and"),
        ((dump, ir), "is a folder and"),
        ((ir, tmp_path / "empty"), "empty: holds no dumps"),
        ((dump, __file__), "not a dump"),
        ((cut, dump), "has 8"),
        ((dump, binary), "not UTF-8"),
        ((dump,), "B"),
        ((dump, dump, "--html", notes, "--overwrite"), "is no HTML page"),
        ((dump, dump, "--html", tmp_path, "--overwrite"), "is a folder"),
        ((dump, dump, "--html", notes / "page.html"), "page.html"),
    ):
        assert_refused(cli("diff", *words), 2, says)
    assert notes.read_text() == "mine" and not (tmp_path / "made").exists()
