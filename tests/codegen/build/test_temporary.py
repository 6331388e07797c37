"""Folders for temporary files: removed in the end, or by the next process."""

import os
import tempfile
from pathlib import Path

import pytest

from picompile_codegen.build.object_cache import temporary_folder
from picompile_codegen.errors import TemporaryFolderError


@pytest.fixture(autouse=True)
def _base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_temporary_folder_is_private_and_is_removed(tmp_path: Path) -> None:
    with temporary_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").touch()
    assert not list(tmp_path.iterdir())


def test_only_the_folders_of_dead_processes_are_removed(tmp_path: Path) -> None:
    (tmp_path / "picompile-work-mine").mkdir()
    child = os.fork()
    if child == 0:
        held = temporary_folder()
        held.__enter__()
        os._exit(0)
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 2
    with temporary_folder() as first, temporary_folder() as second:
        assert {path.name for path in tmp_path.iterdir()} == {"picompile-work-mine", first.name, second.name}


def test_no_temporary_folder_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    text = r"each is full or not writable.*/tmp.*TMPDIR"
    with pytest.raises(TemporaryFolderError, match=text) as error, temporary_folder():
        pass
    assert error.value.exit_code == 5
