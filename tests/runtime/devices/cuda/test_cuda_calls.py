"""Lists of calls on a stand-in for the GPU, whose kernels are a few lines of C."""

import ctypes
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from helpers.toys.toy_gpu import ELEMENTS, axpy, raw, read, view
from picompile_runtime import ArtifactError
from picompile_runtime.devices.cuda import CudaAccelerator

Make = Callable[..., CudaAccelerator]


def test_a_list_of_calls_runs_in_order_by_one_call_of_the_driver(
    make_device: Make, gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """y += a·x twice, and 2 to a counter in between; all sums are exact in float32."""
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "500")
    device = make_device()
    memory, counter = device.allocate(4096, "a test"), device.allocate(100, "a test")
    x = np.random.default_rng(3).integers(-9, 9, ELEMENTS).astype(np.float32)
    y = np.full(ELEMENTS, 100, np.float32)
    device.write(memory, 0, raw(np.float32([0.5])))
    device.write(memory, 256, raw(x))
    device.write(memory, 1024, raw(y))
    calls = device.bind([axpy(memory), ("add_two", [view(memory), view(counter, count=21)]), axpy(memory)])
    assert gpu.fake_count(b"cuLaunchKernel") == 4
    assert not read(device, counter, 0, "int32", 25).any(), "bind ran a kernel"
    for _ in range(3):
        device.start(calls)
    device.wait()
    assert (gpu.fake_count(b"cuLaunchKernel"), gpu.fake_count(b"cuGraphLaunch")) == (4, 3)
    assert np.array_equal(read(device, memory, 1024, "float32", ELEMENTS), y + 3 * x)
    assert read(device, counter, 0, "int32", 25).tolist() == [6] * 21 + [0] * 4


def test_values_written_between_starts_are_seen(make_device: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upload is in another stream: without order between the two, kernels would read what was there before."""
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "2000")
    device = make_device()
    memory = device.allocate(4096, "a test")
    calls = device.bind([axpy(memory)])
    random = np.random.default_rng(4)
    expected = np.zeros(ELEMENTS, np.float32)
    for _ in range(20):
        a, x = np.float32([random.integers(1, 5)]), random.integers(-9, 9, ELEMENTS).astype(np.float32)
        device.write(memory, 0, raw(a))
        device.write(memory, 256, raw(x))
        device.start(calls)
        device.wait()
        expected += a * x
    assert np.array_equal(read(device, memory, 1024, "float32", ELEMENTS), expected)


def test_an_empty_list_is_allowed(device: CudaAccelerator, gpu: ctypes.CDLL) -> None:
    calls = device.bind([])
    device.start(calls)
    device.wait()
    assert gpu.fake_count(b"cuGraphLaunch") == 0


@pytest.mark.parametrize("blocking", ["0", "1"])
def test_accelerator_and_host_meet_at_flags(make_device: Make, blocking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends only after the host has set its flag, so `start` has returned before; nor do others wait."""
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "1000")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", blocking)
    device = make_device()
    shared, array = device.share(4096, "flags")
    go, seen, done = (array[offset : offset + 4].view(np.int32) for offset in (0, 64, 128))
    memory = device.allocate(9999, "a test")
    calls = device.bind([("await", [view(shared), view(shared, offset=64)]), ("signal", [view(shared, offset=128)])])
    for number in (5, -7):
        go[0] = done[0] = 0
        device.start(calls)
        # All of this while the kernel runs: more than the buffers hold, and new memory.
        device.write(memory, 0, np.full(9999, 17, np.uint8))
        device.allocate(33, "a test")
        assert done[0] == 0
        go[0] = number
        device.wait()
        assert (seen[0], done[0]) == (number, 1)
    assert (read(device, memory, 0, "uint8", 9999) == 17).all()


