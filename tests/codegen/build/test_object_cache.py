"""Objects are compiled once: the same bytes from the cache, another for all else, and no failure over a cache."""

import fcntl
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tvm

from picompile_codegen import cpu
from picompile_codegen.build import object_cache
from picompile_codegen.build.host_library import build_host_library
from picompile_codegen.build.isa import ISAS, targeting
from picompile_codegen.build.object_cache import VARIABLE, object_key, temporary_folder
from picompile_codegen.cpu.kernel import Kernel, KernelFunction
from picompile_codegen.cpu.tensor import loop
from picompile_codegen.errors import BuildError, TemporaryFolderError
from picompile_codegen.specs import AddSpec


def add_number(number: float) -> Kernel:
    """y += number: a kernel whose name does not say all."""
    function = KernelFunction("add_number")
    with function:
        y = function.floats("y", 1, 64)
        with loop(0, 64) as i:
            y[0, i] = y[0, i] + number
    return function.kernel()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


def test_a_cached_build_gives_the_same_library(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = [cpu.write_kernel(AddSpec(dim=64, rows=1)), add_number(1.0)]
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "off")
        build_host_library(some, tmp_path / "without.so")
    assert not cache.exists()
    build_host_library(some, tmp_path / "first.so")
    monkeypatch.setattr(tvm, "compile", None)
    build_host_library(some[:1], tmp_path / "one.so")
    build_host_library(some, tmp_path / "second.so")
    first = (tmp_path / "first.so").read_bytes()
    assert (tmp_path / "second.so").read_bytes() == first == (tmp_path / "without.so").read_bytes()
    assert (tmp_path / "one.so").read_bytes() != first
    # And what a library has beside the kernels, in two.
    assert [path.suffix for path in cache.iterdir()] == [".object"] * 4


def test_a_kernel_of_the_same_name_is_another(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("compiled")

    build_host_library([add_number(1.0)], tmp_path / "first.so")
    known = len(list(cache.iterdir()))
    with targeting(ISAS["x86-64-v4"]):
        build_host_library([add_number(1.0)], tmp_path / "other.so", ISAS["x86-64-v4"])
    assert len(list(cache.iterdir())) == known + 1, "for another instruction set as well"
    monkeypatch.setattr(tvm, "compile", fail)
    for kernel in (add_number(2.0), cpu.write_kernel(AddSpec(dim=64, rows=1))):
        with pytest.raises(BuildError, match=r"cannot compile the kernel .*: compiled"):
            build_host_library([kernel], tmp_path / "second.so")


def test_a_folder_that_cannot_be_used(cache: Path, tmp_path: Path) -> None:
    cache.write_text("no folder")
    build_host_library([add_number(1.0)], tmp_path / "host.so")
    assert (tmp_path / "host.so").exists()
    if os.geteuid():  # root may write everywhere
        cache.unlink()
        cache.mkdir(mode=0o500)
        build_host_library([add_number(1.0)], tmp_path / "again.so")
        assert (tmp_path / "again.so").exists()


def test_the_entry_unused_for_longest_is_deleted_first(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(key: str, time: int) -> None:
        object_cache.cached_object(key, lambda: bytes(400))
        os.utime(cache / f"{key}.object", (time, time))

    first, second, third = (object_key(name) for name in "abc")
    monkeypatch.setattr(object_cache, "_MOST_BYTES", 1000)
    cache.mkdir()
    # The folder is one that the user named.
    (cache / "own.o").write_bytes(bytes(4000))
    put(first, 1)
    put(second, 2)
    object_cache.cached_object(first, lambda: pytest.fail("it is there"))
    put(third, 3)
    assert {path.name for path in cache.iterdir()} == {f"{first}.object", f"{third}.object", "own.o"}


def test_a_damaged_entry_is_made_again(cache: Path) -> None:
    key, other, content = object_key("some"), object_key("other"), os.urandom(1000)
    for each in (key, other):
        object_cache.cached_object(each, lambda: content)
    path = cache / f"{key}.object"
    good = path.read_bytes()
    damaged = [b"", good[:-100], good[:500] + bytes([good[500] ^ 1]) + good[501:]]
    damaged += [good[len(object_cache._MARK) + 32 :], (cache / f"{other}.object").read_bytes()]
    for number, damage in enumerate(damaged):
        path.write_bytes(damage)
        assert object_cache.cached_object(key, lambda number=number: bytes([number])) == bytes([number])
        assert object_cache.cached_object(key, lambda: pytest.fail("it is there")) == bytes([number])


def test_files_that_a_dead_process_left_are_removed(cache: Path) -> None:
    cache.mkdir()
    stale, old, alive = (f"{object_key('a')}.{'0' * 16}", "tmpab12_xyz", f"{object_key('b')}.{'1' * 16}")
    for name in (stale, old, alive, "mine"):
        (cache / f"{name}.unfinished").write_bytes(b"half")
    with (cache / f"{alive}.unfinished").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        object_cache.cached_object(object_key("c"), lambda: b"c")
    names = {path.name for path in cache.iterdir()}
    assert names == {f"{object_key('c')}.object", f"{alive}.unfinished", "mine.unfinished"}


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert object_cache.cache_folder() == Path("/somewhere/picompile/objects")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert object_cache.cache_folder() == Path("/home/someone/.cache/picompile/objects")


# ---- temporary folders ----


def test_a_temporary_folder_is_private_and_is_removed(temporary: Path) -> None:
    with temporary_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").touch()
    assert not list(temporary.iterdir())


def test_only_the_folders_of_dead_processes_are_removed(temporary: Path) -> None:
    (temporary / "picompile-work-mine").mkdir()
    child = os.fork()
    if child == 0:
        held = temporary_folder()
        held.__enter__()
        os._exit(0)
    os.waitpid(child, 0)
    assert len(list(temporary.iterdir())) == 2
    with temporary_folder() as first, temporary_folder() as second:
        assert {path.name for path in temporary.iterdir()} == {"picompile-work-mine", first.name, second.name}


def test_no_temporary_folder_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    text = r"each is full or not writable.*/tmp.*TMPDIR"
    with pytest.raises(TemporaryFolderError, match=text) as error, temporary_folder():
        pass
    assert error.value.exit_code == 5


def test_a_folder_that_is_swept_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may remove it between its making and its lock; then there is another one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    opened, swept = os.open, []

    def open_late(path: Any, *flags: Any, **more: Any) -> int:
        if not swept and str(path).startswith(f"{tmp_path}/picompile-work-"):
            swept.append(Path(path))
            Path(path).rmdir()
        return opened(path, *flags, **more)

    monkeypatch.setattr(os, "open", open_late)
    with object_cache.temporary_folder() as folder:
        assert folder.is_dir() and folder != swept[0]
    assert list(tmp_path.iterdir()) == []
