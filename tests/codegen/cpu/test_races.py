"""No two tasks of a parallel region meet: the tools that prove it find races, and some kernels that have none.

Most programs are checked where they are compiled anyway, in test_lower_predictors.py and test_lower_sequences.py.
"""

import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.kernels.lowered import Runner
from helpers.kernels.regions import Regions, check_step, every_region
from picompile.testing import OPT, build, random_weights
from picompile_codegen.build import host_library as build_module
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import lower
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline
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


@pytest.mark.slow("compiles a whole program; single kernels are fast")
def test_no_races_with_a_q8_cache_for_several_sequences(regions: Regions, tmp_path: Path) -> None:
    """A whole program with a q8 cache for several sequences; see test_lower_predictors.py for more."""
    shape = replace(OPT, layers=1, ffn=45)
    graph_module = Pipeline((InsertPredictors("none"), Quantize("f16")))(build(shape)).graph_module
    with every_region():
        lowered = lower(graph_module, LowerOptions(context=32, chunk=5, kv_dtype="q8", sequences=3))
    runner = Runner(tmp_path / "host.so", lowered, graph_module, random_weights(graph_module))
    tokens = np.random.default_rng().integers(0, shape.vocab, 12).tolist()
    for function, start, end in (("prefill", 0, 5), ("prefill_last", 5, 8), ("decode", 8, 9), ("score", 9, 12)):
        runner.position = start
        runner.prepare(tokens[start:end])
        check_step(runner, function, regions)
    runner.prepare_batch(tokens[:3], [12, 0, 1], [0, 2, 1])
    check_step(runner, "batch", regions)
