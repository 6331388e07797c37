"""The models of benchmarks/gpu.py, on the stand-in for the GPU: whether they are right, and nothing about speed."""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from helpers.gpu_packs import BENCHMARKS, BUDGET, SHAPE, fake_cuda, fake_library, gpu_pack, index_of, kernels

sys.path.insert(0, str(BENCHMARKS))

import _gpu_dense
import _gpu_engines
import _gpu_models
import _gpu_prepared
from _gpu_dense import CopiedDecoder
from _gpu_engines import Plan, compare_logits, measure_model
from _gpu_models import ModelOptions
from _gpu_prepared import prepared, work_folder
from _gpu_split import Planned, sizes_of, split_by_budget, split_by_plan
from _gpu_weights import Firing

from picompile.synth import find_shape
from picompile.synth.shapes import shape_from_config
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import lower
from picompile_runtime import open_artifact
from picompile_runtime.engine.layout import weights_of

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
    assert (
        partial["partial"] and partial["prompts"].keys() == {"3", "9"} and whole["prompts"].keys() == {"3", "9", "39"}
    )
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


def test_a_place_with_room_is_found(tmp_path: Path) -> None:
    assert work_folder(tmp_path, 0) == tmp_path / "picompile-gpu"
    assert work_folder(None, 2**60).parent == Path(tempfile.gettempdir())
    # What an earlier command left there counts as room.
    assert not _gpu_prepared.has_room(tmp_path, shutil.disk_usage(tmp_path).free + 2**30)
    (tmp_path / "picompile-gpu").mkdir()
    with (tmp_path / "picompile-gpu" / "weights").open("wb") as file:
        file.truncate(2**40)
    assert _gpu_prepared.has_room(tmp_path, shutil.disk_usage(tmp_path).free + 2**30)


def test_tokens_are_compared_where_the_margin_decides() -> None:
    right = np.array([[1.0, 0.5, 0.0], [1.0, 0.9999, 0.0], [0.0, 0.5, 1.0]])
    found = right + np.array([[0.0005, 0, 0], [0, 0.0005, 0], [0, 0, 0]])
    error, same, decided = compare_logits(found, right, 1e-3)
    assert (error, same, decided) == (pytest.approx(5e-4), 2, 2)
    assert compare_logits(found[:, ::-1], right, 1e-3)[1:] == (0, 2)
    assert compare_logits(np.full_like(right, np.nan), right, 1e-3)[0] == np.inf


@pytest.mark.slow("runs whole models of a pack in the emulation")
def test_the_hybrid_model_keeps_to_its_budget(gpu_pack: Path, tmp_path: Path) -> None:
    (entry,) = index_of(gpu_pack)["checks"]
    assert 0 < entry["hot"] < SHAPE["intermediate_size"]
    with prepared(gpu_pack / entry["file"], tmp_path / "work", active=0.2, skew=True) as (folder, _):
        artifact = open_artifact(folder)
        names = set(weights_of(artifact.program, "device")) - artifact.program.streamed
        weights = sum(artifact.tensors[name].size_bytes for name in names)
        artifact.close()
    # Tables of neurons and angles are beside it.
    assert weights < BUDGET * entry["dense_bytes"] + 2**14


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


@pytest.mark.parametrize("skew", [False, True])
@pytest.mark.parametrize("hot", [0, 100, 1000])
def test_firing_rates_of_hot_and_cold_neurons(skew: bool, hot: int) -> None:
    firing = Firing(active=0.05, skew=skew, neurons=1000)
    of_hot, of_cold = firing.rates(hot)
    share = hot / 1000
    assert share * of_hot + (1 - share) * of_cold == pytest.approx(0.05)
    assert (of_hot > of_cold) == (skew and hot == 100)
    named = np.random.default_rng(hot).standard_normal((500, 1000)) + firing.biases(hot) > 0
    assert named.mean() == pytest.approx(0.05, abs=0.003)


@pytest.mark.parametrize("quant", ["f16", "q4"])
def test_copied_layers(quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"hidden": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "layers": 4, "vocab": 50}
    elements = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96
    entry = {"shape": shape, "quant": quant, "layer_bytes": 2 * elements, "resident_layers": 1, "context": 10}
    monkeypatch.setattr(_gpu_dense, "_DEVICE", "cpu")
    monkeypatch.setattr(torch, "cuda", MagicMock())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    decoder = CopiedDecoder(entry)
    for _ in range(3):
        y = decoder.step()
    assert y.shape == ((1, 50) if quant == "f16" else (1, 64)) and torch.isfinite(y).all()
    # Two buffers are ahead.
    assert decoder._next == 3 * 3 + 2 and decoder.missing_bytes == 3 * 2 * elements


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
