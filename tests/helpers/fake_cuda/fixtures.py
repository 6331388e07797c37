"""Fixtures with the stand-in for the CUDA driver, for the tests of machine measurements and of the runtime."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.kernels.emulator import Emulated
from helpers.support import BuildOnce
from picompile_runtime.devices.cuda import driver

SOURCE = Path(__file__).with_name("libcuda.cpp")


def compile_driver(folder: Path) -> None:
    """Write the stand-in to `folder`, which it makes, as libcuda.so.1."""
    folder.mkdir()
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-std=c++17", "-pthread"]
    subprocess.run(["g++", *flags, SOURCE, "-o", folder / "libcuda.so.1", "-ldl"], check=True)


def emulate(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stand-in run an artifact's kernels in the emulation. They are compiled for that beside its folder."""
    kernels = artifact.with_name(f"{artifact.name}.so")
    Emulated((artifact / "kernels" / "device.cu").read_text(), kernels)
    monkeypatch.setenv("FAKE_CUDA_KERNELS", str(kernels))


@pytest.fixture(scope="session")
def fake_library(build_once: BuildOnce) -> Path:
    return build_once("fake-cuda", compile_driver) / "libcuda.so.1"


@pytest.fixture
def fake_cuda(fake_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """Use the stand-in as the driver; a test fails if it leaves anything allocated, or breaks a rule of the driver."""
    monkeypatch.setattr(driver, "LIBRARY", str(fake_library))
    for name in [name for name in os.environ if name.startswith("FAKE_CUDA_")]:
        monkeypatch.delenv(name)
    library = ctypes.CDLL(str(fake_library))
    library.fake_time.restype = ctypes.c_double
    for name in ("fake_fault", "fake_failed", "fake_kernel_error", "fake_loading"):
        getattr(library, name).restype = ctypes.c_char_p
    library.fake_reset()
    yield library
    assert library.fake_fault() == b""
    assert (library.fake_owned(), library.fake_leaked()) == (0, 0)
