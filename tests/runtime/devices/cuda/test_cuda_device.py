"""Memory of the GPU and copies, on a stand-in driver whose streams are threads.

It runs the nodes of a graph in orders that its edges allow: copies early and the host late, the host early and copies
late, and at random.
"""

import ctypes
import gc
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.products import sampled
from helpers.toys.toy_gpu import ELEMENTS, IMAGES, POISON, STAGING_BYTES, UPLOADS, axpy, raw, read, view
from picompile_runtime import ArtifactError, DoesNotFitError, KernelError
from picompile_runtime.devices.cpu.native import HostLibrary
from picompile_runtime.devices.cuda import CudaAccelerator
from picompile_runtime.devices.cuda.bounce import BouncedCopies
from picompile_runtime.devices.cuda.memory import UnpinnedMemory
from picompile_runtime.devices.memory import anonymous_map, map_file

Make = Callable[..., CudaAccelerator]


def test_memory_is_zeroed_and_aligned(device: CudaAccelerator) -> None:
    for size_bytes in (0, 1, 255, 4097, 100_003):
        memory = device.allocate(size_bytes, "a test")
        assert memory.address % 256 == 0
        assert not read(device, memory, 0, "uint8", size_bytes).any()
        shared, array = device.share(size_bytes, "a test")
        assert array.dtype == np.uint8 and len(array) == size_bytes
        assert not array.any()
        array[:] = 7
        assert (read(device, shared, 0, "uint8", size_bytes) == 7).all()


def test_copies_of_any_size_pass_through_two_small_buffers(make_device: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "300")
    device = make_device()
    for size_bytes, offset in product((0, 1, 4095, 4096, 4097, 8192, 12_289, 40_001), (0, 1, 77)):
        memory = device.allocate(offset + size_bytes + 5, "a test")
        device.write(memory, 0, np.full(offset + size_bytes + 5, POISON, np.uint8))
        data = np.random.default_rng(size_bytes + offset).integers(0, 256, (size_bytes, 3), np.uint8)
        expected = data[:, 1].copy()
        device.write(memory, offset, data[:, 1])  # which need not be contiguous
        # It may change now, though not everything has arrived.
        data[:] = POISON
        found = np.full((size_bytes, 2), POISON, np.uint8)
        device.read(memory, offset, found[:, 0])
        assert np.array_equal(found[:, 0], expected) and (found[:, 1] == POISON).all()
        for start, count in ((0, offset), (offset + size_bytes, 5)):
            assert (read(device, memory, start, "uint8", count) == POISON).all()


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


