"""Outputs appear whole or not at all, one writer at a time, and what dead writers left is removed."""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from picompile.errors import DoesNotFitError, UsageError
from picompile.output import OutputPath, place, reserve, writing_file
from picompile.output import leftovers as rename
from picompile.output.leftovers import UnsupportedRenameError
from picompile.output.lock import acquire

PARTIAL = f".out.{'0' * 16}.partial"
OLD = f".out.{'0' * 16}.old"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    with reserve(path, overwrite=True) as reserved, reserved.folder() as folder:
        yield folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def make_folder(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "file").write_text(text)
    return path


def fill(folder: Path, text: str = "new") -> None:
    (folder / "file").write_text(text)


def dies_holding(output: Path, *leftovers: str) -> None:
    """A writer in another process that ends without a word."""
    child = os.fork()
    if child == 0:
        acquire(output.absolute(), 0)
        for name in leftovers:
            make_folder(output.with_name(name), "left")
        os._exit(0)
    os.waitpid(child, 0)


def unsupported(*_: object) -> None:
    raise UnsupportedRenameError


@pytest.fixture(params=["exchange", "two renamings"])
def _renaming(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "two renamings":
        monkeypatch.setattr(place, "exchange", unsupported)
        monkeypatch.setattr(rename, "_renameat2", unsupported)


@pytest.mark.usefixtures("_renaming")
@pytest.mark.parametrize("there", ["nothing", "a folder", "a file", "a link"])
def test_a_folder_takes_the_place_of_what_is_there(there: str, tmp_path: Path) -> None:
    outputs, elsewhere = tmp_path / "outputs", make_folder(tmp_path / "elsewhere", "old")
    outputs.mkdir()
    if there == "a folder":
        make_folder(outputs / "out", "old")
    elif there == "a file":
        (outputs / "out").write_text("old")
    elif there == "a link":
        (outputs / "out").symlink_to(elsewhere)
    with replacing(outputs / "out") as folder:
        fill(folder)
    assert (outputs / "out" / "file").read_text() == "new"
    assert names(outputs) == {"out"}
    assert (elsewhere / "file").read_text() == "old"


@pytest.mark.usefixtures("_renaming")
def test_a_failed_write_changes_nothing(tmp_path: Path) -> None:
    make_folder(tmp_path / "out", "old")
    with pytest.raises(RuntimeError), replacing(tmp_path / "out") as folder:
        fill(folder)
        raise RuntimeError
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert names(tmp_path) == {"out"}


@pytest.mark.usefixtures("_renaming")
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_output_that_appears_meanwhile_is_overwritten_only_on_request(overwrite: bool, tmp_path: Path) -> None:
    def check() -> None:
        if (tmp_path / "out" / "kept").exists():
            raise UsageError("it is another's")

    with (
        pytest.raises(UsageError, match="it is another's" if overwrite else "it appeared while it was to be written"),
        reserve(tmp_path / "out", overwrite=overwrite, check=check) as reserved,
        reserved.folder() as folder,
    ):
        fill(folder)
        make_folder(tmp_path / "out", "old")
        if overwrite:
            (tmp_path / "out" / "kept").touch()
    with (
        pytest.raises(UsageError, match="it appeared while it was to be written"),
        writing_file(tmp_path / "file", overwrite=False) as file,
    ):
        file.write(b"new")
        (tmp_path / "file").write_text("old")
    assert (tmp_path / "file").read_text() == (tmp_path / "out" / "file").read_text() == "old"
    assert names(tmp_path) == {"out", "file"}


def test_an_output_moved_aside_comes_back_if_the_second_rename_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path / "out", "old")
    real = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if target.name == "out" and path.name.endswith(".partial"):
            raise OSError(errno.EIO, "failed")
        return real(path, target)

    monkeypatch.setattr(place, "exchange", unsupported)
    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(UsageError, match="cannot be written: failed"), replacing(tmp_path / "out") as folder:
        fill(folder)
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert names(tmp_path) == {"out"}


def test_a_reader_finds_the_one_or_the_other(tmp_path: Path) -> None:
    """The name is never gone: a folder that is open stays the same, and the name leads to one of the two."""
    make_folder(tmp_path / "out", "0")
    child = os.fork()
    if child == 0:
        for number in range(1, 100):
            with replacing(tmp_path / "out") as folder:
                fill(folder, str(number))
        os._exit(0)
    seen = 0
    while not os.waitpid(child, os.WNOHANG)[0]:
        assert (tmp_path / "out").is_dir()
        seen += 1
    assert seen and names(tmp_path) == {"out"}


def test_a_second_writer_is_told_at_once(tmp_path: Path) -> None:
    with reserve(tmp_path / "out", overwrite=True) as reserved:
        assert names(tmp_path) == {".out.picompile-lock"}
        began = time.monotonic()
        with (
            pytest.raises(UsageError, match=rf"is being written by another picompile \(process {os.getpid()}\)"),
            reserve(tmp_path / "out", overwrite=True, wait_s=0.0),
        ):
            pass
        assert time.monotonic() - began < 60
        with reserved.scratch() as scratch, reserve(tmp_path / "other", overwrite=True):
            assert scratch.is_dir(), "files of a living writer are left alone"
    assert names(tmp_path) == set()


