"""Errors of a driver that is missing, too old or rejects code, the code that it is given, and the stand-in for it."""

import ctypes
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from ctypes import byref, c_void_p
from dataclasses import replace
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.toys.toy_gpu import IMAGES, PTX
from picompile_runtime import ArtifactError, DoesNotFitError, KernelError, MachineError
from picompile_runtime.artifact.manifest import AcceleratorCode
from picompile_runtime.devices.cuda import CudaAccelerator, CudaError, CudaImages, driver, open_cuda_accelerator
from picompile_runtime.devices.cuda.driver import Driver
from picompile_runtime.devices.cuda.graph import runnable_graph
from picompile_runtime.devices.cuda.module import GpuLaunch, check_arguments, choose_image, load_module, read_images


def refusal(images: CudaImages) -> str:
    """The error's text; it is one line and ends a command with exit code 6."""
    with pytest.raises(MachineError) as caught:
        CudaAccelerator(images)
    assert isinstance(caught.value, CudaError)
    assert caught.value.exit_code == 6
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_driver_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "libcuda.so.1"
    monkeypatch.setattr(driver, "LIBRARY", str(path))
    assert refusal(IMAGES) == f"no NVIDIA driver ({path} cannot be loaded)"
    path.write_bytes(b"not ELF")
    assert refusal(IMAGES) == f"no NVIDIA driver ({path} cannot be loaded)"
    monkeypatch.setattr(driver, "LIBRARY", "libc.so.6")
    assert refusal(IMAGES) == "the NVIDIA driver is too old: it has no cuInit; install a newer one"


