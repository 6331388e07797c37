"""Objects are compiled once: the same bytes from the cache, another for all else, and no failure over a cache."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import tvm

from picompile_codegen import cpu
from picompile_codegen.build import object_cache
from picompile_codegen.build.host_library import build_host_library
from picompile_codegen.build.isa import ISAS, targeting
from picompile_codegen.build.object_cache import VARIABLE, object_key
from picompile_codegen.cpu import Kernel
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.tensor import loop
from picompile_codegen.errors import BuildError
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
    monkeypatch.setattr(tvm, "compile", fail)
    for kernel in (add_number(2.0), cpu.write_kernel(AddSpec(dim=64, rows=1))):
        with pytest.raises(BuildError, match=r"cannot compile the kernel .*: compiled"):
            build_host_library([kernel], tmp_path / "second.so")


def test_another_instruction_set_is_another(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("x86-64-v3", "x86-64-v4"):
        with targeting(ISAS[name]):
            build_host_library([add_number(1.0)], tmp_path / f"{name}.so", ISAS[name])
    assert len(list(cache.iterdir())) == 2 + 2


@pytest.mark.parametrize("what", ["a file", "read-only"])
def test_a_folder_that_cannot_be_used(cache: Path, tmp_path: Path, what: str) -> None:
    if what == "a file":
        cache.write_text("no folder")
    elif os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    else:
        cache.mkdir(mode=0o500)
    build_host_library([add_number(1.0)], tmp_path / "host.so")
    assert (tmp_path / "host.so").exists()


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


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _of_an_earlier_version(path: Path) -> None:
    path.write_bytes(path.read_bytes()[len(object_cache._MARK) + 32 :])


@pytest.mark.parametrize("damage", [_empty, _torn, _flipped, _of_an_earlier_version])
def test_a_damaged_entry_is_made_again(cache: Path, damage: Callable[[Path], None]) -> None:
    key, content = object_key("some"), os.urandom(1000)
    object_cache.cached_object(key, lambda: content)
    damage(cache / f"{key}.object")
    assert object_cache.cached_object(key, lambda: content) == content
    assert object_cache.cached_object(key, lambda: pytest.fail("it is there")) == content


def test_an_entry_of_another_key_is_made_again(cache: Path) -> None:
    first, second = object_key("first"), object_key("second")
    object_cache.cached_object(first, lambda: b"first")
    object_cache.cached_object(second, lambda: b"second")
    (cache / f"{first}.object").replace(cache / "kept")
    (cache / f"{second}.object").replace(cache / f"{first}.object")
    assert object_cache.cached_object(first, lambda: b"made again") == b"made again"


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


def test_a_name_that_is_missing_is_an_error_when_it_is_linked(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "read.c"
    source.write_text("int nowhere(void); int pi_nowhere(void) { return nowhere(); }")
    monkeypatch.setattr("picompile_codegen.build.host_library._SOURCES", (source,))
    with pytest.raises(BuildError, match=r"undefined reference to .nowhere"):
        build_host_library([], tmp_path / "host.so")


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert object_cache.cache_folder() == Path("/somewhere/picompile/objects")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert object_cache.cache_folder() == Path("/home/someone/.cache/picompile/objects")
