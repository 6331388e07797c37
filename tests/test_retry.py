"""A compilation that tries again with larger predictors: what it computes again, and what it comes to."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import picompile_runtime
from picompile.artifact import files
from picompile.artifact.reuse import unchanged_tensors
from picompile.compile import compile_model
from picompile.config import CompileOptions
from picompile.errors import AccuracyError
from picompile.frontend import Captured, load_model
from picompile.predictors import load_predictors
from picompile.predictors.predictor_set import PredictorSet
from picompile.progress import NoProgress
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import lower
from picompile_codegen.lowering.packing import Evaluate, PackedTensor
from picompile_passes.passes.canonicalize import CANONICALIZE
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline
from test_prediction import held_out, write_predictors

__all__ = ["held_out"]


class Said(NoProgress):
    """Keeps the lines that a user would see."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parameters that are read to be packed, in order, as often as they are read."""
    names: list[str] = []
    write_weights = files.write_weights

    def recording(path: Path, tensors: Any, evaluate: Evaluate, *others: Any) -> str:
        def recorded(node: Node) -> Tensor:
            names.extend(parameters_of(node))
            return evaluate(node)

        return write_weights(path, tensors, recorded, *others)

    monkeypatch.setattr(files, "write_weights", recording)
    return names


def parameters_of(node: Node) -> Iterator[str]:
    if node.op == "get_attr":
        yield str(node.target)
    for each in node.all_input_nodes:
        yield from parameters_of(each)


def contents(folder: Path) -> Mapping[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def options(predictors: Path, text: Path, bound: float = 1e-4) -> CompileOptions:
    return CompileOptions(
        # In q4 the arithmetic of prompts and of decoding differs by more than the bound.
        quant="f16",
        context=64,
        predictor="learned",
        predictors=predictors,
        calibration=(text,),
        gate=bound,
        gate_tokens=100,
    )


@pytest.fixture
def small_and_large(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Predictors that compute few neurons, and larger ones that the retry takes, which compute all."""
    small = write_predictors(tiny_model, tmp_path / "small", bias=-2.0)
    large = write_predictors(tiny_model, tmp_path / "large", bias=1e4, rank=11)

    def choose_larger(self: PredictorSet, layers: Sequence[int]) -> PredictorSet | None:
        assert self.predictors is not None
        if self.predictors.path == large:
            return None
        assert layers, "no layer loses anything"
        return replace(self, predictors=load_predictors(large))

    monkeypatch.setattr(PredictorSet, "choose_larger", choose_larger)
    return small, large


@pytest.mark.slow("compiles a model and trains its predictors again")
def test_a_retry_computes_predictors_alone(
    tiny_model: Path, held_out: Path, tmp_path: Path, small_and_large: tuple[Path, Path], evaluated: list[str]
) -> None:
    small, large = small_and_large
    compile_model(tiny_model, tmp_path / "at-once", options(large, held_out))
    once = Counter(evaluated)
    evaluated.clear()
    said = Said()
    report = compile_model(tiny_model, tmp_path / "retried", options(small, held_out), said)
    assert report is not None and report.met
    assert sum("trying larger predictors there" in line for line in said.lines) == 1
    # Each of two layers has three tensors of its predictor; all others are read as often as without a retry.
    parts = [f"predictors.layers.{layer}.{part}" for layer in range(2) for part in ("fc1", "fc2", "bias")]
    assert Counter(evaluated) - once == Counter(parts)
    assert once["model.norm.weight"] == 1 and len(once) > 2 * len(parts)
    assert contents(tmp_path / "retried") == contents(tmp_path / "at-once")
    assert picompile_runtime.verify(tmp_path / "retried").predictor == "learned"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["at-once", "large", "retried", "small"]


@pytest.mark.slow("compiles a model and trains its predictors again")
def test_without_room_for_two_a_retry_computes_everything(
    tiny_model: Path,
    held_out: Path,
    tmp_path: Path,
    small_and_large: tuple[Path, Path],
    evaluated: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small, large = small_and_large
    compile_model(tiny_model, tmp_path / "at-once", options(large, held_out))
    evaluated.clear()
    monkeypatch.setattr(files, "has_room", lambda output, size: not list(tmp_path.glob(".*.partial/artifact-*")))
    compile_model(tiny_model, tmp_path / "retried", options(small, held_out))
    assert contents(tmp_path / "retried") == contents(tmp_path / "at-once")
    assert evaluated.count("model.norm.weight") == 2


@pytest.mark.slow("compiles a model and trains its predictors again")
def test_the_last_attempt_is_refused_and_leaves_nothing(
    tiny_model: Path, held_out: Path, tmp_path: Path, small_and_large: tuple[Path, Path]
) -> None:
    with pytest.raises(AccuracyError, match="the predictors raise the perplexity") as error:
        # A bound that nothing meets.
        compile_model(tiny_model, tmp_path / "artifact", options(small_and_large[0], held_out, bound=-1.0))
    assert error.value.exit_code == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "small"]


def packed(
    captured: Captured, rank: int, hot: Mapping[int, Sequence[int]]
) -> tuple[GraphModule, Sequence[PackedTensor]]:
    """The graph with learned predictors of `rank`, and its packed tensors."""
    insert = InsertPredictors("learned", ranks={0: rank, 1: rank})
    passes = (*CANONICALIZE, insert, Partition(hot), Quantize("q4"))
    graph_module = Pipeline(passes)(captured.graph_module).graph_module
    return graph_module, [*lower(graph_module, LowerOptions(32, 16, "float16")).weights.tensors.values()]


def zeros(node: Node) -> Tensor:
    return torch.zeros(node.meta["val"].shape, dtype=node.meta["val"].dtype)


def test_tensors_of_another_hot_part_are_not_copied(tiny_model: Path, tmp_path: Path) -> None:
    """A larger predictor may leave less room for hot neurons, so that the parts of a block are others."""
    captured, path = load_model(tiny_model), tmp_path / "weights.safetensors"
    old = packed(captured, 3, {0: range(64), 1: range(64)})
    files.write_weights(path, old[1], zeros, lambda _: None)
    same = unchanged_tensors(path, old, old)
    assert {tensor.name for tensor in old[1]} - same.keys() >= {"predictors.layers.0.fc1", "predictors.layers.1.bias"}
    new = packed(captured, 5, {0: range(64, 128), 1: range(64)})
    kept = unchanged_tensors(path, old, new)
    assert same.keys() - kept.keys() == {
        *("layer_0_cold_neurons", "layer_0_hot_neurons", "layers.0.ffn.neurons.cold", "layers.0.ffn.neurons.hot")
    }
    assert kept == {name: same[name] for name in kept}
    assert {"layers.1.ffn.neurons.hot", "model.norm.weight"} <= kept.keys()
