"""`picompile diff`: two dumps, two folders of them, the page, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from helpers.support import Cli
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
    assert re.fullmatch(r"001_insert-predictors.txt +stage predicted, \d+ nodes, \d+ of them weights", lines[1])
    assert re.fullmatch(r"2 removed, 4 added, 2 changed, \d+ the same", lines[2])
    assert lines[3:5] == ["", "layer 0"]
    assert [line.split()[:2] for line in lines[5:9]] == [
        ["-", "ffn"],
        ["+", "predict"],
        ["+", "sparse_ffn"],
        ["~", lines[8].split()[1]],
    ]
    assert lines[8].endswith("other: ffn → sparse_ffn")
    assert lines[9:] == ["layer 1: as layer 0"]
    assert "\x1b" not in ended.out


def test_the_same_dump_twice(cli: Cli, ir: Path) -> None:
    ended = cli("diff", ir / "000_input.txt", ir / "000_input.txt")
    assert ended.code == 0
    assert ended.out.splitlines()[2:] == ["no difference"]


def test_colour_is_for_terminals(
    cli: Cli, ir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    from picompile.cli import main

    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["diff", str(ir / "000_input.txt"), str(ir / "001_insert-predictors.txt")]) == 0
    out = capsys.readouterr().out
    assert "\x1b[31m  - ffn" in out
    assert "\x1b[32m  + predict" in out
    # Nothing is wrapped: each change is one line.
    assert len(out.splitlines()) == 10


def test_json_of_two_dumps(cli: Cli, ir: Path) -> None:
    found = json.loads(cli("diff", ir / "001_insert-predictors.txt", ir / "002_partition.txt", "--json").out)
    assert found["before"]["file"] == "001_insert-predictors.txt"
    assert (found["before"]["stage"], found["after"]["stage"]) == ("predicted", "partitioned")
    assert found["after"]["nodes"] == found["same"] + len(found["added"]) + len(found["changed"])
    assert found["before"]["nodes"] == found["same"] + len(found["removed"]) + len(found["changed"])
    assert found["after"]["weights"] - found["before"]["weights"] == 2
    added = {row["name"]: row for row in found["added"]}
    assert added["layer_1_hot_neurons"] == {
        "name": "layer_1_hot_neurons",
        "layer": 1,
        "shape": "int64[2]",
        "expression": "weight layer_1_hot_neurons",
        "from": {"pass": "partition", "sources": ["sparse_ffn_1"]},
    }
    (removed,) = [row for row in found["removed"] if row["name"] == "predict_1"]
    assert set(removed["became"]) == {row["name"] for row in found["added"] if "picompile.predict" in row["expression"]}
    (change,) = found["changed"]
    assert change["changes"]["other"][0] == "sparse_ffn_1"
    assert found["alike"] == [[1]]


def test_two_folders(cli: Cli, ir: Path, other_ir: Path) -> None:
    ended = cli("diff", ir, other_ir)
    assert (ended.code, ended.err) == (0, "")
    summary, *details = ended.out.split("\n\n")
    lines = summary.splitlines()
    assert [line.partition("  ")[0] for line in lines] == [
        "000_input.txt",
        "001_insert-predictors.txt",
        "002_partition.txt → 003_partition.txt",
        "003_quantize.txt → 004_quantize.txt",
        "002_insert-predictors.txt",
    ]
    assert [line.endswith("no difference") for line in lines] == [True, True, False, False, False]
    assert lines[-1].endswith("only in B")
    assert [detail.partition(":")[0] for detail in details] == [
        "002_partition.txt → 003_partition.txt",
        "003_quantize.txt → 004_quantize.txt",
    ]
    assert "format: 'q8' → 'q4'" in details[1]


def test_json_of_two_folders(cli: Cli, ir: Path, other_ir: Path) -> None:
    found = json.loads(cli("diff", ir, other_ir, "--json").out)
    assert [row["before"]["file"] for row in found["compared"]] == sorted(path.name for path in ir.iterdir())
    assert found["compared"][0]["added"] == []
    assert (found["only_before"], found["only_after"]) == ([], ["002_insert-predictors.txt"])


def test_many_dumps_are_in_order(cli: Cli, ir: Path, tmp_path: Path) -> None:
    text = (ir / "000_input.txt").read_text()
    for number in (2, 10, 1000, 0):
        (tmp_path / f"{number:03d}_same.txt").write_text(text)
    (tmp_path / "notes.txt").write_text("not a dump, and not named as one")
    lines = cli("diff", tmp_path, tmp_path).out.splitlines()
    assert [line.split()[0] for line in lines] == ["000_same.txt", "002_same.txt", "010_same.txt", "1000_same.txt"]


def test_a_page(cli: Cli, ir: Path, tmp_path: Path) -> None:
    html = tmp_path / "made" / "page.html"
    ended = cli("diff", ir / "000_input.txt", ir / "001_insert-predictors.txt", "--html", html)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines()[2].startswith("2 removed, 4 added")
    assert ended.out.splitlines()[3:] == [f"{html}: the picture"]
    text = html.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert 'data-node="sparse_ffn"' in text

    ended = cli("diff", ir / "000_input.txt", ir / "000_input.txt", "--html", html)
    assert (ended.code, ended.out) == (2, "")
    assert "--force" in ended.err
    assert html.read_text(encoding="utf-8") == text

    ended = cli("diff", ir / "000_input.txt", ir / "000_input.txt", "--html", html, "--force", "--json")
    assert ended.code == 0
    assert json.loads(ended.out)["added"] == []
    assert html.read_text(encoding="utf-8") != text


def test_a_page_of_two_folders(cli: Cli, ir: Path, other_ir: Path, tmp_path: Path) -> None:
    assert cli("diff", ir, other_ir, "--html", tmp_path / "page.html").code == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    # Pairs that do not differ are left out.
    assert re.findall(r"<h1><span>(.*?)</span>", text) == ["002_partition.txt", "003_quantize.txt"]
    assert cli("diff", ir, ir, "--html", tmp_path / "none.html").code == 0
    assert "No dump differs" in (tmp_path / "none.html").read_text(encoding="utf-8")


def refused(cli: Cli, *arguments: object) -> str:
    """Return the message for arguments that are refused, which must be one line."""
    ended = cli("diff", *arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    return ended.err


def test_what_cannot_be_compared(cli: Cli, ir: Path, tmp_path: Path) -> None:
    dump = ir / "000_input.txt"
    (tmp_path / "empty").mkdir()
    cut = tmp_path / "cut.txt"
    cut.write_text("".join(dump.read_text().splitlines(keepends=True)[:9]))
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "no-such.txt: no such file or folder" in refused(cli, tmp_path / "no-such.txt", dump)
    assert "no-such.txt: no such file or folder" in refused(cli, dump, tmp_path / "no-such.txt")
    assert "is a folder and" in refused(cli, ir, dump)
    assert "is a folder and" in refused(cli, dump, ir)
    assert "empty: holds no dumps" in refused(cli, ir, tmp_path / "empty")
    assert "not a dump" in refused(cli, dump, __file__)
    assert "has 8" in refused(cli, cut, dump)
    assert "not UTF-8" in refused(cli, dump, binary)
    assert "B" in refused(cli, dump)


def test_places_where_no_page_is_written(cli: Cli, ir: Path, tmp_path: Path) -> None:
    dumps = ir / "000_input.txt", ir / "001_insert-predictors.txt"
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    assert "is no HTML page" in refused(cli, *dumps, "--html", notes, "--force")
    assert notes.read_text() == "mine"
    assert "is a folder" in refused(cli, *dumps, "--html", tmp_path, "--force")
    refused(cli, dumps[0], tmp_path / "no-such.txt", "--html", tmp_path / "made" / "page.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]
    refused(cli, *dumps, "--html", notes / "page.html")
