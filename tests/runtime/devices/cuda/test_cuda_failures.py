"""Failures of the driver, of kernels and of allocations: each raises its error, and nothing leaks."""

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers.toys.toy_gpu import STAGING_BYTES, UPLOADS, axpy, read, view
from picompile_runtime import DoesNotFitError, KernelError, PicompileRuntimeError
from picompile_runtime.devices.cpu.native import HostLibrary
from picompile_runtime.devices.cuda import CudaAccelerator, CudaError, CudaImages, stopwatch
from picompile_runtime.devices.memory import anonymous_map

Make = Callable[..., CudaAccelerator]


def fail(monkeypatch: pytest.MonkeyPatch, function: str, call: int, result: str) -> None:
    """Let one call of a function of the driver end with `result`."""
    for name, value in (("CALL", function), ("AT", str(call)), ("WITH", result)):
        monkeypatch.setenv(f"FAKE_CUDA_FAIL_{name}", value)


def test_a_failing_kernel_raises_at_the_wait(device: CudaAccelerator, gpu: ctypes.CDLL) -> None:
    memory = device.allocate(100, "a test")
    calls = device.bind([("fail", []), ("add_two", [view(memory), view(memory, count=21)])])
    device.start(calls)
    with pytest.raises(KernelError, match=r"^the GPU: cuStreamSynchronize: CUDA_ERROR_LAUNCH_FAILED;") as caught:
        device.wait()
    assert caught.value.exit_code == 1
    assert gpu.fake_kernel_error() == b"fail: on purpose"
    # Nothing works any more in this context.
    for use in (
        lambda: device.start(calls),
        device.wait,
        lambda: read(device, memory, 0, "uint8", 100),
        lambda: device.allocate(1, "a test"),
    ):
        with pytest.raises(KernelError, match="CUDA_ERROR_LAUNCH_FAILED"):
            use()
    device.close()
    assert (gpu.fake_owned(), gpu.fake_leaked()) == (0, 0)
    before = gpu.fake_calls()
    device.close()
    assert gpu.fake_calls() == before


def test_the_stand_in_finds_writes_outside_of_memory(device: CudaAccelerator, gpu: ctypes.CDLL) -> None:
    memory = device.allocate(5, "a test")
    device.start(device.bind([("overrun", [view(memory, "uint8", 5)])]))
    device.wait()
    device.close()
    assert gpu.fake_fault() == b"something was written past the end of memory, or before it"
    gpu.fake_reset()


