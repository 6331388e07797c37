"""`picompile report`: the page it writes, and what it refuses before anything is read or written."""

import os
import sys
from pathlib import Path

import pytest

from helpers.refusals import assert_refused
from helpers.support import Cli


def test_a_report_on_an_artifact(cli: Cli, tiny_artifact: Path, tmp_path: Path) -> None:
    page = tmp_path / "made" / "report.html"
    ended = cli("report", tiny_artifact, "-o", page)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == f"{page}: 1 section, {page.stat().st_size / 1e6:.2f} MB\n"
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert str(tiny_artifact) in text and "feed-forward" in text
    assert [path.name for path in page.parent.iterdir()] == ["report.html"]

    again = cli("report", tiny_artifact, "-o", page)
    assert again.code == 2
    assert "--overwrite" in again.err
    page.write_text("<!doctype html>old")
    assert cli("report", tiny_artifact, "-o", page, "--overwrite").code == 0
    assert page.read_text(encoding="utf-8") == text


def test_report_refuses_paths_that_are_no_source(
    cli: Cli, tiny_model: Path, tiny_artifact: Path, tmp_path: Path
) -> None:
    page = tmp_path / "made" / "report.html"
    assert_refused(cli("report", tiny_artifact, tiny_model, "-o", page), 2, "holds none of profile.json")
    assert_refused(cli("report", tmp_path / "missing", "-o", page), 2, "no such folder")
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "manifest.json").write_text("{}")
    assert_refused(cli("report", tmp_path / "artifact", "-o", page), 4, "no artifact")
    assert_refused(cli("report", "-o", page), 2, "PATH")
    assert_refused(cli("report", tiny_artifact), 2, "output")
    assert not page.parent.exists()


def test_places_where_no_page_is_written(cli: Cli, tiny_artifact: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    for place, says in (
        (notes, "is no HTML page"),
        (tmp_path, "is a folder"),
        (notes / "report.html", ""),
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path / "lost", "a link to nowhere"),
    ):
        assert_refused(cli("report", tiny_artifact, "-o", place, "--overwrite"), 2, says)
    assert notes.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "pipe", "lost"}
    (tmp_path / "link").symlink_to("old")
    (tmp_path / "old").write_text("<!doctype html>old")
    assert cli("report", tiny_artifact, "-o", tmp_path / "link", "--overwrite").code == 0
    assert (tmp_path / "link").is_symlink()
    assert "feed-forward" in (tmp_path / "old").read_text(encoding="utf-8")


def test_without_matplotlib(cli: Cli, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert_refused(cli("report", tiny_artifact, "-o", tmp_path / "report.html"), 2, "pip install 'matplotlib>=3.9'")
    assert list(tmp_path.iterdir()) == []
