from __future__ import annotations

import pytest

from helpers.kernels.regions import Regions


@pytest.fixture(scope="session")
def regions(tmp_path_factory: pytest.TempPathFactory) -> Regions:
    """The tools of regions.py."""
    return Regions(tmp_path_factory.mktemp("regions"))
