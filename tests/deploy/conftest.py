"""The artifact that is deployed."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.serving_process import build_serving_artifact
from helpers.support import BuildOnce


@pytest.fixture(scope="session")
def artifact(build_once: BuildOnce) -> Path:
    return build_serving_artifact(build_once)
