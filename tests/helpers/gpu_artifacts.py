"""A GPU artifact as small as can be, its kernels in emulation, and the stand-in driver that runs them: as fixtures."""

import ctypes
from pathlib import Path

import pytest

from helpers.fake_cuda.fixtures import fake_cuda, fake_library
from helpers.kernels.emulator import Emulated
from helpers.support import BuildOnce, compile_for_test, save_tiny_llama

__all__ = [
    "CONTEXT",
    "HOT",
    "fake_cuda",
    "fake_library",
    "gpu",
    "gpu_artifact",
    "gpu_kernels",
    "gpu_model",
    "host_artifact",
]

CONTEXT = 32
# Of 200 neurons, so that both parts are there and neither begins with the other.
HOT = {0: tuple(range(1, 200, 3))}
_SIZES = {"quant": "f16", "context": CONTEXT, "chunk": 16, "hot": HOT}


@pytest.fixture(scope="session")
def gpu_model(build_once: BuildOnce) -> Path:
    """A Hugging Face folder of one layer. Tests must not change it."""
    return build_once("gpu-model", lambda folder: save_tiny_llama(folder, num_hidden_layers=1))


@pytest.fixture(scope="session")
def gpu_artifact(build_once: BuildOnce, gpu_model: Path) -> Path:
    """`gpu_model` for a 4090, with a third of its neurons hot. Tests must not change it."""
    return build_once("gpu-artifact", lambda folder: compile_for_test(gpu_model, folder, target="4090", **_SIZES))


@pytest.fixture(scope="session")
def host_artifact(build_once: BuildOnce, gpu_model: Path) -> Path:
    """Return the artifact for processors, which computes both parts one after the other."""
    return build_once("gpu-host-artifact", lambda folder: compile_for_test(gpu_model, folder, **_SIZES))


@pytest.fixture(scope="session")
def gpu_kernels(build_once: BuildOnce, gpu_artifact: Path) -> Path:
    """A library with the kernels of `gpu_artifact`, as the stand-in driver takes them."""

    def make(folder: Path) -> None:
        folder.mkdir()
        Emulated((gpu_artifact / "kernels" / "device.cu").read_text(), folder / "kernels.so")

    return build_once("gpu-kernels", make) / "kernels.so"


@pytest.fixture
def gpu(fake_cuda: ctypes.CDLL, gpu_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """The stand-in driver with these kernels."""
    monkeypatch.setenv("FAKE_CUDA_KERNELS", str(gpu_kernels))
    return fake_cuda
