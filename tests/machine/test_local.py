"""This machine as a target: measured once, kept in a file, and measured again when that is of no use."""

import ctypes
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from helpers.damage import places, replaced, without
from picompile.machine import gpu, host
from picompile.machine import measured as local
from picompile.machine.gpu import GpuName, GpuSpeed
from picompile.machine.host import Host, cpu_name, host_memory, measure_host
from picompile.machine.kept import keep
from picompile.machine.measured import LocalMachine, cache_file, cached_local, find_target, measure_local
from picompile.machine.targets import LAUNCH_READS_S, TARGETS
from picompile_runtime.devices.cuda.driver import CudaError

GPU = GpuName("GPU of nobody", "12.4", 89, 9_000_000_001)
SPEED = GpuSpeed(7_000_000_001, 9.1e11, 2.4e10, 2.6e10, 1.7e-5, 1.1e-6)


class Counted:
    """Stands for both measurements, and counts how often there was one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpu: GpuName | None = GPU) -> None:
        self.times, self.gpu, self.cpu, self.memory_bytes = 0, gpu, "cpu of nobody", 10**10
        self.gpu_fails = False
        monkeypatch.setattr(local, "find_gpu", self._find)
        monkeypatch.setattr(local, "measure_gpu", self._gpu)
        monkeypatch.setattr(local, "measure_host", self._host)
        monkeypatch.setattr(local, "cpu_name", lambda: self.cpu)
        monkeypatch.setattr(local, "host_memory", lambda: (self.memory_bytes, 1))

    def _find(self) -> GpuName:
        if self.gpu is None:
            raise CudaError("no driver today")
        return self.gpu

    def _gpu(self) -> GpuSpeed:
        if self.gpu_fails:
            raise CudaError("cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY")
        return SPEED

    def _host(self, threads: int) -> Host:
        self.times += 1
        return Host(self.memory_bytes, 1e10 + self.times, 0.6)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def test_a_machine_is_measured_once(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for as many threads each, and where it is to be measured anew."""
    assert cached_local() is None
    first = measure_local()
    assert measure_local() == cached_local() == first
    assert counted.times == 1
    assert abs(time.time() - first.measured_at_s) < 60
    assert measure_local(anew=True).host.bytes_per_s == 1e10 + 2
    assert measure_local().host.bytes_per_s == 1e10 + 2
    for threads in (3, 3, 4):
        monkeypatch.setenv("PICOMPILE_THREADS", str(threads))
        assert measure_local().machine.threads == threads
    assert counted.times == 4


@pytest.mark.parametrize(
    "change",
    [
        *({"cpu": "another"}, {"memory_bytes": 10**10 + 1}, {"gpu": None}, {"gpu": replace(GPU, name="another")}),
        *({"gpu": replace(GPU, driver="13.0")}, {"gpu": replace(GPU, total_bytes=1)}),
    ],
)
def test_another_machine_is_measured_again(counted: Counted, change: dict[str, object]) -> None:
    measure_local()
    vars(counted).update(change)
    assert cached_local() is None
    measure_local()
    assert counted.times == 2


def test_a_gpu_that_could_not_be_measured_is_tried_again(counted: Counted) -> None:
    counted.gpu_fails = True
    failed = measure_local()
    assert failed.speed is None
    assert failed.no_gpu == "GPU of nobody: cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY"
    assert failed.target.vram_bytes == 0
    counted.gpu_fails = False
    assert measure_local().speed == SPEED
    assert measure_local().speed == SPEED
    assert counted.times == 2


def test_the_row_has_what_was_measured(counted: Counted) -> None:
    row = find_target("local")
    assert (row.name, row.architecture, row.vram_bytes) == ("local", "sm_89", 9_000_000_001)
    assert (row.gpu_bytes_per_s, row.pcie_bytes_per_s, row.sync_s) == (9.1e11, 2.4e10, 1.7e-5)
    assert row.launch_s == 1.1e-6 + LAUNCH_READS_S
    assert row.host_efficiency == 0.6
    assert not row.compiles
    assert row.features == TARGETS["cpu"].features
    counted.gpu = None
    row = find_target("local")
    assert (row.architecture, row.vram_bytes, row.gpu_bytes_per_s, row.pcie_bytes_per_s, row.sync_s) == ("", 0, 0, 0, 0)
    assert row.host_efficiency == 0.6
    assert measure_local().no_gpu == measure_local().no_gpu == "no driver today"
    assert counted.times == 2


def broken_contents() -> Iterator[bytes]:
    """Contents that a damaged cache file may have, with a digest that fits where they are an object."""
    text = cache_file().read_bytes()
    good = {name: value for name, value in json.loads(text).items() if name != "sha256"}
    yield from (b"null", b"3", b"[]", b"{}", b"\xff\xfe", b"[" * 99999, b"\0" * 100, text[:-9])
    yield text.replace(b"9", b"8", 1)
    # Without a value that is measured there are files of before it was.
    wrong = [without(good, place) for place in places(good) if place[0] != "schema"]
    measured = [(part, key) for part in ("host", "speed") for key in good[part]]
    wrong += [replaced(good, place, value) for place in measured for value in _WRONG]
    wrong += [{**good, "schema": 1}, replaced(good, ("host", "scattered_share"), 1.01)]
    for content in wrong:
        keep(cache_file(), content)
        yield cache_file().read_bytes()


