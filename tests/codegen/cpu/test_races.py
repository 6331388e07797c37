"""The tools that prove that no two tasks of a parallel region meet find races.

Programs are checked where they are compiled anyway, in test_lower_blocks.py and test_lower_sequences.py.
"""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from helpers.kernels.regions import Regions
from picompile_codegen.build import host_library as build_module
from picompile_runtime.devices.cpu.native import HostLibrary

HERE = Path(__file__).parent
HOST_C = Path(build_module.__file__).parent / "native" / "host.c"


@pytest.fixture(scope="module")
def racy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("racy") / "host.so"
    flags = ["-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-shared", "-fPIC"]
    command = ["gcc", *flags, "-Wl,-Bsymbolic", "-o", str(path), str(HOST_C), str(HERE / "racy_kernels.c"), "-lpthread"]
    subprocess.run(command, check=True)
    return path


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        ("right", None),
        ("writes_the_next", "writes a byte of task"),
        ("writes_the_same_as_all", "writes a byte of task"),
        ("writes_the_same_as_the_next", "writes a byte of task"),
        ("writes_where_the_next_says", "reads what other tasks write"),
        ("reads_the_last", "reads what other tasks write"),
        ("adds_up_on_the_stack", "the stack"),
    ],
)
def test_races_are_found(kernel: str, problem: str | None, racy: Path, regions: Regions) -> None:
    library = HostLibrary(racy)
    x, y = np.arange(1, 12, dtype=np.int32), np.arange(100, 110, dtype=np.int32)
    calls = library.bind([(kernel, [x, y])])

    def check() -> None:
        with regions.checked(racy, [x, y], kernel):
            library.run(calls, 1)

    if problem is None:
        check()
        np.testing.assert_array_equal(y, np.arange(100, 110) + np.arange(1, 11))
    else:
        with pytest.raises(AssertionError, match=problem):
            check()
    assert regions.counts().writers == 10