@pytest.mark.parametrize("next_output", ["out", "other"])
def test_leftovers_of_a_dead_writer_are_removed(next_output: str, tmp_path: Path) -> None:
    make_folder(tmp_path / "out", "old")
    dies_holding(tmp_path / "out", PARTIAL, OLD)
    assert names(tmp_path) == {"out", PARTIAL, OLD, ".out.picompile-lock"}
    with reserve(tmp_path / next_output, overwrite=True):
        pass
    assert names(tmp_path) == {"out"}
    assert (tmp_path / "out" / "file").read_text() == "old"
    # What was moved aside comes back.
    dies_holding(tmp_path / "out", OLD)
    (tmp_path / "out").rename(tmp_path / "gone")
    with reserve(tmp_path / next_output, overwrite=True):
        assert (tmp_path / "out" / "file").read_text() == "left"
    assert names(tmp_path) == {"gone", "out"}


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    dies_holding(tmp_path / "out")
    zeros = "0" * 16
    others = {f".out.{zeros[1:]}.partial", f".out.{zeros}.partial.bak", f".out.{'g' * 16}.partial"}
    others |= {f"out.{zeros}.partial", f".outer.{zeros}.partial", ".other.ab12_xyz.partial"}
    for name in others:
        make_folder(tmp_path / name, "other")
    (tmp_path / ".x.picompile-lock").write_text("not what a lock holds")
    with reserve(tmp_path / "out", overwrite=True):
        pass
    assert names(tmp_path) == {*others, ".x.picompile-lock"}


def test_a_name_as_long_as_a_name_can_be(tmp_path: Path) -> None:
    output = tmp_path / ("é" * 127)
    dies_holding(output)
    with replacing(output) as folder:
        fill(folder)
    assert names(tmp_path) == {output.name}


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    make_folder(tmp_path / PARTIAL, "whose it is nobody knows")
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with replacing(tmp_path / "out") as folder:
        fill(folder)
    assert names(tmp_path) == {"out", PARTIAL}


def test_a_folder_in_one_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume in a container whose own files are read-only: what fills a folder step by step can."""

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    make_folder(tmp_path / "out", "old")
    monkeypatch.setattr(place, "acquire", read_only)
    with reserve(tmp_path / "out", overwrite=True):
        told = pytest.raises(UsageError, match="is being written by another picompile")
        with told, reserve(tmp_path / "out", overwrite=True):
            pass
    assert names(tmp_path) == {"out"}
    with pytest.raises(UsageError, match="Read-only file system"), reserve(tmp_path / "other", overwrite=True):
        pass


@pytest.mark.parametrize(
    ("number", "error", "text", "make"),
    [
        (errno.ENOSPC, DoesNotFitError, "no space left on device; .*out was not written", OutputPath.folder),
        (errno.EFBIG, DoesNotFitError, "file too large", OutputPath.file),
        (errno.EIO, UsageError, "out cannot be written: input/output error", OutputPath.file),
    ],
)
def test_a_disk_that_takes_nothing_is_named(
    number: int, error: type[Exception], text: str, make: Callable[[OutputPath], AbstractContextManager], tmp_path: Path
) -> None:
    with (
        pytest.raises(error, match=f"(?i){tmp_path}.*{text}"),
        reserve(tmp_path / "out", overwrite=True) as reserved,
        make(reserved),
    ):
        raise OSError(number, os.strerror(number))
    # Errors of another disk stay as they are.
    with pytest.raises(OSError, match="/elsewhere"), replacing(tmp_path / "out"):
        raise OSError(number, "full", "/elsewhere/file")
    assert names(tmp_path) == set()


def test_a_place_in_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory"), reserve(tmp_path / "a" / "b", overwrite=True):
        pass
    with pytest.raises(RuntimeError), reserve(tmp_path / "a" / "b", overwrite=True, parents=True):
        raise RuntimeError
    assert names(tmp_path) == set()
    with reserve(tmp_path / "a" / "b", overwrite=True, parents=True) as reserved, reserved.file() as file:
        file.write(b"x")
    assert (tmp_path / "a" / "b").read_bytes() == b"x"


def test_a_new_folder_has_the_mode_of_the_one_before(tmp_path: Path) -> None:
    """And may hold what cannot be synced."""
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "new"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o7777 == 0o750
    (tmp_path / "new").chmod(0o2700)
    with replacing(tmp_path / "new") as folder:
        (folder / "link").symlink_to("nowhere")
        os.mkfifo(folder / "pipe")
    assert (tmp_path / "new").stat().st_mode & 0o7777 == 0o2700
    assert (tmp_path / "new" / "link").is_symlink()


def test_a_folder_above_that_cannot_be_synced_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is in its place by then."""
    sync = rename._sync

    def refuse(path: Path) -> None:
        if path == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        sync(path)

    monkeypatch.setattr(rename, "_sync", refuse)
    with replacing(tmp_path / "new") as folder:
        fill(folder)
    assert (tmp_path / "new" / "file").exists()
