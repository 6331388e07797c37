"""A GPU of the stand-in driver with a few kernels."""

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_cuda.fixtures import fake_cuda, fake_library
from helpers.support import BuildOnce
from helpers.toys.toy_gpu import IMAGES, STAGING_BYTES
from picompile_codegen.build.host_library import build_host_library
from picompile_runtime.devices.cuda import CudaAccelerator, CudaImages

__all__ = ["fake_cuda", "fake_library"]


@pytest.fixture(scope="session")
def toy_kernels(build_once: BuildOnce) -> Path:
    def compile_in(folder: Path) -> None:
        folder.mkdir()
        source = Path(__file__).with_name("toy_device.c")
        flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-std=c11"]
        subprocess.run(["gcc", *flags, source, "-o", folder / "kernels.so"], check=True)

    return build_once("toy-device", compile_in) / "kernels.so"


@pytest.fixture(scope="session")
def host_code(build_once: BuildOnce) -> Path:
    """The library that an artifact without kernels of the host has."""

    def build(folder: Path) -> None:
        folder.mkdir()
        build_host_library([], folder / "host.so")

    return build_once("no-kernels", build) / "host.so"


@pytest.fixture
def gpu(fake_cuda: ctypes.CDLL, toy_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """The stand-in with the toy kernels."""
    monkeypatch.setenv("FAKE_CUDA_KERNELS", str(toy_kernels))
    return fake_cuda


@pytest.fixture
def make_device(gpu: ctypes.CDLL) -> Iterator[Callable[..., CudaAccelerator]]:
    """Return a function that makes accelerators, which are closed after the test."""
    devices = []

    def make(images: CudaImages = IMAGES, **options: Any) -> CudaAccelerator:
        devices.append(CudaAccelerator(images, **{"staging_bytes": STAGING_BYTES, **options}))
        return devices[-1]

    yield make
    for device in devices:
        device.close()


@pytest.fixture
def device(make_device: Callable[..., CudaAccelerator]) -> CudaAccelerator:
    return make_device()
