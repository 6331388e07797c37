"""A whole model, rounded layer by layer."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from picompile.predictors.profile.state import StateFile
from picompile.progress import NoProgress
from picompile.rounding import RoundedWeights, RoundingDirectory, round_model
from picompile.rounding import run as rounding_run
from picompile.rounding.matrices import input_groups
from picompile.streaming import split_layers, stream_windows
from picompile.testing import RandomWeights, random_weights
from picompile_passes.formats.packing import dequantize_rows, quantize_rows
from picompile_passes.graph.materialize import WeightSource, evaluate_constant
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import LINEAR, SPARSE_FFN
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition

_WINDOWS = [
    torch.randint(503, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (96, 120)
]


def _logits(graph: GraphModule, weights: WeightSource) -> list[Tensor]:
    found: list[Tensor] = []
    stream_windows(graph, weights, _WINDOWS, lambda _, value: found.append(value))
    return found


def _round(graph: GraphModule, weights: WeightSource, folder: Path) -> RoundedWeights:
    return round_model(graph, weights, _WINDOWS, RoundingDirectory(folder, "inputs"), NoProgress())


def _distance(graph: GraphModule, weights: WeightSource, exact: Sequence[Tensor]) -> float:
    off = [a - b for a, b in zip(_logits(graph, weights), exact, strict=True)]
    return float(torch.cat(off).norm() / torch.cat(list(exact)).norm())


@pytest.mark.slow("rounds a whole model per family; one family is fast", but=("llama-relu",))
@pytest.mark.parametrize("name", ["llama-relu", "llama3-silu-tied", "opt-post-norm", "falcon-7b", "bitnet", "qwen2"])
def test_logits_are_closer_than_with_the_nearest_weights(name, quantized, tmp_path):
    """With gates and without, with tied heads, biases, attention beside the block, and a norm across neurons."""
    graph = quantized(name, "q4")
    weights = random_weights(graph, seed=1)
    exact = _logits(quantized(name, "f16"), weights)
    rounded = _round(graph, weights, tmp_path / "rounding")
    assert _distance(graph, rounded, exact) < 0.9 * _distance(graph, weights, exact)


@pytest.mark.slow("rounds a whole model per family; one is fast", but=("opt-post-norm",))
@pytest.mark.parametrize("name", ["llama-relu", "opt-post-norm", "falcon-7b"])
def test_all_matrices_are_rounded_but_tables(name, quantized, tmp_path):
    graph = quantized(name, "q4m")
    weights = random_weights(graph, seed=1)
    rounded = _round(graph, weights, tmp_path)
    matrices = {str(name): weights.load(name) for name in weights.names() if weights.load(name).dim() == 2}
    kept = {
        name
        for name in matrices
        if all(rounded.packed(name, form, t) is None for form in ("q4m", "q6") for t in (False, True))
    }
    assert all("embed" in name or "lm_head" in name for name in kept), kept
    for name in matrices.keys() - kept:
        for transposed in (False, True):
            packed = rounded.packed(name, "q4m", transposed)
            if packed is not None:
                matrix = matrices[name].T if transposed else matrices[name]
                near = dequantize_rows(packed, "q4m", matrix.shape[1])
                assert float((near - matrix).norm() / matrix.norm()) < 0.5


def test_inputs_are_those_of_the_layers_as_they_are_rounded(quantized, tmp_path, monkeypatch):
    graph = quantized("llama-relu", "q4")
    weights = random_weights(graph, seed=2)
    seen: list[Tensor] = []
    for name in ("round_rows", "round_neurons"):
        real = getattr(rounding_run, name)

        def spy(weight, moments, form, real=real):
            seen.append(moments.clone())
            return real(weight, moments, form)

        monkeypatch.setattr(rounding_run, name, spy)
    rounded = _round(graph, weights, tmp_path)
    inputs = {node: arguments(node)["x"] for node in calls(graph.graph, LINEAR, SPARSE_FFN)}
    sums: dict[object, Tensor] = {}

    def add(node, value):
        sums[node] = sums.get(node, 0) + value.T @ value

    stream_windows(graph, rounded, _WINDOWS, add, nodes=tuple(dict.fromkeys(inputs.values())))
    groups = [group for segment in split_layers(graph) for group in input_groups(segment)]
    matrices = [group for group in groups for _ in group.matrices]
    assert len(matrices) == len(seen)
    for group, moments in zip(matrices, seen, strict=True):
        if not group.of_neurons:
            torch.testing.assert_close(moments, sums[group.node], rtol=1e-4, atol=1e-3)


@pytest.mark.slow("rounds a model per case", but=("mask",))
@pytest.mark.parametrize(
    "insert",
    [InsertPredictors("sign", thresholds={0: 30.0, 1: 30.0}), InsertPredictors("none", output_limits=(0, 1))],
    ids=["mask", "limits"],
)
def test_neurons_that_are_kept_decide_what_down_is_rounded_for(insert, quantized, tmp_path, monkeypatch):
    """Neurons that the predictor or a limit leaves out count for nothing, though they fire."""
    graph = quantized("llama-relu", "q4", (insert,))
    weights = random_weights(graph, seed=2)
    limits = {name: 100 * value for name, value in weights.tensors.items() if name.endswith("_limits")}
    weights = RandomWeights(weights.tensors | limits)
    seen: list[Tensor] = []
    real = rounding_run.round_neurons

    def spy(weight, moments, form):
        seen.append(moments)
        return real(weight, moments, form)

    monkeypatch.setattr(rounding_run, "round_neurons", spy)
    _round(graph, weights, tmp_path / "masked")
    masked = [moments.diagonal().clone() for moments in seen]
    seen.clear()
    _round(quantized("llama-relu", "q4"), weights, tmp_path / "all")
    every = [moments.diagonal() for moments in seen]
    assert all(float(a.sum()) < 0.9 * float(b.sum()) for a, b in zip(masked, every, strict=True))


class _KilledError(Exception):
    pass


def test_what_was_begun_goes_on_to_the_same_bytes(quantized, tmp_path, monkeypatch):
    graph = quantized("llama-relu", "q4m")
    weights = random_weights(graph, seed=3)
    _round(graph, weights, tmp_path / "whole")
    real, saved = StateFile.save, []

    def save(self, *arguments):
        if len(saved) == 2:
            raise _KilledError
        saved.append(1)
        real(self, *arguments)

    monkeypatch.setattr(StateFile, "save", save)
    with pytest.raises(_KilledError):
        _round(graph, weights, tmp_path / "resumed")
    monkeypatch.setattr(StateFile, "save", real)
    _round(graph, weights, tmp_path / "resumed")
    whole, resumed = _files(tmp_path / "whole"), _files(tmp_path / "resumed")
    assert whole == resumed
    assert not [path for path in whole if path.startswith("state")]


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow("rounds a model again and again")
def test_a_complete_folder_is_read_and_other_inputs_begin_anew(quantized, tmp_path, monkeypatch):
    graph = quantized("llama-relu", "q4")
    weights = random_weights(graph, seed=4)
    _round(graph, weights, tmp_path)
    monkeypatch.setattr(rounding_run, "round_rows", lambda *_: pytest.fail("rounds again"))
    again = _round(graph, weights, tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    before = again.packed(name, "q4").clone()
    monkeypatch.undo()
    others = random_weights(graph, seed=5)
    other = round_model(graph, others, _WINDOWS, RoundingDirectory(tmp_path, "other"), NoProgress())
    assert not torch.equal(other.packed(name, "q4"), before)


@pytest.mark.slow("rounds a model twice")
def test_parts_of_a_block_have_the_rows_of_the_whole(quantized, tmp_path):
    """A plan may split a block in any way after its weights were rounded."""
    weights = random_weights(quantized("llama-relu", "q4"), seed=6)
    rounded = _round(quantized("llama-relu", "q4"), weights, tmp_path)
    split = quantized("llama-relu", "q4", (InsertPredictors(), Partition({0: (3, 17, 40)})))
    name = "model.layers.0.mlp.down_proj.weight"
    whole = rounded.packed(name, "q4", True)
    parts = [
        evaluate_constant(split, arguments(arguments(block)["down"])["packed"], rounded)
        for block in calls(split.graph, SPARSE_FFN)
        if block.meta["layer"] == 0
    ]
    assert len(parts) == 2
    assert sorted(len(part) for part in parts) == [3, len(whole) - 3]
    assert torch.equal(next(part for part in parts if len(part) == 3), whole[[3, 17, 40]])


def test_what_a_source_has_packed_already_stays(quantized, tmp_path):
    graph = quantized("llama-relu", "q4")
    weights = random_weights(graph, seed=7)
    name = "model.layers.0.self_attn.q_proj.weight"
    given = quantize_rows(weights.load(name), "q4")

    class Packed(RandomWeights):
        def packed(self, wanted: str, form: str, transposed: bool = False) -> Tensor | None:
            return given if wanted == name and form == "q4" and not transposed else None

    source = Packed({each: weights.load(each) for each in weights.names()})
    assert torch.equal(_round(graph, source, tmp_path).packed(name, "q4"), given)
