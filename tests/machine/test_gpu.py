"""Measuring a GPU, against a stand-in for the driver that checks every call and counts what is allocated."""

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest

from picompile.machine import gpu
from picompile.machine.gpu import Effort, find_gpu, measure_gpu
from picompile_runtime.devices.cuda import driver as cuda_driver
from picompile_runtime.devices.cuda.driver import CudaError
from picompile_runtime.devices.cuda.graph import MemoryFill, runnable_graph

QUICK = Effort(copies=2, rounds=2, least_s=0, transfers=3, launches=(2, 5), graph_runs=2)
WAIT_S = 5e-6  # fake_cuda/streams.cpp
FILL_S = 1.5e-6  # fake_cuda/modules.cpp


def test_speeds_are_bytes_over_the_time_until_the_copies_are_done(
    fake_cuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "perf_counter", fake_cuda.fake_time)
    monkeypatch.setenv("FAKE_CUDA_MEMORY", str(8 * 2**30))
    effort = Effort(transfers=5)
    speed = measure_gpu(effort)
    # The rates of fake_cuda/streams.cpp. A copy reads each byte once and writes it once.
    copy_s = effort.copy_bytes / 500e9 + WAIT_S / effort.copies
    assert speed.copy_bytes_per_s == pytest.approx(2 * effort.copy_bytes / copy_s)
    for rate, measured in ((25e9, speed.down_bytes_per_s), (20e9, speed.up_bytes_per_s)):
        link_s = effort.link_bytes / rate + WAIT_S / effort.copies
        assert measured == pytest.approx(effort.link_bytes / link_s)
    assert speed.exchange_s == pytest.approx(16384 / 25e9 + 16384 / 20e9 + WAIT_S)
    assert speed.free_bytes == 8 * 2**30 - 2**29


def test_a_launch_is_what_longer_graphs_take_more(fake_cuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to start a graph and to wait for it is in both, and goes away."""
    monkeypatch.setattr(gpu, "perf_counter", fake_cuda.fake_time)
    assert measure_gpu(replace(QUICK, launches=(10, 30))).launch_gap_s == pytest.approx(FILL_S)
    assert fake_cuda.fake_count(b"cuGraphLaunch") == 2 * QUICK.graph_runs
    assert fake_cuda.fake_count(b"cuMemsetD8Async") == 10 + 30
    fake_cuda.fake_reset()
    measure_gpu(replace(QUICK, least_s=0.2))
    assert fake_cuda.fake_time() == pytest.approx(3 * 0.2, rel=0.1), "an idle GPU gets time to wake"


def test_a_graph_fills_memory(fake_cuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAKE_CUDA_DRY")
    driver = cuda_driver.Driver(cuda_driver.LIBRARY)
    content = (ctypes.c_ubyte * 8)(*range(1, 9))
    with driver.context(driver.first_device()), driver.stream() as stream, driver.device_memory(8) as device:
        with driver.pinned_memory(8) as host:
            ctypes.memmove(host, content, 8)
            driver.call("cuMemcpyHtoDAsync_v2", device, host, 8, stream)
            with runnable_graph(driver, [MemoryFill(device + 2, 4)], stream) as graph:
                driver.call("cuGraphLaunch", graph, stream)
                driver.call("cuMemcpyDtoHAsync_v2", host, device, 8, stream)
                driver.call("cuStreamSynchronize", stream)
            ctypes.memmove(content, host, 8)
        outside = runnable_graph(driver, [MemoryFill(device + 6, 4)], stream)
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"), outside:
            raise AssertionError("filled more than there is")
    assert list(content) == [1, 2, 0, 0, 0, 0, 7, 8]


def test_buffers_fit_small_odd_and_full_memories(fake_cuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_gpu()
    assert (found.name, found.driver, found.sm) == ("Stand-in 4090", "12.4", 89)
    assert min(vars(measure_gpu(QUICK)).values()) > 0, "with a real clock"
    # 128 MiB is the largest cache that a GPU of the table has, the 5090's GB202.
    assert Effort().copy_bytes > 128 << 20
    assert Effort().transfer_bytes == 4096 * 4
    for memory_bytes in (10**6 + 7, 3 * 2**20 + 1, 2**29 + 1):
        monkeypatch.setenv("FAKE_CUDA_MEMORY", str(memory_bytes))
        assert find_gpu().total_bytes == memory_bytes
        assert measure_gpu(QUICK).free_bytes == memory_bytes - memory_bytes // 16
    for memory_bytes in (0, 1, 4096, 131072):
        monkeypatch.setenv("FAKE_CUDA_MEMORY", str(memory_bytes))
        with pytest.raises(CudaError, match=r"bytes of GPU memory are free"):
            measure_gpu(QUICK)


def test_no_device(fake_cuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    for devices, says in (("0", "no device"), ("-1", "CUDA_ERROR_NO_DEVICE")):
        monkeypatch.setenv("FAKE_CUDA_DEVICES", devices)
        for ask in (find_gpu, measure_gpu):
            with pytest.raises(CudaError, match=says):
                ask()


@pytest.mark.parametrize(
    ("library", "says"),
    [("nowhere.so", "no NVIDIA driver"), ("text.so", "no NVIDIA driver"), ("libc.so.6", "too old: it has no cuInit")],
)
def test_no_driver(library: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.so").write_text("not ELF")
    path = library if library == "libc.so.6" else str(tmp_path / library)
    monkeypatch.setattr(cuda_driver, "LIBRARY", path)
    with pytest.raises(CudaError, match=says):
        find_gpu()


def test_every_call_is_checked_and_nothing_leaks(fake_cuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call fails once. Whatever was allocated until then is freed, and no error goes by unnoticed."""

    def measure() -> None:
        fake_cuda.fake_reset()
        find_gpu()
        measure_gpu(QUICK)

    measure()
    count = fake_cuda.fake_calls()
    # Of copies and waits alone there are 3 · 2 · 3 + 3 · 3.
    assert count > 50
    for failing in range(count):
        monkeypatch.setenv("FAKE_CUDA_FAIL_AT", str(failing))
        with pytest.raises(CudaError, match="CUDA error 999"):
            measure()
        assert fake_cuda.fake_calls() > failing
        assert fake_cuda.fake_owned() == 0, f"call {failing} failed"
