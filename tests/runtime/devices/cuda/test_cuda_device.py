"""Memory of the GPU and copies, on a stand-in driver whose streams are threads."""

import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers.toys.toy_gpu import IMAGES, POISON, STAGING_BYTES, axpy, raw, read
from picompile_runtime import DoesNotFitError, KernelError
from picompile_runtime.devices.cuda import CudaAccelerator
from picompile_runtime.devices.memory import anonymous_map, map_file

Make = Callable[..., CudaAccelerator]


def test_name_capability_and_memory_are_reported(make_device: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_VERSION", "12080")
    device = make_device()
    said = (device.name, device.sm, device.total_bytes, device.driver_version)
    assert said == ("Stand-in 4090", 89, 2**30, "12.8")
    before = device.free_bytes()
    device.allocate(12345, "a test")
    assert before - device.free_bytes() == 12345


@pytest.mark.parametrize("size_bytes", [0, 1, 255, 4097, 100_003])
def test_memory_is_zeroed_and_aligned(device: CudaAccelerator, size_bytes: int) -> None:
    memory = device.allocate(size_bytes, "a test")
    assert memory.address % 256 == 0
    assert not read(device, memory, 0, "uint8", size_bytes).any()
    shared, array = device.share(size_bytes, "a test")
    assert array.dtype == np.uint8 and len(array) == size_bytes
    assert not array.any()
    array[:] = 7
    assert (read(device, shared, 0, "uint8", size_bytes) == 7).all()


@pytest.mark.parametrize("size_bytes", [0, 1, 4095, 4096, 4097, 8192, 12_289, 40_001])
@pytest.mark.parametrize("offset", [0, 1, 77])
def test_copies_of_any_size_pass_through_two_small_buffers(
    make_device: Make, monkeypatch: pytest.MonkeyPatch, size_bytes: int, offset: int
) -> None:
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "300")
    device = make_device()
    memory = device.allocate(offset + size_bytes + 5, "a test")
    device.write(memory, 0, np.full(offset + size_bytes + 5, POISON, np.uint8))
    data = np.random.default_rng(size_bytes + offset).integers(0, 256, size_bytes, np.uint8)
    expected = data.copy()
    device.write(memory, offset, data)
    # It may change now, though not everything has arrived.
    data[:] = POISON
    assert np.array_equal(read(device, memory, offset, "uint8", size_bytes), expected)
    around = np.concatenate(
        [read(device, memory, 0, "uint8", offset), read(device, memory, offset + size_bytes, "uint8", 5)]
    )
    assert (around == POISON).all()


def test_data_need_not_be_contiguous(device: CudaAccelerator) -> None:
    memory = device.allocate(9001, "a test")
    data = np.random.default_rng(0).integers(0, 256, (9001, 3), np.uint8)
    device.write(memory, 0, data[:, 1])
    found = np.full((9001, 2), POISON, np.uint8)
    device.read(memory, 0, found[:, 0])
    assert np.array_equal(found[:, 0], data[:, 1])
    assert (found[:, 1] == POISON).all()


def test_the_default_buffers_are_used_in_turn(make_device: Make, gpu: ctypes.CDLL) -> None:
    device = make_device(staging_bytes=16 << 20)
    memory = device.allocate((48 << 20) + 3, "a test")
    data = np.random.default_rng(1).integers(0, 256, (48 << 20) + 3, np.uint8)
    device.write(memory, 0, data)
    assert gpu.fake_count(b"cuMemcpyHtoDAsync_v2") == 4
    assert np.array_equal(read(device, memory, 0, "uint8", len(data)), data)


def test_ranges_outside_of_memory_raise(device: CudaAccelerator, gpu: ctypes.CDLL) -> None:
    memory = device.allocate(1000, "a test")
    before = gpu.fake_calls()
    data = np.zeros(10, np.uint8)
    for offset in (-1, 991, 2**40):
        with pytest.raises(ValueError, match="of a memory of 1000"):
            device.write(memory, offset, data)
        with pytest.raises(ValueError, match="of a memory of 1000"):
            device.read(memory, offset, data)
        for move in ((offset, 0, 10), (0, offset, 10)):
            with pytest.raises(ValueError, match="of a memory of 1000"):
                device.copy(memory, [move])
    for wrong in (np.zeros(3, np.float32), np.zeros((3, 3), np.uint8)):
        with pytest.raises(ValueError, match=r"must be uint8 \[n\]"):
            device.write(memory, 0, wrong)
    assert gpu.fake_calls() == before


