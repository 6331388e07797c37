"""`picompile report`: the page it writes, and what it refuses before anything is read or written."""

import os
import sys
from pathlib import Path

import pytest

from helpers.support import Cli


def test_a_report_on_an_artifact(cli: Cli, tiny_artifact: Path, tmp_path: Path) -> None:
    page = tmp_path / "made" / "report.html"
    ended = cli("report", tiny_artifact, "-o", page)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == f"{page}: 1 section, {page.stat().st_size / 1e6:.2f} MB\n"
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert str(tiny_artifact) in text
    assert "feed-forward" in text
    assert [path.name for path in page.parent.iterdir()] == ["report.html"]

    again = cli("report", tiny_artifact, "-o", page)
    assert again.code == 2
    assert "--force" in again.err
    page.write_text("<!doctype html>old")
    assert cli("report", tiny_artifact, "-o", page, "--force").code == 0
    assert page.read_text(encoding="utf-8") == text


def refused(cli: Cli, *arguments: object, code: int = 2) -> str:
    """Return the message for arguments that are refused, which must be one line."""
    ended = cli("report", *arguments)
    assert (ended.code, ended.out) == (code, "")
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    return ended.err


def test_report_refuses_paths_that_are_no_source(
    cli: Cli, tiny_model: Path, tiny_artifact: Path, tmp_path: Path
) -> None:
    page = tmp_path / "made" / "report.html"
    assert "holds none of profile.json" in refused(cli, tiny_artifact, tiny_model, "-o", page)
    assert "no such folder" in refused(cli, tmp_path / "missing", "-o", page)
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "manifest.json").write_text("{}")
    assert "no artifact" in refused(cli, tmp_path / "artifact", "-o", page, code=4)
    assert "PATH" in refused(cli, "-o", page)
    assert "output" in refused(cli, tiny_artifact)
    assert not page.parent.exists()


def test_places_where_no_page_is_written(cli: Cli, tiny_artifact: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    assert "is no HTML page" in refused(cli, tiny_artifact, "-o", notes, "--force")
    assert notes.read_text() == "mine"
    assert "is a folder" in refused(cli, tiny_artifact, "-o", tmp_path, "--force")
    refused(cli, tiny_artifact, "-o", notes / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_pipes_and_links(cli: Cli, tiny_artifact: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refused(cli, tiny_artifact, "-o", tmp_path / "pipe", "--force")
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    assert "a link to nowhere" in refused(cli, tiny_artifact, "-o", tmp_path / "lost", "--force")
    (tmp_path / "old").write_text("<!doctype html>old")
    (tmp_path / "link").symlink_to("old")
    assert cli("report", tiny_artifact, "-o", tmp_path / "link", "--force").code == 0
    assert (tmp_path / "link").is_symlink()
    assert "feed-forward" in (tmp_path / "old").read_text(encoding="utf-8")


def test_names_as_long_as_they_can_be(cli: Cli, tiny_artifact: Path, tmp_path: Path) -> None:
    page = tmp_path / ("a" * 250 + ".html")
    assert cli("report", tiny_artifact, "-o", page).code == 0
    assert list(tmp_path.iterdir()) == [page]


def test_without_matplotlib(cli: Cli, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'picompile[report]'" in refused(cli, tiny_artifact, "-o", tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []
