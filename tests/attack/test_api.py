"""A short share of the attack on the runtime's API, the same calls in every run."""

from __future__ import annotations

from pathlib import Path

import api
import pytest


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return api.write_folders(tmp_path_factory.mktemp("api"))


@pytest.mark.slow("makes hundreds of random calls per seed", but=("0",))
@pytest.mark.parametrize("seed", range(12))
def test_wrong_calls_are_refused_and_change_nothing(seed: int, folders: list[Path]) -> None:
    assert not api.attack(folders, seed)
