from __future__ import annotations

import pytest

from helpers.kernels.cuda_workbench import EITHER, CudaWorkbench
from helpers.kernels.regions import Regions
from helpers.kernels.workbench import Workbench
from picompile_codegen.build.isa import Isa


@pytest.fixture(autouse=True)
def _plain_code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fast tests of kernels have these compiled without LLVM's optimizations, which take more than half of the time.

    Models, in the tests of all other folders, have the code of users' artifacts, and so have slow tests of kernels.
    """
    if request.node.get_closest_marker("slow") is None:
        llvm = Isa.llvm.fget  # type: ignore[attr-defined]
        monkeypatch.setattr(Isa, "llvm", property(lambda isa: llvm(isa) | {"opt-level": 0}))


@pytest.fixture(scope="session")
def regions(tmp_path_factory: pytest.TempPathFactory) -> Regions:
    """The tools of regions.py."""
    return Regions(tmp_path_factory.mktemp("regions"))


@pytest.fixture(scope="module", params=EITHER["either"])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """Kernels for the CPU, and those for a GPU in the emulation."""
    folder = tmp_path_factory.mktemp("kernels")
    return Workbench(folder / "host.so") if request.param == "cpu" else CudaWorkbench(folder)
