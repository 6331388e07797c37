"""Copies from memory that the system cannot pin, on a stand-in for the GPU: they go through small pinned buffers.

The stand-in runs the nodes of a graph in orders that its edges allow: copies early and the host late, the host early
and copies late, and at random.
"""

import ctypes
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.toys.toy_gpu import ELEMENTS, IMAGES, UPLOADS, axpy, raw, read, view
from picompile_runtime import ArtifactError, DoesNotFitError, KernelError
from picompile_runtime.devices.cpu.native import HostLibrary
from picompile_runtime.devices.cuda import CudaAccelerator
from picompile_runtime.devices.cuda.bounce import BouncedCopies
from picompile_runtime.devices.cuda.memory import UnpinnedMemory
from picompile_runtime.devices.memory import anonymous_map

Make = Callable[..., CudaAccelerator]
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


@pytest.mark.parametrize("copies", [EARLY, LATE, RANDOM])
@pytest.mark.parametrize("buffer_bytes", [1, 37, 40, 147, 148, 1000])
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


@pytest.mark.parametrize("breaks", [(), (2, 5, 8)])
@pytest.mark.parametrize("stamped", [False, True])
def test_graphs_one_after_the_other_share_the_buffers(
    unpinned: Make, monkeypatch: pytest.MonkeyPatch, breaks: tuple[int, ...], stamped: bool
) -> None:
    """None begins while another still copies from them. In graphs with stamps nothing runs beside anything else."""
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "300")
    assert np.array_equal(sum_of_slices(unpinned(), 5, breaks, stamped), 5 * slices().sum(axis=0))


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


def test_close_waits_for_copies(unpinned: Make, gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "5000")
    device = unpinned()
    adopted, memory = device.adopt(anonymous_map(4096, "a test")), device.allocate(4096, "a test")
    upload = ("upload", [view(adopted, "uint8", 4096), view(memory, "uint8", 4096)])
    device.start(device.bind([upload, axpy(memory), upload]))
    device.close()
    assert (gpu.fake_owned(), gpu.fake_leaked(), gpu.fake_fault()) == (0, 0, b"")


def test_a_failure_behind_copies_raises_and_no_more_are_made(unpinned: Make, gpu: ctypes.CDLL) -> None:
    device = unpinned()
    adopted, memory = device.adopt(anonymous_map(4096, "a test")), device.allocate(4096, "a test")
    upload = ("upload", [view(adopted, "uint8", 4096), view(memory, "uint8", 4096)])
    device.start(device.bind([upload, ("fail", []), upload]))
    with pytest.raises(KernelError, match="CUDA_ERROR_LAUNCH_FAILED"):
        device.wait()


@pytest.mark.parametrize("result", ["1", "2", "801"])
def test_kernels_cannot_read_it(unpinned: Make, monkeypatch: pytest.MonkeyPatch, result: str) -> None:
    """Nor can anything else on the GPU use it: there is no address that could be taken for one of the GPU."""
    monkeypatch.setenv("FAKE_CUDA_NO_PINNING", result)
    device = unpinned()
    adopted, memory = device.adopt(anonymous_map(2**20, "a test")), device.allocate(4096, "a test")
    data = np.zeros(4, np.uint8)
    wrong: tuple[Callable[[], object], ...] = (
        lambda: device.bind([axpy(adopted)]),
        lambda: device.bind([("upload", [view(memory, "uint8", 4), view(adopted, "uint8", 4)])]),
        lambda: device.bind([("upload", [view(adopted, "uint8", 4), view(adopted, "uint8", 4, 64)])]),
        lambda: device.write(adopted, 0, data),
        lambda: device.read(adopted, 0, data),
        lambda: device.copy(adopted, [(0, 8, 4)]),
    )
    for call in (wrong[0], *wrong[2:]):
        with pytest.raises(
            DoesNotFitError, match=r"the system cannot pin 1 MiB of memory \(cuMemHostRegister"
        ) as caught:
            call()
        assert str(caught.value).startswith("weights that the GPU reads from the host for prompts: ")
        assert "\n" not in str(caught.value)
    with pytest.raises(ArtifactError, match="it copies 4 bytes of the host's memory"):
        wrong[1]()


@pytest.mark.parametrize(("count", "offset"), [(4097, 0), (1, 4096), (8, 4090)])
def test_copies_from_outside_of_it_raise(unpinned: Make, count: int, offset: int) -> None:
    device = unpinned()
    adopted, memory = device.adopt(anonymous_map(4096, "a test")), device.allocate(8192, "a test")
    with pytest.raises(ArtifactError, match="kernel upload: an argument lies outside of its memory"):
        device.bind([("upload", [view(adopted, "uint8", count, offset), view(memory, "uint8", count)])])


def test_a_system_that_cannot_pin_buffers_either(unpinned: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    device = unpinned()
    for name, value in (("CALL", "cuMemAllocHost_v2"), ("AT", "3"), ("WITH", "2")):  # two are of `write`
        monkeypatch.setenv(f"FAKE_CUDA_FAIL_{name}", value)
    with pytest.raises(DoesNotFitError, match="buffers for copies of weights to the GPU: the system cannot pin"):
        device.adopt(anonymous_map(4096, "a test"))


def test_artifacts_of_older_compilers_cannot_copy_it(
    make_device: Make, host_code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_NO_PINNING", "801")
    old = HostLibrary(host_code)
    monkeypatch.setattr(HostLibrary, "copy_part", None)
    for device in (make_device(IMAGES), make_device(IMAGES, host=old)):
        with pytest.raises(DoesNotFitError, match="the system cannot pin 0 MiB"):
            device.adopt(anonymous_map(4096, "a test"))
