from __future__ import annotations

import pytest

from helpers.kernels.cuda_workbench import EITHER, CudaWorkbench
from helpers.kernels.regions import Regions
from helpers.kernels.workbench import Workbench


@pytest.fixture(scope="session")
def regions(tmp_path_factory: pytest.TempPathFactory) -> Regions:
    """The tools of regions.py."""
    return Regions(tmp_path_factory.mktemp("regions"))


@pytest.fixture(scope="module", params=EITHER["either"])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """Kernels for the CPU, and those for a GPU in the emulation."""
    folder = tmp_path_factory.mktemp("kernels")
    return Workbench(folder / "host.so") if request.param == "cpu" else CudaWorkbench(folder)
