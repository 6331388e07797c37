from __future__ import annotations

from pathlib import Path

import pytest
from artifacts import Base, find_bases, make_bases

from helpers.support import BuildOnce


@pytest.fixture(scope="session")
def bases(build_once: BuildOnce) -> list[Base]:
    """Artifacts to damage; see artifacts.make_bases."""

    def make(folder: Path) -> None:
        folder.mkdir()
        make_bases(folder)

    return find_bases(build_once("attacked-artifacts", make))
