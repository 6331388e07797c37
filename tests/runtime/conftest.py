from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.toys.toy_artifact import build_library, write_artifact


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A host.so with the toy kernels."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    return build_library(tmp_path_factory.mktemp("library") / "host.so")


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stamps of verified files go to a folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def make_artifact(tmp_path: Path, library: Path) -> Callable[..., Path]:
    """Writes a toy artifact; see toy_artifact.write_artifact."""

    def make(name: str = "artifact", **options: Any) -> Path:
        return write_artifact(tmp_path / name, library, **options)

    return make
