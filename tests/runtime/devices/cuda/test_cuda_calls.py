"""Lists of calls on a stand-in for the GPU, whose kernels are a few lines of C, and when these calls ran."""

import ctypes
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from helpers.toys.toy_gpu import ELEMENTS, axpy, raw, read, view
from picompile_runtime import ArtifactError, KernelError
from picompile_runtime.devices.cuda import CudaAccelerator

Make = Callable[..., CudaAccelerator]


def test_a_list_of_calls_runs_in_order_by_one_call_of_the_driver(
    make_device: Make, gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """y += a·x twice, and 2 to a counter in between; all sums are exact in float32. With stamps it is a graph of its
    own, with events in front of each call and behind it, in order and inside of the time from `start` to `wait`.
    """
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "500")
    device = make_device()
    memory, counter = device.allocate(4096, "a test"), device.allocate(100, "a test")
    x = np.random.default_rng(3).integers(-9, 9, ELEMENTS).astype(np.float32)
    y = np.full(ELEMENTS, 100, np.float32)
    for place, values in ((0, np.float32([0.5])), (256, x), (1024, y)):
        device.write(memory, place, raw(values))
    calls = device.bind([axpy(memory), ("add_two", [view(memory), view(counter, count=21)]), axpy(memory)])
    assert gpu.fake_count(b"cuLaunchKernel") == 4
    assert not read(device, counter, 0, "int32", 25).any(), "bind ran a kernel"
    recorded = gpu.fake_event_records()
    for _ in range(3):
        device.start(calls)
    device.wait()
    assert (gpu.fake_count(b"cuLaunchKernel"), gpu.fake_count(b"cuGraphLaunch")) == (4, 3)
    assert gpu.fake_event_records() == recorded
    for _ in range(2):
        stamps = np.full((3, 2), -1, np.int64)
        before = time.monotonic_ns()
        device.start(calls, stamps)
        device.wait()
        after = time.monotonic_ns()
        error_ns = device._stopwatch.error_ns + 500  # and what float32 in ms leaves of 10 ms
        in_order = stamps.reshape(-1).tolist()
        assert in_order == sorted(in_order)
        assert before - error_ns <= in_order[0] and in_order[-1] <= after + error_ns
    # The graph with events is made once; the host launches nothing by itself.
    assert (gpu.fake_count(b"cuLaunchKernel"), gpu.fake_count(b"cuEventRecordWithFlags")) == (8, 6)
    assert np.array_equal(read(device, memory, 1024, "float32", ELEMENTS), y + 5 * x)
    assert read(device, counter, 0, "int32", 25).tolist() == [10] * 21 + [0] * 4


def meeting(device: CudaAccelerator) -> tuple[Any, Any, Any, list[Any]]:
    """Return the host's flag, what the GPU saw in it, the GPU's flag, and calls that await one and set the other."""
    shared, array = device.share(4096, "flags")
    flags = (array[offset : offset + 4].view(np.int32) for offset in (0, 64, 128))
    return *flags, [("await", [view(shared), view(shared, offset=64)]), ("signal", [view(shared, offset=128)])]


@pytest.mark.parametrize("blocking", ["0", "1"])
def test_accelerator_and_host_meet_at_flags(make_device: Make, blocking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends only after the host has set its flag, so `start` has returned before; nor do others wait."""
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "1000")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", blocking)
    device = make_device()
    go, seen, done, both = meeting(device)
    calls = device.bind(both)
    memory = device.allocate(9999, "a test")
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
    go, _, done, (await_flag, signal_flag) = meeting(device)
    calls = [await_flag] + [signal_flag] * 9
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
    go, _, done, both = meeting(device)
    calls = device.bind(both)
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


def test_threads_take_turns(make_device: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A context is current in one thread at a time, so every method must see to it. Uploads are in another stream:
    without order between the two, kernels would read what was there before. Another accelerator does not matter.
    """
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "2000")
    x = np.arange(ELEMENTS, dtype=np.float32)

    def elsewhere(function: Callable[..., Any], *arguments: Any) -> Any:
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(function, *arguments).result()

    other, device = make_device(), elsewhere(make_device)
    memory = elsewhere(device.allocate, 4096, "a test")
    other.allocate(200, "a test")
    other.close()
    calls = elsewhere(device.bind, [axpy(memory)])
    elsewhere(device.write, memory, 256, raw(x))
    for a in range(1, 11):
        elsewhere(device.write, memory, 0, raw(np.float32([a])))
        elsewhere(device.start, calls)
        device.wait()
    assert np.array_equal(read(device, memory, 1024, "float32", ELEMENTS), 55 * x)
    elsewhere(device.close)


