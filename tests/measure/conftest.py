"""A stand-in for the CUDA driver, compiled once a run."""

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import BuildOnce

from picompile.measure import cuda_driver

SOURCE = Path(__file__).with_name("fake_cuda.c")


def _compile(folder: Path) -> None:
    folder.mkdir()
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-std=c11"]
    subprocess.run(["gcc", *flags, SOURCE, "-o", folder / "libcuda.so.1"], check=True)


@pytest.fixture(scope="session")
def fake_library(build_once: BuildOnce) -> Path:
    return build_once("fake-cuda", _compile) / "libcuda.so.1"


@pytest.fixture
def fake_cuda(fake_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """The stand-in in the place of the driver; what a test leaves allocated fails it."""
    monkeypatch.setattr(cuda_driver, "LIBRARY", str(fake_library))
    for name in ("FAIL_AT", "DEVICES", "MEMORY"):
        monkeypatch.delenv(f"FAKE_CUDA_{name}", raising=False)
    library = ctypes.CDLL(str(fake_library))
    library.fake_time.restype = ctypes.c_double
    library.fake_reset()
    yield library
    assert library.fake_owned() == 0


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"
