"""No two tasks of a parallel region meet: the kernels, which no sanitizer sees, are free of races.

Whole programs of small models run call by call, each loop iteration a task of its own, under region_checker.c.
"""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from lowered import Runner
from regions import TASKS, Regions

from picompile.testing import Shape, build, random_weights
from picompile_codegen import build as build_module
from picompile_codegen.kernels import tensor
from picompile_codegen.lower import LowerOptions, lower
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline
from picompile_runtime.native import HostLibrary

HERE = Path(__file__).parent
HOST_C = Path(build_module.__file__).parent / "native" / "host.c"


@pytest.fixture(scope="module")
def regions(tmp_path_factory: pytest.TempPathFactory) -> Regions:
    return Regions(tmp_path_factory.mktemp("regions"))


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
        with regions.checked(racy, [x, y]):
            library.run(calls, 1)

    if problem is None:
        check()
        np.testing.assert_array_equal(y, np.arange(100, 110) + np.arange(1, 11))
    else:
        with pytest.raises(AssertionError, match=problem):
            check()
    assert regions.counts().writers == 10


GATED = Shape(hidden=72, heads=3, ffn=77, vocab=90, layers=6)
PLAIN = Shape(hidden=66, heads=3, ffn=131, vocab=50, layers=3, gated=False, activation="relu2")
PARALLEL = Shape(hidden=72, heads=3, ffn=77, vocab=50, layers=3, activation="silu", parallel=True)
CASES = {
    "gated-q4": (
        GATED,
        InsertPredictors(
            "learned",
            kinds={1: "sign", 2: "learned-relu", 3: "exact", 4: "none"},
            ranks={0: 5, 2: 33, 5: 5},
            inputs={2: "stream", 5: "previous"},
        ),
        "q4",
        {},
    ),
    "plain-q8": (PLAIN, InsertPredictors("exact", kinds={0: "learned"}, ranks={0: 20}), "q8", {}),
    "parts-f16": (PARALLEL, InsertPredictors("learned", kinds={1: "sign", 2: "none"}, ranks={0: 12}), "f16", {0: range(0, 75, 2)}),
}
# What a step reads, after how many tokens.
STEPS = (("prefill", 5), ("prefill_last", 3), ("decode", 1), ("decode", 1), ("score", 4))


@pytest.fixture(scope="module")
def runner_of(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Compiles a case; each region that a kernel could have is one, however small its work."""

    def compile_(name: str, path: Path) -> Runner:
        shape, predictors, quant, hot = CASES[name]
        passes = (predictors, Partition(hot), Quantize(quant))
        graph_module = Pipeline(passes)(build(shape)).graph_module
        lowered = lower(graph_module, LowerOptions(context=32, chunk=5, kv_dtype="float16"))
        return Runner(path, lowered, graph_module, random_weights(graph_module))

    return compile_


@pytest.mark.parametrize("name", list(CASES))
def test_no_two_tasks_meet(name: str, runner_of: object, regions: Regions, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tensor, "_WORTH_A_REGION_BYTES", 0)
    path = tmp_path / "host.so"
    runner = runner_of(name, path)
    library = HostLibrary(path)
    rng = np.random.default_rng()
    for function, tokens in STEPS:
        runner.prepare(rng.integers(0, 50, tokens).tolist())
        memory = runner.written()
        start = [part.copy() for part in memory]

        def again() -> None:
            for part, value in zip(memory, start, strict=True):
                part[...] = value

        library.run(library.bind(runner.calls(function)), 3)
        expected = [part.copy() for part in memory]

        def check(how) -> None:
            for part, value in zip(memory, expected, strict=True):
                assert (part.reshape(-1).view(np.uint8) == value.reshape(-1).view(np.uint8)).all(), f"{function}, {how}: other bytes"

        again()
        for i, (kernel, arrays) in enumerate(runner.calls(function)):
            try:
                with regions.checked(path, arrays):
                    library.run(library.bind([(kernel, arrays)]), 1)
            except AssertionError as error:
                raise AssertionError(f"{function}, call {i}, {kernel}: {error}") from None
        check("checked")
        counts = regions.counts()
        assert counts.regions > 10
        assert counts.writers < TASKS / 2
        print(function, counts)
        for seed in (0, 1):
            again()
            with regions.ordered(path, 7, seed):
                library.run(library.bind(runner.calls(function)), 1)
            check("ordered")
        runner.position += tokens