def test_kernels_see_memory_of_the_host_that_is_adopted(
    make_device: Make, tmp_path: Path, gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays mapped until it is no longer pinned, whoever else lets it go. Nothing can be adopted that the system
    cannot pin: a file is mapped for reading only, and pinning is for writing too.
    """
    device, memory = make_device(), anonymous_map(8192, "a test")
    array = np.frombuffer(memory, np.uint8)
    array[:4], array[256 : 256 + 37 * 4] = raw(np.float32([0.5])), raw(np.arange(37, dtype=np.float32))
    device.start(device.bind([axpy(device.adopt(memory))]))
    device.wait()
    assert array[1024 : 1024 + 37 * 4].view(np.float32).tolist() == [0.5 * i for i in range(37)]
    device.adopt(anonymous_map(1 << 20, "a test"))
    (tmp_path / "weights").write_bytes(bytes(10_000))
    with (tmp_path / "weights").open("rb") as file, pytest.raises(DoesNotFitError, match="cannot pin 0 MiB"):
        device.adopt(map_file(file.fileno()))
    monkeypatch.setenv("FAKE_CUDA_FAIL_CALL", "cuMemHostRegister_v2")
    monkeypatch.setenv("FAKE_CUDA_FAIL_AT", str(gpu.fake_count(b"cuMemHostRegister_v2")))
    with pytest.raises(KernelError, match="cuMemHostRegister_v2: CUDA error 999"):
        device.adopt(anonymous_map(4096, "a test"))
    device.close()
    assert gpu.fake_fault() == b""


def test_a_garbage_collected_accelerator_frees_everything(gpu: ctypes.CDLL) -> None:
    device = CudaAccelerator(IMAGES, staging_bytes=STAGING_BYTES)
    device.allocate(4096, "a test")
    device.adopt(anonymous_map(4096, "a test"))
    assert gpu.fake_owned() > 0
    del device
    assert (gpu.fake_owned(), gpu.fake_leaked(), gpu.fake_fault()) == (0, 0, b"")


def test_memory_that_the_driver_keeps_for_graphs_is_estimated(
    make_device: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its version; `add_two` is two launches."""
    for version, launch_bytes in (("12030", 2**16), ("12040", 2**12), ("13000", 2**12)):
        monkeypatch.setenv("FAKE_CUDA_VERSION", version)
        device = make_device()
        assert device.graph_bytes([]) == 2**25
        assert device.graph_bytes(["axpy", "add_two", "axpy"]) == 2**25 + 4 * launch_bytes


# ---- copies from memory that the system cannot pin: they go through small pinned buffers ----


EARLY, LATE, RANDOM = "1", "2", "0"
# A slice of 148 bytes is four parts, the last of them 28 bytes.
BUFFER_BYTES, SLICE_BYTES = 40, 4 * ELEMENTS
SLICES = 7
X, Y = 256, 1024  # where axpy has its arguments


@pytest.fixture
def unpinned(
    make_device: Make, host_code: Path, gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., CudaAccelerator]:
    """Return a function that makes accelerators of a system that pins no memory of others."""
    monkeypatch.setenv("FAKE_CUDA_NO_PINNING", "801")

    def make(staging_bytes: int = BUFFER_BYTES, **options: Any) -> CudaAccelerator:
        return make_device(UPLOADS, staging_bytes=staging_bytes, host=HostLibrary(host_code), **options)

    return make


def slices() -> NDArray[np.float32]:
    """Float32 [slices, elements]: numbers whose sums are exact."""
    return np.random.default_rng(5).integers(-99, 99, (SLICES, ELEMENTS)).astype(np.float32)


def sum_of_slices(device: CudaAccelerator, runs: int = 1, breaks: Sequence[int] = (), stamped: bool = False) -> Any:
    """Copy slices to two stages in turn, add each to `y` in that order, as often as said, and return `y`."""
    values = slices()
    memory = anonymous_map(values.nbytes + 3, "a test")
    np.frombuffer(memory, np.uint8)[3:] = raw(values)  # at an odd address
    adopted, stages = device.adopt(memory), [device.allocate(4096, "a stage") for _ in range(2)]
    total = device.allocate(SLICE_BYTES, "the sum")
    calls = []
    for number in range(SLICES):
        stage = stages[number % 2]
        device.write(stage, 0, raw(np.float32([1])))
        source = view(adopted, "uint8", SLICE_BYTES, 3 + number * SLICE_BYTES)
        calls.append(("upload", [source, view(stage, "uint8", SLICE_BYTES, X)]))
        calls.append(("axpy", [*axpy(stage)[1][:2], view(total, "float32", ELEMENTS)]))
    bound = device.bind(calls, breaks)
    gc.collect()  # the graph keeps what it refers to
    for _ in range(runs):
        device.start(bound, np.zeros((len(calls), 2), np.int64) if stamped else None)
        if stamped:
            device.wait()
    device.wait()
    return read(device, total, 0, "float32", ELEMENTS)


@sampled(copies=(EARLY, LATE, RANDOM), buffer_bytes=(3, 40, 147, 148, 1000), slow="launches hundreds of copies each")
def test_the_bytes_are_those_of_pinned_memory(
    unpinned: Make, gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, copies: str, buffer_bytes: int
) -> None:
    monkeypatch.setenv("FAKE_CUDA_COPIES", copies)
    device = unpinned(staging_bytes=buffer_bytes)
    before = gpu.fake_count(b"cuMemcpyHtoDAsync_v2")
    assert np.array_equal(sum_of_slices(device), slices().sum(axis=0))
    parts = SLICES * -(-SLICE_BYTES // buffer_bytes)
    uploads = SLICES * -(-4 // buffer_bytes)  # of `write`
    assert gpu.fake_count(b"cuLaunchHostFunc") == parts
    assert gpu.fake_count(b"cuMemcpyHtoDAsync_v2") - before == parts + uploads


@sampled(breaks=[(), (2, 5, 8)], stamped=(False, True), slow="launches hundreds of copies each")
def test_graphs_one_after_the_other_share_the_buffers(
    unpinned: Make, monkeypatch: pytest.MonkeyPatch, breaks: tuple[int, ...], stamped: bool
) -> None:
    """None begins while another still copies from them. In graphs with stamps nothing runs beside anything else."""
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "300")
    assert np.array_equal(sum_of_slices(unpinned(), 3, breaks, stamped), 3 * slices().sum(axis=0))


@pytest.mark.parametrize("copies", [EARLY, LATE])
def test_a_missing_wait_is_found(unpinned: Make, monkeypatch: pytest.MonkeyPatch, copies: str) -> None:
    """A copy that does not wait for its buffer to be filled, and a buffer that is filled before it was copied."""
    monkeypatch.setenv("FAKE_CUDA_COPIES", copies)
    wait, left_out = BouncedCopies._wait, list[object]()

    def all_but_the_first(self: BouncedCopies, stream: ctypes.c_void_p, event: ctypes.c_void_p) -> None:
        buffer = self._buffers.buffers[0]
        if event is (buffer.filled if copies == EARLY else buffer.copied) and not left_out:
            left_out.append(event)
        else:
            wait(self, stream, event)

    monkeypatch.setattr(BouncedCopies, "_wait", all_but_the_first)
    assert not np.array_equal(sum_of_slices(unpinned()), slices().sum(axis=0))
    assert left_out


def test_buffers_are_made_only_where_they_are_needed(
    make_device: Make, unpinned: Make, host_code: Path, gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for all that is adopted; `close` frees them, and gives the library back."""
    device = unpinned()
    before = gpu.fake_owned()
    memories = [device.adopt(anonymous_map(4096, "a test")) for _ in range(2)]
    assert all(isinstance(memory, UnpinnedMemory) for memory in memories)
    assert device.unpinned_bytes == 2 * 4096
    assert gpu.fake_owned() - before == 2 + 4 + 1  # buffers, events and a stream
    device.close()
    assert (gpu.fake_owned(), gpu.fake_leaked(), gpu.fake_fault()) == (0, 0, b"")
    monkeypatch.delenv("FAKE_CUDA_NO_PINNING")
    pinning = make_device(UPLOADS, host=HostLibrary(host_code))
    before = gpu.fake_owned()
    pinning.adopt(anonymous_map(4096, "a test"))
    assert (gpu.fake_owned() - before, pinning.unpinned_bytes) == (1, 0)


@pytest.mark.parametrize("fails", [False, True])
def test_close_waits_for_copies(unpinned: Make, gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Behind a failure none is made."""
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "0" if fails else "5000")
    device = unpinned()
    adopted, memory = device.adopt(anonymous_map(4096, "a test")), device.allocate(4096, "a test")
    upload = ("upload", [view(adopted, "uint8", 4096), view(memory, "uint8", 4096)])
    device.start(device.bind([upload, ("fail", []) if fails else axpy(memory), upload]))
    if fails:
        with pytest.raises(KernelError, match="CUDA_ERROR_LAUNCH_FAILED"):
            device.wait()
    device.close()
    assert (gpu.fake_owned(), gpu.fake_leaked(), gpu.fake_fault()) == (0, 0, b"")


@pytest.mark.parametrize("result", ["1", "2", "801"])
def test_kernels_cannot_read_it(unpinned: Make, monkeypatch: pytest.MonkeyPatch, result: str) -> None:
    """Nor can anything else on the GPU use it: there is no address that could be taken for one of the GPU."""
    monkeypatch.setenv("FAKE_CUDA_NO_PINNING", result)
    device, data = unpinned(), np.zeros(4, np.uint8)
    adopted, memory = device.adopt(anonymous_map(2**20, "a test")), device.allocate(4096, "a test")

    def upload(source: Any, target: Any) -> None:
        device.bind([("upload", [source, target])])

    says = r"^weights that the GPU reads from the host for prompts: the system cannot pin 1 MiB .*cuMemHostRegister.*$"
    for use in (
        lambda: device.bind([axpy(adopted)]),
        lambda: upload(view(adopted, "uint8", 4), view(adopted, "uint8", 4, 64)),
        lambda: device.write(adopted, 0, data),
        lambda: device.read(adopted, 0, data),
        lambda: device.copy(adopted, [(0, 8, 4)]),
    ):
        with pytest.raises(DoesNotFitError, match=says):
            use()
    with pytest.raises(ArtifactError, match="it copies 4 bytes of the host's memory"):
        upload(view(memory, "uint8", 4), view(adopted, "uint8", 4))
    for count, offset in ((2**20 + 1, 0), (1, 2**20), (8, 2**20 - 6)):
        with pytest.raises(ArtifactError, match="kernel upload: an argument lies outside of its memory"):
            upload(view(adopted, "uint8", count, offset), view(memory, "uint8", count))


def test_what_can_be_copied_in_no_way_raises(
    make_device: Make, unpinned: Make, host_code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where buffers cannot be pinned either, and of artifacts of older compilers."""
    device, old = unpinned(), HostLibrary(host_code)
    with monkeypatch.context() as patch:
        for name, value in (("CALL", "cuMemAllocHost_v2"), ("AT", "3"), ("WITH", "2")):  # two are of `write`
            patch.setenv(f"FAKE_CUDA_FAIL_{name}", value)
        with pytest.raises(DoesNotFitError, match="buffers for copies of weights to the GPU: the system cannot pin"):
            device.adopt(anonymous_map(4096, "a test"))
    monkeypatch.setattr(HostLibrary, "copy_part", None)
    for device in (make_device(IMAGES), make_device(IMAGES, host=old)):
        with pytest.raises(DoesNotFitError, match="the system cannot pin 0 MiB"):
            device.adopt(anonymous_map(4096, "a test"))