@pytest.mark.parametrize("stamped", [False, True])
def test_a_full_queue_does_not_block_the_host(
    make_device: Make, monkeypatch: pytest.MonkeyPatch, stamped: bool
) -> None:
    """The GPU takes a few tasks, and waits in the first for the host, which must be back from `start` by then."""
    monkeypatch.setenv("FAKE_CUDA_QUEUE", "3")
    device = make_device()
    shared, array = device.share(4096, "flags")
    go, done = array[:4].view(np.int32), array[128:132].view(np.int32)
    calls = [("await", [view(shared), view(shared, offset=64)])] + [("signal", [view(shared, offset=128)])] * 9
    bound = device.bind(calls, range(1, 10))
    device.start(bound, np.zeros((10, 2), np.int64) if stamped else None)
    assert done[0] == 0
    go[0] = 1
    device.wait()
    assert done[0] == 1


def test_an_interrupted_wait_leaves_gpu_and_launcher_idle(make_device: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the thread that launches either, where launches wait."""
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    device = make_device()
    shared, array = device.share(4096, "flags")
    go, done = array[:4].view(np.int32), array[128:132].view(np.int32)
    calls = device.bind([("await", [view(shared), view(shared, offset=64)]), ("signal", [view(shared, offset=128)])])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.get_ident()
    interrupt = threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT))
    answer = threading.Timer(0.3, lambda: go.fill(3))
    device.start(calls)
    interrupt.start(), answer.start()
    with pytest.raises(KeyboardInterrupt):
        device.wait()
        time.sleep(60)  # where the interrupt comes late
    signal.signal(signal.SIGINT, before)
    assert done[0] == 1
    interrupt.join(), answer.join()
    device.start(calls)
    device.wait()


def test_threads_take_turns(make_device: Make) -> None:
    """A context is current in one thread at a time, so every method must see to it."""
    made: dict[str, Any] = {}
    x = np.arange(ELEMENTS, dtype=np.float32)

    def open_it() -> None:
        made["device"] = make_device()
        made["memory"] = made["device"].allocate(4096, "a test")

    def prepare() -> None:
        device, memory = made["device"], made["memory"]
        device.write(memory, 0, raw(np.float32([3])))
        device.write(memory, 256, raw(x))
        made["calls"] = device.bind([axpy(memory)])

    def run() -> None:
        made["device"].start(made["calls"])

    for step in (open_it, prepare, run, run):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    made["device"].wait()
    assert np.array_equal(read(made["device"], made["memory"], 1024, "float32", ELEMENTS), 6 * x)
    thread = threading.Thread(target=made["device"].close)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("kernel", "views", "says"),
    [
        ("axpi", 3, "has no kernel axpi"),
        ("lost", 0, "has no kernel called lost"),
        ("axpy", 2, "kernel axpy: axpy wants argument 2 and the call has 2"),
    ],
)
def test_calls_of_unknown_kernels_raise(device: CudaAccelerator, kernel: str, views: int, says: str) -> None:
    memory = device.allocate(4096, "a test")
    with pytest.raises(ArtifactError, match=says) as caught:
        device.bind([axpy(memory), (kernel, [view(memory)] * views)])
    assert caught.value.exit_code == 4
    device.start(device.bind([axpy(memory)]))
    device.wait()


@pytest.mark.parametrize(("count", "offset"), [(1026, 0), (1, 4101), (3, 4092)])
def test_arguments_outside_of_their_memory_raise(device: CudaAccelerator, count: int, offset: int) -> None:
    memory = device.allocate(4102, "a test")
    with pytest.raises(ArtifactError, match="kernel signal: an argument lies outside of its memory"):
        device.bind([("signal", [view(memory, "int32", count, offset)])])


def test_two_accelerators_share_the_context(make_device: Make, gpu: ctypes.CDLL) -> None:
    first, second = make_device(), make_device()
    kept = second.allocate(300, "a test")
    first.allocate(200, "a test")
    first.close()
    second.start(second.bind([("add_two", [view(kept), view(kept, count=21)])]))
    second.wait()
    assert read(second, kept, 0, "int32", 21).tolist() == [2] * 21
