"""Models and kernels of benchmarks/gpu.py and its pack, on the stand-in for the GPU, which says nothing about speed.

Kernels run in the emulation, so a check that fails here would fail on any GPU.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.gpu_packs import (
    BENCHMARKS,
    SHAPE,
    emulated_kernels,
    fake_cuda,
    fake_library,
    gpu_pack,
    index_of,
    kernels,
    stand_in,
)
from helpers.support import BuildOnce

sys.path.insert(0, str(BENCHMARKS))

import _gpu_engines
import _gpu_kernels
import _gpu_models
import gpu_pack as pack_script
import prompt_counts
from _gpu_eager import EagerModel
from _gpu_engines import Plan, check_model, compare_logits, measure_model
from _gpu_kernels import Timing, copy_bandwidth, images_of, run_case
from _gpu_memory import Arguments
from _gpu_models import ModelOptions, model_graph
from _gpu_prepared import prepared
from _gpu_split import Planned, Split, sizes_of, split_by_budget, split_by_plan
from _sass import disassemble, loops_with

from picompile.synth.shapes import find_shape, shape_from_config
from picompile_codegen.cuda import write_kernel
from picompile_codegen.cuda.build import build_cuda
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import lower
from picompile_codegen.lowering.placement import ON_HOST, Placement
from picompile_codegen.specs import LinearSpec

__all__ = ["fake_cuda", "fake_library", "gpu_pack", "kernels"]


@pytest.mark.slow("runs whole models of a pack in the emulation")
@pytest.mark.parametrize("variant", ["cpu", "hybrid"])
def test_speed_of_a_model(
    variant: str,
    gpu_pack: Path,
    kernels: dict[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All on the CPU, and split over both devices."""
    entry = next(row for row in index_of(gpu_pack)["models"] if row["variant"] == variant)
    monkeypatch.setattr(_gpu_engines, "_COUNTED", 10)
    plan = Plan((3, 9, 39), 6, 10, 1)
    firing = {"active": 0.2, "skew": True}
    partial, whole = measure_model(gpu_pack, tmp_path / "work", entry, 2, firing, plan)
    # The context has no room for the last.
    assert partial["partial"] and partial["prompts"].keys() == {"3", "9"}
    assert whole["prompts"]["9"] > 0 and whole["prompts"]["39"] is None and "partial" not in whole
    for row in (partial, whole):
        assert row["tokens_per_s"] > 0 and row["is_right"] and row["taken_bytes"] is None
        assert row["depth"] == 6 and row["host_bytes_per_s"] > 0
        # The mean of 384 neurons and 10 tokens.
        assert 0.13 < row["computed"]["all"] < 0.27
        assert row["computed"]["all"] == row["bench"]["decode"]["computed_share"]
        assert (row["step"] is None) == (variant == "cpu")
    assert (whole["write_s"] > 0) and (tmp_path / "work" / "weights.safetensors").exists()


@pytest.mark.slow("runs whole models of a pack in the emulation")
def test_weights_are_written_once(
    gpu_pack: Path, kernels: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another variant, and another share of firing neurons, are written over them."""
    entries = {row["variant"]: gpu_pack / row["file"] for row in index_of(gpu_pack)["models"]}
    wrote = []
    for variant, active in (("cpu", 0.2), ("cpu", 0.2), ("cpu", 0.3), ("hybrid", 0.3), ("cpu", 0.2)):
        with prepared(entries[variant], tmp_path / "work", active=active, skew=True) as (folder, write_s):
            wrote.append(write_s > 0)
            assert (folder / "kernels" / "device.cubin").exists() == (variant == "hybrid")
    assert wrote == [True, False, True, True, True]
    # What was not finished is not taken for whole.
    monkeypatch.setattr("_gpu_weights.write_artifact", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError), prepared(entries["hybrid"], tmp_path / "work", active=0.2, skew=True):
        pass
    monkeypatch.undo()
    with prepared(entries["cpu"], tmp_path / "work", active=0.2, skew=True) as (_, write_s):
        assert write_s > 0


def test_kernels_of_both_devices_may_have_one_name() -> None:
    """As where whole layers are on one device or the other; in q4 their arguments are not the same."""
    shape, options = shape_from_config("two", SHAPE | {"num_hidden_layers": 2}), ModelOptions("q4", 0.7, 32, 40, 90, ())
    split = split_by_budget(sizes_of(shape, options), 0.75, "layers")
    assert sorted(split.hot.values()) == [0, 384]
    graph = _gpu_models.model_graph(shape, options, split, dense=False)
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


@pytest.mark.parametrize("on_gpu", [True, False])
def test_copies_and_launches_are_those_of_the_program(on_gpu: bool) -> None:
    shape = find_shape("tiny-reglu")
    placement = Placement.all_of(shape.layers) if on_gpu else ON_HOST
    split = Split(dict.fromkeys(range(shape.layers), 64), placement, 0.5)
    graph = model_graph(shape, ModelOptions("q4", 0.5, 32, 64, 89, ()), split, dense=False)
    lowered = lower(graph, LowerOptions(64, 16, "float16", 1, "cuda", split.placement))
    cold = prompt_counts.host_weight_bytes(lowered)
    assert cold > 0
    assert prompt_counts.copied_bytes(lowered, "prefill_last") == cold
    assert prompt_counts.copied_bytes(lowered, "decode") == 0
    device = [call for call in lowered.program.functions["decode"] if call.device == "device"]
    assert len(device) < prompt_counts.launches(lowered, "decode") < 3 * len(device)


def test_instructions_are_those_of_loops_that_multiply(tmp_path: Path) -> None:
    build_cuda([write_kernel(LinearSpec(format="q4", n=1024, k=1024, rows=64, bias=False))], tmp_path, 89)
    loops = [loop for text in disassemble(tmp_path / "device.cubin").values() for loop in loops_with(text, "HMMA")]
    assert loops and all(0 < loop["HMMA"] < sum(loop.values()) for loop in loops)