def test_too_little_memory_raises(make_device: Make, gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's memory is too small, or the system pins none of the host's, as on some laptops, or a part, as on WSL2:
    the error comes before any weight is read.
    """
    monkeypatch.setenv("FAKE_CUDA_MEMORY", str(2**31))
    device = make_device()
    device.allocate(2**20, "the cache")
    says = r"^the hot neurons needs 3.00 GiB of GPU memory and 1.87 GiB are free; compile with a smaller --vram-budget"
    with pytest.raises(DoesNotFitError, match=says) as caught:
        device.allocate(3 * 2**30, "the hot neurons")
    assert caught.value.exit_code == 5
    device.allocate(2**20, "after that")
    with monkeypatch.context() as patch:
        fail(patch, "cuMemHostAlloc", gpu.fake_count(b"cuMemHostAlloc"), "2")
        with pytest.raises(DoesNotFitError, match=r"flags: the system cannot pin 0 MiB .*cuMemHostAlloc"):
            device.share(1000, "flags")
    says = "^buffers for copies to the GPU: the system cannot pin"
    for result in ("1", "2", "801"):
        fail(monkeypatch, "cuMemAllocHost_v2", gpu.fake_count(b"cuMemAllocHost_v2"), result)
        with pytest.raises(DoesNotFitError, match=says) as caught:
            make_device()
        assert "WSL2" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_kernels_are_loaded_before_they_run(
    make_device: Make, gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless who calls has decided otherwise. Other programs that are started later are not concerned."""
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    make_device()
    assert gpu.fake_loading() == b"EAGER"
    assert "CUDA_MODULE_LOADING" not in os.environ
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    make_device()
    assert gpu.fake_loading() == b"LAZY"
    assert os.environ["CUDA_MODULE_LOADING"] == "LAZY"


def life(images: CudaImages, host: HostLibrary) -> None:
    """Call every method of an accelerator once."""
    device = CudaAccelerator(images, staging_bytes=STAGING_BYTES, host=host)
    try:
        memory = device.allocate(9001, "a test")
        # Before anything runs: the stand-in takes all memory that is freed meanwhile for memory in use.
        adopted = device.adopt(anonymous_map(9001, "a test"))
        shared, array = device.share(100, "a test")
        array[0] = 1
        device.write(memory, 0, np.ones(9001, np.uint8))
        upload = ("upload", [view(adopted, "uint8", 9001), view(memory, "uint8", 9001)])
        calls = device.bind([upload, axpy(memory), ("await", [view(shared), view(memory)])])
        device.start(calls)
        device.wait()
        device.start(calls, np.zeros((3, 2), np.int64))
        device.wait()
        device.copy(memory, [(0, 4000, 1000), (1000, 5000, 1)])
        device.read(memory, 0, np.empty(5000, np.uint8))
        device.free_bytes()
    finally:
        device.close()


@pytest.mark.parametrize("no_pinning", ["0", "801"])
def test_every_call_is_checked_and_nothing_leaks(
    gpu: ctypes.CDLL, host_code: Path, monkeypatch: pytest.MonkeyPatch, no_pinning: str
) -> None:
    """Every call of the driver fails once. Only `close` ignores that, and calls that only ask whether work is
    left.
    """
    monkeypatch.setenv("FAKE_CUDA_NO_PINNING", no_pinning)
    life(UPLOADS, HostLibrary(host_code))
    count = gpu.fake_calls()
    assert count > 80
    closing: list[str] = []
    for failing in range(count):
        monkeypatch.setenv("FAKE_CUDA_FAIL_AT", str(failing))
        gpu.fake_reset()
        try:
            life(UPLOADS, HostLibrary(host_code))
        except PicompileRuntimeError as error:
            assert not closing, "close raised"
            assert isinstance(error, CudaError) and "CUDA error 999" in str(error)
        else:
            if gpu.fake_failed() == b"cuStreamQuery":
                continue
            closing.append(gpu.fake_failed().decode())
        # Without a context nothing can be freed but the context.
        no_context = closing[-1:] == ["cuCtxPushCurrent_v2"]
        assert gpu.fake_owned() == 0 and (gpu.fake_leaked() == 0) != no_context, (
            f"call {failing} failed: {gpu.fake_failed()}"
        )
        assert gpu.fake_fault() == b""
    assert closing[:3] == ["cuCtxPushCurrent_v2", "cuStreamSynchronize", "cuStreamSynchronize"]
    assert closing[-2:] == ["cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]
    gpu.fake_reset()


def test_a_waiting_host_learns_of_a_failure(
    device: CudaAccelerator, gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at nothing but this word until the step is over; nobody looks at what is captured meanwhile."""
    monkeypatch.setattr(stopwatch, "_LOOK_S", 1e-4)
    _, shared = device.share(64, "a test")
    abandoned = shared.view(np.int32)
    device.tell_failures(abandoned)
    memory = device.allocate(4096, "a test")
    device.start(device.bind([axpy(memory)]))
    for _ in range(20):
        device.bind([axpy(memory)] * 200)
    device.wait()
    assert (abandoned[0], gpu.fake_fault()) == (0, b"")
    time.sleep(0.05)  # the watch sleeps by now
    calls = device.bind([axpy(memory), axpy(memory)], breaks=[1])  # two graphs: another thread launches them
    with monkeypatch.context() as patch:
        fail(patch, "cuGraphLaunch", gpu.fake_count(b"cuGraphLaunch"), "999")
        device.start(calls)
        while abandoned[0] == 0:
            time.sleep(0.01)
        with pytest.raises(KernelError, match="cuGraphLaunch"):
            device.wait()
    abandoned[0] = 0
    device.start(device.bind([("fail", [])]))
    while abandoned[0] == 0:
        time.sleep(0.01)
    with pytest.raises(KernelError, match="CUDA_ERROR_LAUNCH_FAILED"):
        device.wait()
    device.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("picompile-gpu")]


def test_the_watch_looks_again_after_an_interrupted_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a step is not noted where the wait for it is interrupted."""
    monkeypatch.setattr(stopwatch, "_LOOK_S", 1e-3)
    abandoned, looks = np.zeros(16, np.int32), threading.Event()

    def has_failed() -> bool:
        looks.set()
        return False

    watch = stopwatch.FailureWatch(has_failed, abandoned)
    watch.begin()
    watch.begin()
    assert looks.wait(10), "it takes the second step for the end of the first"
    watch.end()
    watch.close()


def test_a_forked_process_does_not_call_the_driver(device: CudaAccelerator, gpu: ctypes.CDLL) -> None:
    """Neither to use the GPU nor to free what is its parent's."""
    memory = device.allocate(4096, "a test")
    owned = gpu.fake_owned()
    child = os.fork()
    if child == 0:
        says = device.after_fork()
        device.close()
        device.__del__()
        del device
        gc.collect()
        os._exit(0 if "the GPU belongs to the process that loaded" in says and gpu.fake_owned() == owned else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    device.start(device.bind([axpy(memory)]))
    device.wait()