_WRONG = (None, -1, "1", False, [], math.nan, math.inf)


def test_a_damaged_file_is_measured_over(counted: Counted) -> None:
    good = measure_local()
    for times, content in enumerate(list(broken_contents()), start=2):
        cache_file().write_bytes(content)
        assert cached_local() is None, content[:200]
        assert measure_local().host == replace(good.host, bytes_per_s=1e10 + times)
        assert cached_local() is not None


def test_a_cache_that_cannot_be_made_costs_only_time(
    counted: Counted, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_file().mkdir(parents=True)
    for times in (1, 2):
        assert measure_local().host.bytes_per_s == 1e10 + times
    assert list(cache_file().parent.iterdir()) == [cache_file()]
    shutil.rmtree(cache_home)
    cache_home.write_text("a file, not a folder")
    for times in (3, 4):
        assert measure_local().host.bytes_per_s == 1e10 + times
    assert cache_home.read_text() == "a file, not a folder"

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    for times in (5, 6):
        assert measure_local().host.bytes_per_s == 1e10 + times


def test_a_full_disk_leaves_the_old_file(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    old = measure_local()
    monkeypatch.setattr(os, "replace", full)
    measure_local(anew=True)
    assert cached_local() == old
    assert os.listdir(cache_file().parent) == ["local.json"]


def test_a_relative_cache_home_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    # The XDG base directory specification has it so.
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    monkeypatch.setenv("HOME", "/home/of/nobody")
    assert cache_file() == Path("/home/of/nobody/.cache/picompile/local.json")


def test_the_local_machine_with_a_stand_in_gpu(fake_cuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "measure_host", lambda threads: Host(1, 1.0, 1.0))
    monkeypatch.setattr(gpu, "perf_counter", fake_cuda.fake_time)
    measured = measure_local()
    assert measured.machine.gpu == GpuName("Stand-in 4090", "12.4", 89, 2**30)
    assert isinstance(cached_local(), LocalMachine)
    assert measured.target.vram_bytes == 2**30
    assert measured.target.description.endswith("Stand-in 4090")
    # fake_cuda/modules.cpp
    assert measured.target.launch_s == pytest.approx(1.5e-6 + LAUNCH_READS_S)


# ---- the processor and its memory ----


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Only the limit in this file counts, where there is one."""
    monkeypatch.setattr(host, "_LIMITS", (tmp_path / "memory.max",))
    return tmp_path / "memory.max"


def test_memory_is_what_psutil_says_and_a_limit_allows(limits: Path) -> None:
    total, available = host_memory()
    assert total == psutil.virtual_memory().total
    # Others use memory meanwhile.
    assert abs(available - psutil.virtual_memory().available) < total / 4
    for no_limit in ("max\n", "", "9223372036854771712\n"):
        limits.write_text(no_limit)
        assert host_memory()[0] == psutil.virtual_memory().total
    limits.write_text("123456789\n")
    assert host_memory() == (123456789, 123456789)


@pytest.mark.parametrize(("limit_bytes", "expected"), [(10**9 + 7, 125_000_000), (2**60, 2**29)])
def test_the_buffer_is_a_small_part_of_memory(
    limits: Path, monkeypatch: pytest.MonkeyPatch, limit_bytes: int, expected: int
) -> None:
    if limit_bytes > psutil.virtual_memory().available and psutil.virtual_memory().available < 8 * 2**29:
        pytest.skip("needs 4 GiB of memory")
    monkeypatch.setattr(host, "memory_bandwidth", lambda threads, size_bytes: float(threads * size_bytes))
    monkeypatch.setattr(host, "scattered_share", lambda threads, size_bytes: threads / size_bytes)
    limits.write_text(str(limit_bytes))
    measured = measure_host(3)
    assert measured.bytes == min(limit_bytes, psutil.virtual_memory().total)
    assert measured.bytes_per_s == 3 * expected
    assert measured.scattered_share == 3 / expected


def test_bandwidth_is_measured(limits: Path) -> None:
    limits.write_text(str(2**26))
    assert cpu_name().strip() == cpu_name() != ""
    # From a slow disk's to a large server's.
    measured = measure_host(1)
    assert 1e8 < measured.bytes_per_s < 1e13
    assert 0 < measured.scattered_share <= 1


def test_memory_may_grow(limits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the user says, but not above a container's limit."""
    monkeypatch.setenv("PICOMPILE_MEMORY_GIB", "8000")
    total, available = host_memory()
    assert total == 8000 * 2**30
    assert available > total - psutil.virtual_memory().total
    limits.write_text("123456789\n")
    assert host_memory() == (123456789, 123456789)
