"""Objects are compiled once: the same bytes from the cache, another for all else, and no failure over a cache."""

import os
from pathlib import Path

import pytest
import tvm

from picompile_codegen import kernels, object_cache
from picompile_codegen.build import build_host_library
from picompile_codegen.errors import BuildError
from picompile_codegen.isa import ISAS, targeting
from picompile_codegen.kernels import Kernel
from picompile_codegen.kernels.kernel import KernelFunction
from picompile_codegen.kernels.tensor import loop
from picompile_codegen.object_cache import VARIABLE


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


def test_the_second_time_is_the_first(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = [kernels.add(dim=64, rows=1), add_number(1.0)]
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
    assert [path.suffix for path in cache.iterdir()] == [".o"] * 4


def test_a_kernel_of_the_same_name_is_another(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("compiled")

    build_host_library([add_number(1.0)], tmp_path / "first.so")
    monkeypatch.setattr(tvm, "compile", fail)
    for kernel in (add_number(2.0), kernels.add(dim=64, rows=1)):
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


def test_what_was_not_used_for_long_goes_first(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(name: str, time: int) -> None:
        object_cache.cached_object(name, tmp_path / "o", lambda path: path.write_bytes(bytes(400)) and None)
        os.utime(cache / f"{name}.o", (time, time))

    monkeypatch.setattr(object_cache, "_MOST_BYTES", 1000)
    put("a", 1)
    put("b", 2)
    object_cache.cached_object("a", tmp_path / "o", lambda _: pytest.fail("it is there"))
    put("c", 3)
    assert {path.name for path in cache.iterdir()} == {"a.o", "c.o"}


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert object_cache.cache_folder() == Path("/somewhere/picompile/objects")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert object_cache.cache_folder() == Path("/home/someone/.cache/picompile/objects")