def test_copies_inside_of_a_memory(make_device: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "300")
    device = make_device()
    memory = device.allocate(5003, "a test")
    data = np.random.default_rng(2).integers(0, 256, 5003, np.uint8)
    device.write(memory, 0, data)
    moves = [(0, 1000, 333), (2001, 4002, 1001), (5, 5000, 0)]
    device.copy(memory, moves)
    device.copy(memory, [])
    for source, target, size_bytes in moves:
        data[target : target + size_bytes] = data[source : source + size_bytes]
    assert np.array_equal(read(device, memory, 0, "uint8", 5003), data)
    # A write does not overtake a copy, though it goes through another stream.
    device.copy(memory, [(0, 2000, 2000)])
    device.write(memory, 0, np.full(2000, POISON, np.uint8))
    assert np.array_equal(read(device, memory, 2000, "uint8", 2000), data[:2000])


def test_kernels_see_memory_of_the_host_that_is_adopted(device: CudaAccelerator) -> None:
    memory = anonymous_map(8192, "a test")
    array = np.frombuffer(memory, np.uint8)
    array[:4], array[256 : 256 + 37 * 4] = raw(np.float32([0.5])), raw(np.arange(37, dtype=np.float32))
    device.start(device.bind([axpy(device.adopt(memory))]))
    device.wait()
    assert array[1024 : 1024 + 37 * 4].view(np.float32).tolist() == [0.5 * i for i in range(37)]


def test_memory_that_is_adopted_stays_mapped(make_device: Make, gpu: ctypes.CDLL) -> None:
    """Until it is no longer pinned, whoever else lets it go."""
    device = make_device()
    device.adopt(anonymous_map(1 << 20, "a test"))
    device.close()
    assert gpu.fake_fault() == b""


def test_a_file_cannot_be_adopted(device: CudaAccelerator, tmp_path: Path) -> None:
    """It is mapped for reading only, and pinning is for writing too. This accelerator has no code for other copies."""
    (tmp_path / "weights").write_bytes(bytes(10_000))
    with (tmp_path / "weights").open("rb") as file:
        memory: mmap.mmap = map_file(file.fileno())
    with pytest.raises(DoesNotFitError, match="the system cannot pin 0 MiB"):
        device.adopt(memory)


def test_earlier_failures_are_not_reported_as_lack_of_memory(
    device: CudaAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL_CALL", "cuMemHostRegister_v2")
    monkeypatch.setenv("FAKE_CUDA_FAIL_AT", "0")
    with pytest.raises(KernelError, match="cuMemHostRegister_v2: CUDA error 999"):
        device.adopt(anonymous_map(4096, "a test"))


def test_a_garbage_collected_accelerator_frees_everything(gpu: ctypes.CDLL) -> None:
    device = CudaAccelerator(IMAGES, staging_bytes=STAGING_BYTES)
    device.allocate(4096, "a test")
    device.adopt(anonymous_map(4096, "a test"))
    assert gpu.fake_owned() > 0
    del device
    assert (gpu.fake_owned(), gpu.fake_leaked(), gpu.fake_fault()) == (0, 0, b"")


@pytest.mark.parametrize(("version", "launch_bytes"), [("12030", 2**16), ("12040", 2**12), ("13000", 2**12)])
def test_memory_that_the_driver_keeps_for_graphs_is_estimated(
    make_device: Make, monkeypatch: pytest.MonkeyPatch, version: str, launch_bytes: int
) -> None:
    """By its version; `add_two` is two launches."""
    monkeypatch.setenv("FAKE_CUDA_VERSION", version)
    device = make_device()
    assert device.graph_bytes([]) == 2**25
    assert device.graph_bytes(["axpy", "add_two", "axpy"]) == 2**25 + 4 * launch_bytes
