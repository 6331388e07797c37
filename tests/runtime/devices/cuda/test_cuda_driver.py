"""Errors of a driver that is missing, too old or rejects code; and tests of the stand-in for the driver."""

import ctypes
import subprocess
import sys
from collections.abc import Callable
from ctypes import byref, c_void_p
from functools import partial
from pathlib import Path
from threading import Thread

import pytest

from helpers.toys.toy_gpu import PTX
from picompile_runtime import DoesNotFitError, KernelError, MachineError
from picompile_runtime.devices.cuda import CudaAccelerator, CudaError, CudaImages, driver
from picompile_runtime.devices.cuda.driver import Driver, call_error
from picompile_runtime.devices.cuda.graph import runnable_graph
from picompile_runtime.devices.cuda.module import choose_image, load_module


def refusal(images: CudaImages) -> str:
    """The error's text; it is one line and ends a command with exit code 6."""
    with pytest.raises(MachineError) as caught:
        CudaAccelerator(images)
    assert isinstance(caught.value, CudaError)
    assert caught.value.exit_code == 6
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"not ELF"])
def test_a_missing_driver_raises(
    images: CudaImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    path = tmp_path / "libcuda.so.1"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(driver, "LIBRARY", str(path))
    assert refusal(images) == f"no NVIDIA driver ({path} cannot be loaded)"


def test_an_old_driver_raises(images: CudaImages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libc.so.6")
    assert refusal(images) == "the NVIDIA driver is too old: it has no cuInit; install a newer one"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("DEVICES", "0", "the NVIDIA driver has no device"),
        ("DEVICES", "-1", "cuInit: CUDA_ERROR_NO_DEVICE"),
        ("FAIL_AT", "0", "cuInit: CUDA error 999"),
        ("SM", "75", "compute capability 8.9 and newer, and Stand-in 4090 has 7.5"),
    ],
)
def test_a_missing_gpu_raises(
    gpu: ctypes.CDLL, images: CudaImages, monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(f"FAKE_CUDA_{name}", value)
    assert says in refusal(images)


@pytest.mark.parametrize("sm", [89, 120])
@pytest.mark.parametrize(
    ("result", "name", "hint"),
    [
        (200, "CUDA_ERROR_INVALID_IMAGE", "install a newer driver"),
        (209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "install a newer driver"),
        (218, "CUDA_ERROR_INVALID_PTX", "install a newer driver"),
        (221, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND", "libnvidia-ptxjitcompiler.so.1"),
        (222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "install a newer driver"),
        (223, "CUDA_ERROR_JIT_COMPILATION_DISABLED", "unset CUDA_DISABLE_PTX_JIT"),
    ],
)
def test_code_that_the_driver_rejects(
    gpu: ctypes.CDLL,
    images: CudaImages,
    monkeypatch: pytest.MonkeyPatch,
    sm: int,
    result: int,
    name: str,
    hint: str,
) -> None:
    monkeypatch.setenv("FAKE_CUDA_SM", str(sm))
    monkeypatch.setenv("FAKE_CUDA_VERSION", "11080")
    monkeypatch.setenv("FAKE_CUDA_REFUSE", str(result))
    text = refusal(images)
    needs = "compute capability 8.9" if sm == 89 else "PTX 8.3 and compute capability 8.9"
    assert f"of CUDA 11.8, refuses the artifact's code, which needs {needs}: {name}" in text
    # The log's first line, and no more of it.
    assert "(ptxas fatal : refused by the stand-in);" in text and "second" not in text
    assert hint in text


@pytest.mark.parametrize("end", [b"\xfe\0", b"\0\xfe"])
def test_ptx_ends_with_a_zero(gpu: ctypes.CDLL, images: CudaImages, end: bytes) -> None:
    """The driver reads PTX up to a zero, and what stands in front of it must be text."""
    opened, handle = Driver(driver.LIBRARY), c_void_p()
    memory = ctypes.create_string_buffer(PTX + end, len(PTX + end))
    with opened.primary_context(opened.first_device()) as context, opened.current(context):
        load = partial(opened.call, "cuModuleLoadDataEx", byref(handle), memory, 0, None, None)
        if end[0]:
            with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_PTX"):
                load()
            return
        load()
        opened.call("cuModuleUnload", handle)


def test_other_failures_to_load_keep_their_error(
    gpu: ctypes.CDLL, images: CudaImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_REFUSE", "2")
    with pytest.raises(DoesNotFitError, match="cuModuleLoadDataEx: CUDA_ERROR_OUT_OF_MEMORY"):
        CudaAccelerator(images)


@pytest.mark.parametrize(
    ("result", "kind", "exit_code"),
    [
        (1, KernelError, 1),
        (2, DoesNotFitError, 5),
        (46, MachineError, 6),
        (100, MachineError, 6),
        (719, KernelError, 1),
    ],
)
def test_errors_have_the_class_of_their_result(result: int, kind: type[Exception], exit_code: int) -> None:
    error = call_error("cuSomething: CUDA_ERROR", result)
    assert isinstance(error, kind) and isinstance(error, CudaError)
    assert (error.exit_code, error.result) == (exit_code, result)
    assert str(error).startswith("cuSomething: CUDA_ERROR")


def test_the_driver_is_imported_only_on_demand() -> None:
    cuda = "picompile_runtime.devices.cuda"
    code = f"import sys, picompile_runtime; print([name for name in sys.modules if {cuda!r} in name])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"


# The stand-in itself: an error that it does not find, no other test can find.


@pytest.fixture
def opened(gpu: ctypes.CDLL) -> Driver:
    return Driver(driver.LIBRARY)


def test_the_stand_in_keeps_contexts_per_thread(opened: Driver) -> None:
    seen: list[str] = []

    def elsewhere() -> None:
        try:
            opened.free_bytes()
        except CudaError as error:
            seen.append(str(error))

    with opened.context(opened.first_device()):
        opened.free_bytes()
        thread = Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert seen == ["cuMemGetInfo_v2: CUDA_ERROR_INVALID_CONTEXT"]


@pytest.mark.parametrize(
    "call",
    [
        lambda driver, stream: driver.call("cuStreamSynchronize", stream),
        lambda driver, stream: driver.call("cuMemFree_v2", 2**60),
        lambda driver, stream: driver.device_memory(64).__enter__(),
        lambda driver, stream: driver.event().__enter__(),
    ],
)
def test_the_stand_in_captures_only_launches(opened: Driver, call: Callable[[Driver, c_void_p], None]) -> None:
    with opened.context(opened.first_device()), opened.stream() as stream:
        opened.call("cuStreamBeginCapture_v2", stream, 1)
        with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
            call(opened, stream)
        graph = c_void_p()
        with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
            opened.call("cuStreamEndCapture", stream, byref(graph))
        assert not graph


def test_the_stand_in_finds_queries_of_captured_streams(opened: Driver, gpu: ctypes.CDLL) -> None:
    """From whatever thread: the driver discards what is captured."""
    seen: list[bool] = []
    with opened.primary_context(opened.first_device()) as context, opened.current(context), opened.stream() as stream:

        def look() -> None:
            with opened.current(context):
                seen.append(opened.is_well(stream))

        opened.call("cuStreamBeginCapture_v2", stream, 2)
        thread = Thread(target=look)
        thread.start()
        thread.join()
        with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
            opened.call("cuStreamEndCapture", stream, byref(c_void_p()))
    assert seen == [False]
    assert gpu.fake_fault() == b"a stream was queried while it was captured"
    gpu.fake_reset()


def test_the_stand_in_rejects_freed_handles(opened: Driver, images: CudaImages) -> None:
    with opened.context(opened.first_device()), opened.stream() as stream:
        with load_module(opened, choose_image(images, 89, "")) as module:
            function = module.function("fail")
        with runnable_graph(opened, [], stream) as graph, opened.event() as event:
            pass
        launch = (function, 1, 1, 1, 1, 1, 1, 0, stream, None, None)
        for name, *arguments in (
            ("cuLaunchKernel", *launch),
            ("cuGraphLaunch", graph, stream),
            ("cuEventRecord", event, stream),
            ("cuModuleUnload", function),
        ):
            with pytest.raises(CudaError, match=f"{name}: CUDA_ERROR_INVALID_HANDLE"):
                opened.call(name, *arguments)


HostFunction = ctypes.CFUNCTYPE(None, c_void_p)


@pytest.mark.parametrize("captured", [False, True])
def test_the_stand_in_calls_functions_of_the_host_in_order(
    opened: Driver, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    """Each with what it was given, after what is before it in its stream."""
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "500")
    seen: list[tuple[int | None, bytes]] = []
    with opened.context(opened.first_device()), opened.stream() as stream, opened.pinned_memory(4) as pinned:
        with opened.device_memory(4) as memory:
            note = HostFunction(lambda data: seen.append((data, ctypes.string_at(pinned.value or 0, 4))))
            refill = HostFunction(lambda data: ctypes.memset(pinned.value or 0, data or 0, 4) and None)
            graph = c_void_p()
            if captured:
                opened.call("cuStreamBeginCapture_v2", stream, 2)
            for number in (7, 8, 9):
                opened.call("cuLaunchHostFunc", stream, refill, number)
                opened.call("cuMemcpyHtoDAsync_v2", memory, pinned, 4, stream)
                opened.call("cuLaunchHostFunc", stream, note, number)
            if captured:
                opened.call("cuStreamEndCapture", stream, byref(graph))
                runnable = c_void_p()
                opened.call("cuGraphInstantiateWithFlags", byref(runnable), graph, 0)
                assert not seen
                opened.call("cuGraphLaunch", runnable, stream)
                opened.call("cuGraphDestroy", graph)
            opened.call("cuMemcpyDtoHAsync_v2", pinned, memory, 4, stream)
            opened.call("cuStreamSynchronize", stream)
            assert seen == [(number, bytes([number] * 4)) for number in (7, 8, 9)]
            if captured:
                opened.call("cuGraphExecDestroy", runnable)
            with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
                opened.call("cuLaunchHostFunc", stream, None, None)
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_HANDLE"):
            opened.call("cuLaunchHostFunc", c_void_p(1), note, None)


def test_the_stand_in_finds_functions_of_the_host_that_call_the_driver(opened: Driver, gpu: ctypes.CDLL) -> None:
    said: list[str] = []

    def ask(_: int | None) -> None:
        try:
            opened.version()
        except CudaError as error:
            said.append(str(error))

    function = HostFunction(ask)
    with opened.context(opened.first_device()), opened.stream() as stream:
        opened.call("cuLaunchHostFunc", stream, function, None)
        opened.call("cuStreamSynchronize", stream)
    assert said == ["cuDriverGetVersion: CUDA_ERROR_NOT_PERMITTED"]
    assert gpu.fake_fault() == b"a function of the host called the driver"
    gpu.fake_reset()


def test_the_stand_in_counts_what_a_context_leaks(opened: Driver, gpu: ctypes.CDLL) -> None:
    with opened.context(opened.first_device()):
        opened.call("cuStreamCreate", byref(c_void_p()), 0)
        opened.call("cuMemAllocHost_v2", byref(c_void_p()), 3)
    assert (gpu.fake_owned(), gpu.fake_leaked()) == (0, 2)
    gpu.fake_reset()
