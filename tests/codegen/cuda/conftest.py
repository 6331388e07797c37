"""Fixtures for tests of kernels for GPUs."""

import pytest

from helpers.kernels.cuda_workbench import CudaWorkbench


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> CudaWorkbench:
    return CudaWorkbench(tmp_path_factory.mktemp("kernels"))
