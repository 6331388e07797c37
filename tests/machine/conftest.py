"""A stand-in for the CUDA driver, and an empty cache."""

from pathlib import Path

import pytest

from helpers.fake_cuda.fixtures import fake_cuda, fake_library

__all__ = ["fake_cuda", "fake_library"]


@pytest.fixture(autouse=True)
def only_virtual_time(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Measure in virtual time: copies are large, and the stand-in says how long they take without making them."""
    if "fake_cuda" in request.fixturenames:
        request.getfixturevalue("fake_cuda")
        monkeypatch.setenv("FAKE_CUDA_DRY", "1")


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"
