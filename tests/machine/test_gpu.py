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


def test_the_gpu_is_found(fake_cuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_MEMORY", str(5 * 2**30 + 12345))
    found = find_gpu()
    assert (found.name, found.driver, found.sm) == ("Stand-in 4090", "12.4", 89)
    assert found.total_bytes == 5 * 2**30 + 12345


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


def test_an_idle_gpu_gets_time_to_wake(fake_cuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "perf_counter", fake_cuda.fake_time)
    measure_gpu(replace(QUICK, least_s=0.2))
    assert fake_cuda.fake_time() == pytest.approx(3 * 0.2, rel=0.1)


def test_speeds_are_positive_with_a_real_clock(fake_cuda: ctypes.CDLL) -> None:
    speed = measure_gpu(QUICK)
    assert min(vars(speed).values()) > 0


@pytest.mark.parametrize("memory_bytes", [10**6 + 7, 3 * 2**20 + 1, 2**29 + 1])
def test_buffers_fit_small_and_odd_memories(
    fake_cuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, memory_bytes: int
) -> None:
    monkeypatch.setenv("FAKE_CUDA_MEMORY", str(memory_bytes))
    assert measure_gpu(QUICK).free_bytes == memory_bytes - memory_bytes // 16


@pytest.mark.parametrize("memory_bytes", [0, 1, 4096, 131072])
def test_a_full_gpu_is_not_measured(fake_cuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, memory_bytes: int) -> None:
    monkeypatch.setenv("FAKE_CUDA_MEMORY", str(memory_bytes))
    with pytest.raises(CudaError, match=r"bytes of GPU memory are free"):
        measure_gpu(QUICK)


def test_the_default_buffers_are_larger_than_caches() -> None:
    # 128 MiB is the largest that a GPU of the table has, the 5090's GB202.
    assert Effort().copy_bytes > 128 << 20
    assert Effort().transfer_bytes == 4096 * 4


@pytest.mark.parametrize(("devices", "says"), [("0", "no device"), ("-1", "CUDA_ERROR_NO_DEVICE")])
def test_no_device(fake_cuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, devices: str, says: str) -> None:
    monkeypatch.setenv("FAKE_CUDA_DEVICES", devices)
    for ask in (find_gpu, measure_gpu):
        with pytest.raises(CudaError, match=says):
            ask()


def test_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", str(tmp_path / "libcuda.so.1"))
    with pytest.raises(CudaError, match="no NVIDIA driver"):
        find_gpu()


def test_a_file_that_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libcuda.so.1").write_text("not ELF")
    monkeypatch.setattr(cuda_driver, "LIBRARY", str(tmp_path / "libcuda.so.1"))
    with pytest.raises(CudaError, match="no NVIDIA driver"):
        find_gpu()


def test_a_driver_that_lacks_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libc.so.6")
    with pytest.raises(CudaError, match="too old: it has no cuInit"):
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


def test_the_stand_in_refuses_what_the_driver_refuses(fake_cuda: ctypes.CDLL) -> None:
    driver = cuda_driver.Driver(cuda_driver.LIBRARY)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_CONTEXT"), driver.device_memory(1):
        raise AssertionError("allocated without a context")
    with driver.context(driver.first_device()), driver.stream() as stream:
        with driver.device_memory(100) as device, driver.pinned_memory(99) as host:
            driver.call("cuMemcpyHtoDAsync_v2", device, host, 99, stream)
            with pytest.raises(CudaError, match="cuMemcpyHtoDAsync_v2: CUDA_ERROR_INVALID_VALUE"):
                driver.call("cuMemcpyHtoDAsync_v2", device, host, 100, stream)
        with pytest.raises(CudaError, match="CUDA_ERROR_OUT_OF_MEMORY"), driver.device_memory(2**31):
            raise AssertionError("allocated more than there is")