@pytest.mark.parametrize(
    ("result", "name", "hint"),
    [
        (218, "CUDA_ERROR_INVALID_PTX", "install a newer driver"),
        (221, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND", "libnvidia-ptxjitcompiler.so.1"),
        (223, "CUDA_ERROR_JIT_COMPILATION_DISABLED", "unset CUDA_DISABLE_PTX_JIT"),
    ],
)
def test_code_that_the_driver_rejects(
    gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, result: int, name: str, hint: str
) -> None:
    monkeypatch.setenv("FAKE_CUDA_VERSION", "11080")
    monkeypatch.setenv("FAKE_CUDA_REFUSE", str(result))
    for sm, needs in ((89, "compute capability 8.9"), (120, "PTX 8.3 and compute capability 8.9")):
        monkeypatch.setenv("FAKE_CUDA_SM", str(sm))
        text = refusal(IMAGES)
        assert f"of CUDA 11.8, refuses the artifact's code, which needs {needs}: {name}" in text
        # The log's first line, and no more of it.
        assert "(ptxas fatal : refused by the stand-in);" in text and "second" not in text
        assert hint in text
    monkeypatch.setenv("FAKE_CUDA_REFUSE", "2")  # other failures keep their error
    with pytest.raises(DoesNotFitError, match="cuModuleLoadDataEx: CUDA_ERROR_OUT_OF_MEMORY"):
        CudaAccelerator(IMAGES)


@pytest.mark.parametrize("end", [b"\xfe\0", b"\0\xfe"])
def test_ptx_ends_with_a_zero(gpu: ctypes.CDLL, end: bytes) -> None:
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


# The stand-in itself: an error that it does not find, no other test can find.


@pytest.fixture
def opened(gpu: ctypes.CDLL) -> Driver:
    return Driver(driver.LIBRARY)


def test_the_stand_in_keeps_contexts_per_thread_and_counts_what_they_leak(opened: Driver, gpu: ctypes.CDLL) -> None:
    with opened.context(opened.first_device()), ThreadPoolExecutor(1) as elsewhere:
        opened.free_bytes()
        with pytest.raises(CudaError, match="cuMemGetInfo_v2: CUDA_ERROR_INVALID_CONTEXT"):
            elsewhere.submit(opened.free_bytes).result()
        opened.call("cuStreamCreate", byref(c_void_p()), 0)
        opened.call("cuMemAllocHost_v2", byref(c_void_p()), 3)
    assert (gpu.fake_owned(), gpu.fake_leaked()) == (0, 2)
    gpu.fake_reset()


def test_the_stand_in_captures_only_launches(opened: Driver, gpu: ctypes.CDLL) -> None:
    """A query of the stream, from whatever thread, has the driver discard what is captured."""
    with opened.primary_context(opened.first_device()) as context, opened.current(context), opened.stream() as stream:

        def look() -> None:
            with opened.current(context):
                assert not opened.is_well(stream)

        def look_elsewhere() -> None:
            with ThreadPoolExecutor(1) as elsewhere:
                elsewhere.submit(look).result()

        for call, fault in (
            (lambda: opened.call("cuStreamSynchronize", stream), b""),
            (lambda: opened.call("cuMemFree_v2", 2**60), b""),
            (lambda: opened.event().__enter__(), b""),
            (look_elsewhere, b"a stream was queried while it was captured"),
        ):
            opened.call("cuStreamBeginCapture_v2", stream, 2 if fault else 1)
            with nullcontext() if fault else pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
                call()
            with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
                opened.call("cuStreamEndCapture", stream, byref(c_void_p()))
            assert gpu.fake_fault() == fault
    gpu.fake_reset()


def test_the_stand_in_rejects_freed_handles(opened: Driver) -> None:
    with opened.context(opened.first_device()), opened.stream() as stream:
        with load_module(opened, choose_image(IMAGES, 89, "")) as module:
            function = module.function("fail")
        with runnable_graph(opened, [], stream) as graph, opened.event() as event:
            pass
        for name, *arguments in (
            ("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, stream, None, None),
            ("cuGraphLaunch", graph, stream),
            ("cuEventRecord", event, stream),
            ("cuModuleUnload", function),
        ):
            with pytest.raises(CudaError, match=f"{name}: CUDA_ERROR_INVALID_HANDLE"):
                opened.call(name, *arguments)


def test_the_stand_in_finds_functions_of_the_host_that_call_the_driver(opened: Driver, gpu: ctypes.CDLL) -> None:
    def ask(_: int | None) -> None:
        with pytest.raises(CudaError, match="CUDA_ERROR_NOT_PERMITTED"):
            opened.version()

    function = ctypes.CFUNCTYPE(None, c_void_p)(ask)
    with opened.context(opened.first_device()), opened.stream() as stream:
        opened.call("cuLaunchHostFunc", stream, function, None)
        opened.call("cuStreamSynchronize", stream)
    assert gpu.fake_fault() == b"a function of the host called the driver"
    gpu.fake_reset()


def test_the_stand_ins_events_have_times_like_the_drivers(gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before they were recorded, nor where they are not made for it."""
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "50000")
    opened, elapsed = Driver(driver.LIBRARY), ctypes.c_float()

    def between(first: c_void_p, second: c_void_p) -> float:
        opened.call("cuEventElapsedTime", byref(elapsed), first, second)
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


# ---- device.json, and the choice of the image for a GPU ----


def described() -> dict[str, Any]:
    shown = {"registers": 40, "local_bytes": 0, "shared_bytes": 1024}
    first = {"symbol": "add_kernel", "grid": [2**31 - 1, 65535, 1], "block": [1024, 1, 1], "args": [0, 2, 2], **shown}
    second = {"symbol": "add_kernel_1", "grid": [1, 1, 65535], "block": [4, 4, 64], "args": [], **shown}
    return {"sm": 86, "ptx_sm": 89, "kernels": {"add": [first, second]}}


def read(root: Any) -> CudaImages:
    return read_images(json.dumps(root).encode(), b"cubin", b"ptx", "device.json")


def test_a_description_is_read() -> None:
    launches = (
        GpuLaunch("add_kernel", (2**31 - 1, 65535, 1), (1024, 1, 1), (0, 2, 2)),
        GpuLaunch("add_kernel_1", (1, 1, 65535), (4, 4, 64), ()),
    )
    assert read(described()) == CudaImages(86, 89, b"cubin", b"ptx", {"add": launches})
    for text in (b"", b"[]", b"{", b"\xff"):
        with pytest.raises(ArtifactError, match=r"device\.json"):
            read_images(text, b"", b"", "device.json")


WRONG = {
    ("sm",): [None, "89", 0, 49, 1000, 8.9, True],
    ("ptx_sm",): [None, -89],
    ("kernels",): [None, [], {"add": {}}, {"add": []}, {"add": [3]}],
    ("kernels", "add", 1, "symbol"): [None, "", 3, "two words", "nul\0", "naïve"],
    ("kernels", "add", 1, "grid"): [8, [1, 1], [0, 1, 1], [1, -1, 1], [2**31, 1, 1], [1, 65536, 1], [1, 1, 65536]],
    ("kernels", "add", 1, "block"): [[0, 1, 1], [1025, 1, 1], [1, 1, 65], [33, 32, 1], [32.0, 1, 1], [True, 1, 1]],
    ("kernels", "add", 1, "args"): [None, [-1], [0.0], ["0"], [True], [0] * 513, {"0": 0}],
}


@pytest.mark.parametrize("place", WRONG)
def test_wrong_descriptions_raise(place: tuple[Any, ...]) -> None:
    *path, key = place
    says = rf"kernels: add\[1\]: {key} must be " if path else key
    for value in WRONG[place]:
        root = described()
        reduce(getitem, path, root)[key] = value
        with pytest.raises(ArtifactError, match=rf"^device.json: {says}[^\n]*$"):
            read(root)


def test_launches_use_only_arguments_of_the_call() -> None:
    launch = GpuLaunch("add_kernel", (1, 1, 1), (32, 1, 1), (0, 3, 1))
    check_arguments(launch, 4, "add")
    with pytest.raises(ArtifactError, match="kernel add: add_kernel wants argument 3 and the call has 3"):
        check_arguments(launch, 3, "add")
    check_arguments(replace(launch, args=()), 0, "add")


# CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility".
CHOSEN: dict[tuple[int, int], dict[int, str | None]] = {
    (75, 75): {80: "ptx"},
    (80, 80): {86: "cubin"},
    (86, 86): {89: "cubin", 80: None},
    (89, 80): {86: "ptx", 80: "ptx"},
    (89, 89): {89: "cubin", 90: "ptx", 120: "ptx", 86: None, 75: None},
    (90, 90): {89: None},
    (100, 100): {90: None},
    (120, 120): {121: "cubin", 100: None},
}


@pytest.mark.parametrize(("cubin_sm", "ptx_sm"), CHOSEN)
def test_a_gpu_gets_the_image_for_its_capability(cubin_sm: int, ptx_sm: int) -> None:
    images = replace(IMAGES, sm=cubin_sm, ptx_sm=ptx_sm)
    for sm, chosen in CHOSEN[cubin_sm, ptx_sm].items():
        if chosen is None:
            says = f"{min(cubin_sm, ptx_sm) / 10:.1f} and newer.*A card has {sm / 10:.1f}"
            with pytest.raises(MachineError, match=says) as caught:
                choose_image(images, sm, "A card")
            assert caught.value.exit_code == 6
        else:
            image = choose_image(images, sm, "A card")
            expected = (images.cubin, cubin_sm, False) if chosen == "cubin" else (images.ptx, ptx_sm, True)
            assert (image.data, image.sm, image.is_ptx) == expected


def test_artifacts_without_the_right_code_raise(gpu: Any) -> None:
    files = {"launches": "kernels/d.json", "cubin": "kernels/d.cubin", "ptx": "kernels/d.ptx"}
    texts = {"kernels/d.json": json.dumps(described()).encode(), "kernels/d.cubin": IMAGES.cubin, "kernels/d.ptx": PTX}
    for code, says in (
        (AcceleratorCode("cuda", sm=89, files=files), r"manifest\.json and kernels/d\.json disagree on sm"),
        (AcceleratorCode("cpu"), "has no code for a GPU"),
        (None, "has no code for a GPU"),
    ):
        artifact: Any = SimpleNamespace(folder=Path("model"), manifest=SimpleNamespace(accelerator=code), texts=texts)
        with pytest.raises(ArtifactError, match=f"model: {says}"):
            open_cuda_accelerator(artifact)
