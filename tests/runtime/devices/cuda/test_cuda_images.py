"""Checks of device.json, and the choice of the image for a GPU."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picompile_runtime import ArtifactError, MachineError
from picompile_runtime.artifact.manifest import AcceleratorCode
from picompile_runtime.devices.cpu.native import HostLibrary
from picompile_runtime.devices.cuda import open_cuda_accelerator
from picompile_runtime.devices.cuda.module import CudaImages, GpuLaunch, check_arguments, choose_image, read_images

Launches = list[dict[str, Any]]


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


WRONG_ROOTS = {
    "sm": [None, "89", 0, 49, 1000, 8.9, True],
    "ptx_sm": [None, -89, "sm_89"],
    "kernels": [None, [], "add", {"add": {}}, {"add": []}, {"add": [3]}],
}
WRONG_LAUNCHES = {
    "symbol": [None, "", 3, "two words", "nul\0", "naïve"],
    "grid": [None, 8, [], [1, 1], [1, 1, 1, 1], [0, 1, 1], [1, -1, 1], [2**31, 1, 1], [1, 65536, 1], [1, 1, 65536]],
    "block": [None, [0, 1, 1], [1025, 1, 1], [1, 1, 65], [33, 32, 1], [32.0, 1, 1], [True, 1, 1], ["32", 1, 1]],
    "args": [None, 0, [-1], [0.0], ["0"], [True], [0] * 513, {"0": 0}],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG_ROOTS.items() for value in values])
def test_wrong_descriptions_raise(key: str, value: object) -> None:
    with pytest.raises(ArtifactError, match=rf"^device.json: {key}") as caught:
        read({**described(), key: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG_LAUNCHES.items() for value in values])
def test_wrong_launches_raise(key: str, value: object) -> None:
    root = described()
    root["kernels"]["add"][1][key] = value
    with pytest.raises(ArtifactError, match=rf"^device.json: kernels: add\[1\]: {key} must be ") as caught:
        read(root)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff"])
def test_values_that_are_no_objects_raise(text: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"device\.json"):
        read_images(text, b"", b"", "device.json")


def test_launches_use_only_arguments_of_the_call() -> None:
    launch = GpuLaunch("add_kernel", (1, 1, 1), (32, 1, 1), (0, 3, 1))
    check_arguments(launch, 4, "add")
    with pytest.raises(ArtifactError, match="kernel add: add_kernel wants argument 3 and the call has 3"):
        check_arguments(launch, 3, "add")
    check_arguments(replace(launch, args=()), 0, "add")


# CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility".
@pytest.mark.parametrize(
    ("cubin_sm", "ptx_sm", "sm", "chosen"),
    [
        (89, 89, 89, "cubin"),
        (80, 80, 86, "cubin"),
        (86, 86, 89, "cubin"),
        (86, 86, 80, None),
        (89, 89, 86, None),
        (89, 80, 86, "ptx"),
        (89, 80, 80, "ptx"),
        (75, 75, 80, "ptx"),
        (89, 89, 90, "ptx"),
        (89, 89, 120, "ptx"),
        (120, 120, 121, "cubin"),
        (90, 90, 89, None),
        (120, 120, 100, None),
        (100, 100, 90, None),
        (89, 89, 75, None),
    ],
)
def test_a_gpu_gets_the_image_for_its_capability(
    cubin_sm: int, ptx_sm: int, sm: int, chosen: str | None, images: CudaImages
) -> None:
    images = replace(images, sm=cubin_sm, ptx_sm=ptx_sm)
    if chosen is None:
        with pytest.raises(MachineError) as caught:
            choose_image(images, sm, "A card")
        assert caught.value.exit_code == 6
        says = str(caught.value)
        assert f"{min(cubin_sm, ptx_sm) / 10:.1f} and newer" in says and f"A card has {sm / 10:.1f}" in says
        return
    image = choose_image(images, sm, "A card")
    expected = (images.cubin, cubin_sm, False) if chosen == "cubin" else (images.ptx, ptx_sm, True)
    assert (image.data, image.sm, image.is_ptx) == expected


@pytest.mark.parametrize(("sm", "loaded"), [(89, 1), (90, 2), (120, 2)])
def test_the_driver_gets_that_image(
    make_device: Callable[..., Any], gpu: Any, monkeypatch: pytest.MonkeyPatch, sm: int, loaded: int
) -> None:
    monkeypatch.setenv("FAKE_CUDA_SM", str(sm))
    assert make_device().sm == sm
    assert gpu.fake_image() == loaded


def artifact_with(code: AcceleratorCode | None, images: CudaImages) -> Any:
    """Return what opening an accelerator needs of an artifact."""
    texts = {"kernels/d.json": json.dumps(described()).encode(), "kernels/d.cubin": images.cubin}
    texts["kernels/d.ptx"] = images.ptx
    manifest, program = SimpleNamespace(accelerator=code), SimpleNamespace(waiting_kernels=frozenset(), functions={})
    return SimpleNamespace(folder=Path("model"), manifest=manifest, program=program, texts=texts)


def test_the_gpu_is_opened_with_the_artifacts_files(gpu: Any, images: CudaImages, host_code: Path) -> None:
    files = {"launches": "kernels/d.json", "cubin": "kernels/d.cubin", "ptx": "kernels/d.ptx"}
    artifact = artifact_with(AcceleratorCode("cuda", sm=86, files=files), images)
    artifact.load_code = lambda: HostLibrary(host_code)
    device = open_cuda_accelerator(artifact)
    device.close()
    assert gpu.fake_image() == 1
    with pytest.raises(ArtifactError, match=r"model: manifest\.json and kernels/d\.json disagree on sm"):
        open_cuda_accelerator(artifact_with(AcceleratorCode("cuda", sm=89, files=files), images))
    for code in (None, AcceleratorCode("cpu")):
        with pytest.raises(ArtifactError, match="model: has no code for a GPU"):
            open_cuda_accelerator(artifact_with(code, images))
