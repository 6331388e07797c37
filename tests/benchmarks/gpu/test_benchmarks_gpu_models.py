"""Models and kernels of benchmarks.gpu and its pack, on the stand-in for the GPU, which says nothing about speed.

Kernels run in the emulation, so a check that fails here would fail on any GPU.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import kernels as _gpu_kernels
from benchmarks.gpu import models as _gpu_models
from benchmarks.gpu import pack as pack_script
from benchmarks.gpu.eager import EagerModel
from benchmarks.gpu.engines import check_model, compare_logits
from benchmarks.gpu.kernels import Timing, copy_bandwidth, images_of, run_case
from benchmarks.gpu.memory import Arguments
from benchmarks.gpu.models import ModelOptions
from benchmarks.gpu.split import Planned, sizes_of, split_by_budget, split_by_plan
from helpers.gpu_packs import (
    SHAPE,
    emulated_kernels,
    fake_cuda,
    fake_library,
    gpu_pack,
    kernels,
    stand_in,
)
from helpers.support import BuildOnce
from picompile.synth.shapes import find_shape, shape_from_config
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import lower

__all__ = ["fake_cuda", "fake_library", "gpu_pack", "kernels"]


def test_kernels_of_both_devices_may_have_one_name() -> None:
    """As where whole layers are on one device or the other; in q4 their arguments are not the same."""
    shape, options = shape_from_config("two", SHAPE | {"num_hidden_layers": 2}), ModelOptions("q4", 0.7, 32, 40, 90, ())
    split = split_by_budget(sizes_of(shape, options), 0.75, "layers_dense")
    assert sorted(split.hot.values()) == [0, 384]
    graph = _gpu_models.model_graph(shape, options, split, dense=True)
    lowered = lower(graph, LowerOptions(40, 64, "float16", 1, "cuda", split.placement))
    assert {each.name for each in lowered.built.values()} & {each.name for each in lowered.accelerator_built.values()}
    uses = _gpu_models._uses(lowered)
    assert uses.keys() == lowered.weights.tensors.keys()
    assert {use["columns"] for use in uses.values() if use["parameter"] == "neuron_w"} == {64}


@pytest.mark.slow("runs whole models of a pack in the emulation")
def test_a_planned_split() -> None:
    """The split is the planner's, to the neuron."""
    shape, planned = find_shape("llama-70b"), Planned("4090", "reglu-70b")
    options = ModelOptions("q4", 1 / 3, 1024, 2048, 90, ())
    sizes = sizes_of(shape, options)
    split = split_by_plan(shape, sizes, options, planned, "hybrid")
    assert split.plan is not None
    assert len(set(split.hot.values())) > 40
    assert split.plan["hot_neurons"] == sum(split.hot.values())
    # About 60 % of the model, and no more than the GPU has.
    resident = sizes.layers * (sizes.attention + sizes.cache + sizes.predictor) + sizes.head
    resident += sum(split.hot.values()) * sizes.neuron
    assert 0.5 < resident / sizes.dense < split.budget < 0.7
    dense = split_by_plan(shape, sizes, options, planned, "layers_dense")
    assert dense.budget == split.budget and 0 < sum(count > 0 for count in dense.hot.values()) < 0.65 * shape.layers


def test_tokens_are_compared_where_the_margin_decides() -> None:
    right = np.array([[1.0, 0.5, 0.0], [1.0, 0.9999, 0.0], [0.0, 0.5, 1.0]])
    found = right + np.array([[0.0005, 0, 0], [0, 0.0005, 0], [0, 0, 0]])
    error, same, decided = compare_logits(found, right, 1e-3)
    assert (error, same, decided) == (pytest.approx(5e-4), 2, 2)
    assert compare_logits(found[:, ::-1], right, 1e-3)[1:] == (0, 2)
    assert compare_logits(np.full_like(right, np.nan), right, 1e-3)[0] == np.inf


def _pack(folder: Path) -> None:
    folder.mkdir()
    entries = {"checks": list(pack_script.checks(pack_script.arguments(["-o", str(folder)])))}
    (folder / "pack.json").write_text(json.dumps(entries))
    emulated_kernels(folder)


@pytest.fixture(scope="session")
def checks(build_once: BuildOnce) -> Path:
    """The folder of a pack of the model checks alone. Tests must not change it."""
    return build_once("gpu-checks", _pack)