@pytest.mark.parametrize(
    ("kernel", "views", "says"),
    [
        ("axpi", [(1, 0)] * 3, "has no kernel axpi"),
        ("lost", [], "has no kernel called lost"),
        ("axpy", [(1, 0)] * 2, "kernel axpy: axpy wants argument 2 and the call has 2"),
        ("signal", [(1026, 0)], "kernel signal: an argument lies outside of its memory"),
        ("signal", [(1, 4101)], "kernel signal: an argument lies outside of its memory"),
        ("signal", [(3, 4092)], "kernel signal: an argument lies outside of its memory"),
    ],
)
def test_calls_that_cannot_be_made_raise(
    device: CudaAccelerator, gpu: ctypes.CDLL, kernel: str, views: list[tuple[int, int]], says: str
) -> None:
    memory = device.allocate(4102, "a test")
    with pytest.raises(ArtifactError, match=says) as caught:
        device.bind([axpy(memory), (kernel, [view(memory, "int32", *place) for place in views])])
    assert caught.value.exit_code == 4
    for calls, launched in (([], 0), ([axpy(memory)], 1)):
        device.start(device.bind(calls))
        device.wait()
        assert gpu.fake_count(b"cuGraphLaunch") == launched


def test_a_list_of_several_graphs(make_device: Make, gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, the stamps too, wherever a graph ends, and whether a list is longer than the last or shorter."""
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "300")
    device = make_device()
    memory = device.allocate(4096, "a test")
    device.write(memory, 0, raw(np.float32([1])))
    device.write(memory, 256, raw(np.ones(ELEMENTS, np.float32)))
    total = 0
    breaks_and_graphs = {(2,): 2, (1, 4): 3, (0, 5): 1, (1, 2, 3, 4): 5}
    for count, breaks, graphs in ((2, (), 1), *((5, *both) for both in breaks_and_graphs.items()), (1, (), 1)):
        calls = device.bind([axpy(memory)] * count, breaks)
        stamps, before = np.full((count, 2), -1, np.int64), gpu.fake_count(b"cuGraphLaunch")
        device.start(calls, stamps)
        device.wait()
        in_order = stamps.reshape(-1).tolist()
        assert in_order == sorted(in_order) and in_order[0] > 0
        device.start(calls)
        device.wait()
        assert gpu.fake_count(b"cuGraphLaunch") - before == 2 * graphs
        total += 2 * count
    assert (read(device, memory, 1024, "float32", ELEMENTS) == total).all()
    device.start(device.bind([]), np.zeros((0, 2), np.int64))
    device.wait()
    device.start(device.bind([axpy(memory)] * 5), np.zeros((5, 2), np.int64))
    device.close()  # waits for what is being launched


@pytest.mark.parametrize(
    "function", ["cuLaunchKernel", "cuEventRecordWithFlags", "cuGraphInstantiateWithFlags", "cuEventElapsedTime"]
)
def test_a_failure_raises_and_can_be_tried_again(
    device: CudaAccelerator, monkeypatch: pytest.MonkeyPatch, gpu: ctypes.CDLL, function: str
) -> None:
    memory = device.allocate(4096, "a test")
    calls = device.bind([axpy(memory), axpy(memory)])
    monkeypatch.setenv("FAKE_CUDA_FAIL_CALL", function)
    monkeypatch.setenv("FAKE_CUDA_FAIL_AT", str(gpu.fake_count(function.encode())))
    with pytest.raises(KernelError, match=f"{function}: CUDA error 999"):
        device.start(calls, np.zeros((2, 2), np.int64))
        device.wait()
    monkeypatch.delenv("FAKE_CUDA_FAIL_AT")
    stamps = np.zeros((2, 2), np.int64)
    device.start(calls, stamps)
    device.wait()
    assert (stamps > 0).all()
    device.start(calls)
    device.wait()
    failing = device.bind([("fail", [])])
    device.start(failing, np.zeros((1, 2), np.int64))
    with pytest.raises(KernelError, match="CUDA_ERROR_LAUNCH_FAILED"):
        device.wait()
