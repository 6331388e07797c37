"""When calls of a stand-in for the GPU ran: graphs with events in front of each call and behind it."""

import ctypes
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest

from helpers.toys.toy_gpu import ELEMENTS, axpy, raw, read, view
from picompile_runtime import KernelError
from picompile_runtime.devices.cuda import CudaAccelerator, driver
from picompile_runtime.devices.cuda.driver import Driver

Make = Callable[..., CudaAccelerator]


def test_stamped_calls_do_the_same_in_a_graph_of_their_own(
    make_device: Make, gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, inside of the time from `start` to `wait`, as exactly as the clocks are aligned."""
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "300")
    device = make_device()
    memory, counter = device.allocate(4096, "a test"), device.allocate(100, "a test")
    x = np.random.default_rng(3).integers(-9, 9, ELEMENTS).astype(np.float32)
    device.write(memory, 0, raw(np.float32([0.5])))
    device.write(memory, 256, raw(x))
    calls = device.bind([axpy(memory), ("add_two", [view(memory), view(counter, count=21)]), axpy(memory)])
    captured = gpu.fake_count(b"cuLaunchKernel")
    for number in (1, 2):
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
        assert gpu.fake_count(b"cuLaunchKernel") == captured + 4
        assert gpu.fake_count(b"cuEventRecordWithFlags") == 6
        assert gpu.fake_count(b"cuGraphLaunch") == number
    assert np.array_equal(read(device, memory, 1024, "float32", ELEMENTS), 2 * x)
    assert read(device, counter, 0, "int32", 21).tolist() == [4] * 21
    # Events are made once; without stamps none is recorded.
    assert gpu.fake_count(b"cuEventCreate") == 2 + 5 + 6
    recorded = gpu.fake_event_records()
    device.start(calls)
    device.wait()
    assert (gpu.fake_count(b"cuGraphLaunch"), gpu.fake_event_records()) == (3, recorded)


def test_a_list_of_several_graphs(make_device: Make, gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, the stamps too, wherever a graph ends."""
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "300")
    device = make_device()
    memory = device.allocate(4096, "a test")
    device.write(memory, 0, raw(np.float32([1])))
    device.write(memory, 256, raw(np.ones(ELEMENTS, np.float32)))
    for breaks, graphs in (((), 1), ((2,), 2), ((1, 4), 3), ((0, 5), 1), ((1, 2, 3, 4), 5)):
        calls = device.bind([axpy(memory)] * 5, breaks)
        stamps, before = np.full((5, 2), -1, np.int64), gpu.fake_count(b"cuGraphLaunch")
        device.start(calls, stamps)
        device.wait()
        in_order = stamps.reshape(-1).tolist()
        assert in_order == sorted(in_order) and in_order[0] > 0
        device.start(calls)
        device.wait()
        assert gpu.fake_count(b"cuGraphLaunch") - before == 2 * graphs
    assert (read(device, memory, 1024, "float32", ELEMENTS) == 5 * 10).all()


def test_start_does_not_wait_and_stamps_are_of_the_host_s_clock(device: CudaAccelerator) -> None:
    """The kernel waits for the host's flag, so it ends after that was set, and the next begins then."""
    shared, array = device.share(4096, "flags")
    go = array[:4].view(np.int32)
    calls = device.bind([("await", [view(shared), view(shared, offset=64)]), ("signal", [view(shared, offset=128)])])
    for _ in range(3):
        stamps = np.full((2, 2), -1, np.int64)
        go[0] = 0
        device.start(calls, stamps)
        assert (stamps == -1).all()
        before = time.monotonic_ns()
        go[0] = 1
        device.wait()
        error_ns = device._stopwatch.error_ns + 500
        assert stamps[0, 1] >= before - error_ns
        assert stamps[1, 0] >= stamps[0, 1]


def test_a_list_longer_than_the_last(device: CudaAccelerator) -> None:
    memory = device.allocate(4096, "a test")
    for count in (2, 5, 1, 0):
        stamps = np.full((count, 2), -1, np.int64)
        device.start(device.bind([axpy(memory)] * count), stamps)
        device.wait()
        assert (stamps > 0).all()


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


def test_a_kernel_that_fails_while_it_is_stamped(device: CudaAccelerator, gpu: ctypes.CDLL) -> None:
    calls = device.bind([("fail", [])])
    device.start(calls, np.zeros((1, 2), np.int64))
    with pytest.raises(KernelError, match="CUDA_ERROR_LAUNCH_FAILED"):
        device.wait()
    device.close()
    assert (gpu.fake_owned(), gpu.fake_leaked()) == (0, 0)


def test_close_waits_for_what_is_being_launched(make_device: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "3000")
    device = make_device()
    memory = device.allocate(4096, "a test")
    device.start(device.bind([axpy(memory)] * 5), np.zeros((5, 2), np.int64))
    device.close()


def test_the_stand_ins_events_have_times_like_the_drivers(gpu: ctypes.CDLL) -> None:
    """Not before they were recorded and reached, nor where they are not made for it."""
    opened = Driver(driver.LIBRARY)
    elapsed = ctypes.c_float()

    def between(first: ctypes.c_void_p, second: ctypes.c_void_p) -> float:
        opened.call("cuEventElapsedTime", ctypes.byref(elapsed), first, second)
        return elapsed.value

    with ExitStack() as stack:
        stack.enter_context(opened.context(opened.first_device()))
        stream = stack.enter_context(opened.stream())
        first, second, untimed = (stack.enter_context(opened.event(timed)) for timed in (True, True, False))
        for event in (first, untimed):
            opened.call("cuEventRecord", event, stream)
        opened.call("cuStreamSynchronize", stream)
        for other in (second, untimed):
            with pytest.raises(KernelError, match="CUDA_ERROR_INVALID_HANDLE"):
                between(first, other)
        time.sleep(0.002)
        opened.call("cuEventRecord", second, stream)
        opened.call("cuEventSynchronize", second)
        assert between(first, second) >= 2
        assert between(second, first) == -between(first, second)


def test_the_stand_ins_events_have_no_time_before_they_happen(
    gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "100000")
    opened = Driver(driver.LIBRARY)
    with ExitStack() as stack:
        stack.enter_context(opened.context(opened.first_device()))
        stream = stack.enter_context(opened.stream())
        event = stack.enter_context(opened.event(timed=True))
        states = set()
        for _ in range(10):  # one of ten waits is long enough for the question, as good as certainly
            opened.call("cuEventRecord", event, stream)
            try:
                opened.call("cuEventElapsedTime", ctypes.byref(ctypes.c_float()), event, event)
            except KernelError as error:
                states.add(str(error))
            opened.call("cuStreamSynchronize", stream)
        assert states == {"cuEventElapsedTime: CUDA_ERROR_NOT_READY"}