def _entry(checks: Path, quant: str, variant: str) -> dict[str, Any]:
    entries = json.loads((checks / "pack.json").read_text())["checks"]
    (entry,) = (each for each in entries if (each["quant"], each["variant"]) == (quant, variant))
    return dict(entry)


@pytest.fixture
def emulated(checks: Path, fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The pack, with the stand-in in the place of the driver."""
    for name, value in stand_in(checks).items():
        monkeypatch.setenv(name, value)
    return checks


@pytest.mark.slow("runs models of a pack in the emulation")
@pytest.mark.parametrize(("quant", "variant"), [("f16", "gpu"), ("q8", "hybrid"), ("q4", "hybrid")])
def test_a_check_is_right(quant: str, variant: str, emulated: Path, tmp_path: Path) -> None:
    row = check_model(emulated, tmp_path / "work", _entry(emulated, quant, variant), 1)
    assert row["is_right"] and row["limit"] == 1e-3
    # Half of the limit is left for what a GPU does otherwise than the emulation: the order of its sums.
    assert row["error"] < 5e-4
    assert row["tokens"]["same"] == row["tokens"]["decided"] > 10


@pytest.mark.slow("runs models of a pack in the emulation")
@pytest.mark.parametrize("fault", ["rope", "eps", "head"])
def test_another_model_is_found(fault: str, emulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the engine turned or normalized otherwise; and a head that is unpacked in the format of blocks."""
    entry = _entry(emulated, "q4", "gpu")
    if fault == "rope":
        entry |= {"shape": entry["shape"] | {"rope_theta": 9000.0}}
    elif fault == "eps":
        entry |= {"shape": entry["shape"] | {"eps": 1e-2}}
    else:
        unpacked = EagerModel._unpacked

        def as_blocks(self: EagerModel, name: str, columns: int) -> Any:
            self._formats["lm_head.weight"] = "q4"
            return unpacked(self, name, columns)

        monkeypatch.setattr(EagerModel, "_unpacked", as_blocks)
    row = check_model(emulated, tmp_path / "work", entry, 1)
    assert not row["is_right"] and row["error"] > 1e-3


TIMING = Timing(2**15, 2**24, 0.0, 0.01, 1, 3)


@pytest.mark.slow("runs kernels of a pack in the emulation")
def test_a_wrong_kernel_is_found(gpu_pack: Path, kernels: dict[str, dict[str, Any]]) -> None:
    """As if it had been compiled with other parameters."""
    images, case = images_of(gpu_pack, "small"), kernels["norm"]
    other = case | {"parameters": case["parameters"] | {"eps": 1e-3}}
    ((right,), (wrong,)) = (list(run_case(images, each, "cpu", TIMING)) for each in (case, other))
    assert right["is_right"] and not wrong["is_right"] and "seconds" not in wrong


@pytest.mark.parametrize(("value", "is_right"), [(1.0 + 5e-4, True), (1.0 + 2e-3, False), (np.nan, False)])
def test_wrong_values_exceed_the_error_limit(value: float, is_right: bool) -> None:
    found = np.full((3, 4), -1, np.int32).view(np.float32)
    found[:2] = 1
    found[1, 3] = value
    assert (_gpu_kernels._error(found, np.ones((2, 4))) <= _gpu_kernels.LIMIT) == is_right
    assert not _gpu_kernels._is_stray(found, np.ones((2, 4)))
    found[2, 0] = 0
    assert _gpu_kernels._is_stray(found, np.ones((2, 4)))


@pytest.mark.slow("runs kernels of a pack in the emulation")
def test_weights_on_the_host_are_read(
    gpu_pack: Path, kernels: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix that is not where the kernel shall read it shows."""
    images = images_of(gpu_pack, "speed")
    rows = list(run_case(images, kernels["timed linear"], "cpu", TIMING))
    assert [row.get("weights") for row in rows] == [None, "host"]
    assert all(row["is_right"] and row["seconds"] > 0 for row in rows)
    assert copy_bandwidth(images, TIMING) > 0
    write = Arguments._write

    def elsewhere(self: Arguments, place: Any, value: Any, copy: int) -> None:
        write(self, place, value * (place.host is None), copy)

    monkeypatch.setattr(Arguments, "_write", elsewhere)
    on_gpu, on_host = run_case(images, kernels["timed linear"], "cpu")
    assert on_gpu["is_right"] and not on_host["is_right"]
