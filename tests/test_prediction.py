"""Compilation with lossy predictors: what the artifact says of them, what the gate refuses, what a retry does again."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import picompile_runtime
from helpers.support import Cli
from picompile.artifact import files
from picompile.artifact.reuse import unchanged_tensors
from picompile.compile import compile_model
from picompile.config import CompileOptions
from picompile.errors import AccuracyError, UsageError
from picompile.frontend.captured import Captured
from picompile.frontend.checkpoint import fingerprint
from picompile.frontend.hf import load_model
from picompile.machine.targets import TARGETS
from picompile.predictors import files as predictor_files
from picompile.predictors.accuracy import AccuracyReport, check_artifact
from picompile.predictors.files import load_predictors
from picompile.predictors.predictor_set import PredictorSet
from picompile.predictors.store import LayerPredictor
from picompile.progress import Advance, NoProgress
from picompile_codegen.build import host_library as build
from picompile_codegen.build import host_library as toolchain
from picompile_codegen.build.isa import Isa
from picompile_codegen.cpu.kernel import Kernel
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import lower
from picompile_codegen.lowering.packing import Evaluate, PackedTensor
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.passes.canonicalize import CANONICALIZE
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline
from picompile_passes.predictors import PREDICTOR_KINDS, PredictorKind
from picompile_runtime.bench.perplexity import token_losses
from picompile_runtime.devices.machine import is_machine

RANK = 7
EVERY_NEURON = PredictorKind(
    "testing-every-neuron",
    lambda x, weights, threshold: torch.ones(*x.shape[:-1], len(weights[0]), dtype=torch.bool),
    lambda weights: len(weights[0]),
    row_local=True,
)


def write_predictors(model: Path, folder: Path, bias: float | Sequence[float], rank: int = RANK) -> Path:
    """Predictors of random weights: a large bias computes nearly all neurons, a small one few or none.

    Several are those of the neurons, in turns.
    """
    generator = torch.Generator().manual_seed(0)
    config = json.loads((model / "config.json").read_text())
    hidden, neurons = config["hidden_size"], config.get("intermediate_size") or config["ffn_dim"]
    tensors, layers = {}, []
    for layer in range(config["num_hidden_layers"]):
        tensors[f"layers.{layer}.fc1"] = torch.randn(rank, hidden, generator=generator) / hidden**0.5
        tensors[f"layers.{layer}.fc2"] = torch.randn(neurons, rank, generator=generator) / rank**0.5
        tensors[f"layers.{layer}.bias"] = torch.tensor(bias).repeat(neurons)[:neurons]
        layers.append(LayerPredictor(layer, "learned", "block", rank, parameters=1, bytes_f16=2))
    predictor_files.write_predictors(folder, layers, tensors, {"fingerprint": fingerprint(model), "name": "tiny"})
    return folder


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {number}: def f(x): return x ** {number}\n" for number in range(400)))
    return path


def compiled(model: Path, text: Path, folder: Path, *, bias: float = 0.0, **options: Any) -> dict[str, Any]:
    """Compile into `folder` with random predictors beside it; return what the report says of accuracy."""
    predictors = write_predictors(model, folder.with_name("predictors"), bias=bias)
    learned = {"predictor": "learned", "predictors": predictors, "calibration": (text,), "context": 64}
    compile_model(model, folder, CompileOptions(**{"quant": "f16", "check_tokens": 100, **learned, **options}))
    accuracy: dict[str, Any] = json.loads((folder / "report.json").read_text())["accuracy"]
    return accuracy


@pytest.mark.slow("compiles a model with predictors")
def test_the_artifact_says_what_its_predictors_cost(tiny_model: Path, held_out: Path, tmp_path: Path) -> None:
    accuracy = compiled(
        tiny_model, held_out, tmp_path / "artifact", context=128, accuracy_bound=math.inf, check_tokens=300
    )
    assert accuracy["bound"] is None
    assert accuracy["relative_change"] == pytest.approx(accuracy["perplexity"] / accuracy["dense_perplexity"] - 1)
    assert abs(accuracy["relative_change"]) > 1e-4, "half of the neurons are left out, and nothing is lost"
    assert [layer["rank"] for layer in accuracy["layers"]] == [RANK, RANK]
    assert all(0.2 < layer["recall"] < 0.8 for layer in accuracy["layers"])
    manifest = json.loads((tmp_path / "artifact" / "manifest.json").read_text())
    assert manifest["predictor"] == "learned"
    assert manifest["accuracy"]["relative_change"] == accuracy["relative_change"]
    low, high = accuracy["interval"]
    assert low < accuracy["relative_change"] < high
    with picompile_runtime.load(tmp_path / "artifact") as engine:
        ids = [5, 80, 3, 41, 7]
        masked = np.concatenate(list(engine.score(ids, masked=True)))
        engine.reset()
        dense = np.concatenate(list(engine.score(ids)))
        engine.reset()
        single = np.stack([engine.decode(token) for token in ids])
        size = np.abs(single).max()
        assert np.abs(masked - single).max() < 1e-4 * size, "chunks with masks leave out what decoding leaves out"
        assert np.abs(dense - single).max() > 1e-2 * size
        assert all(0.2 < part.computed_share < 0.8 for part in engine.firing())
    assert picompile_runtime.verify(tmp_path / "artifact").predictor == "learned"
    # Predictors that compute every neuron pass any bound.
    accuracy = compiled(tiny_model, held_out, tmp_path / "every", bias=1e4, accuracy_bound=1e-4)
    assert [layer["weighted_recall"] for layer in accuracy["layers"]] == [1, 1]


@pytest.mark.slow("compiles a model per format of predictors; whole models with predictors are fast elsewhere")
def test_figures_of_layers_are_of_packed_predictors(tiny_model: Path, held_out: Path, tmp_path: Path) -> None:
    found = {}
    for quant in ("f16", "q8", "q4"):
        options = {"predictor_quant": quant, "accuracy_bound": math.inf, "check_tokens": 200}
        layers = compiled(tiny_model, held_out, tmp_path / quant, **options)["layers"]
        found[quant] = np.array([layer["computed_share"] for layer in layers])
    differences = {quant: np.abs(shares - found["f16"]).max() for quant, shares in found.items()}
    assert 0 < differences["q4"] < 0.1
    assert differences["q8"] < differences["q4"]


@pytest.mark.slow("compiles a model with predictors")
def test_what_would_be_refused_is_read_as_it_is_generated(tiny_model: Path, held_out: Path, tmp_path: Path) -> None:
    predictors, counted = write_predictors(tiny_model, tmp_path / "predictors", bias=0.0), dict[str, int]()

    class Counted(NoProgress):
        @contextmanager
        def step(self, title: str, total: int | None = None) -> Iterator[Advance]:
            counted[title] = 0

            def advance(count: int) -> None:
                counted[title] += count

            yield advance

    options = CompileOptions(
        context=64,
        predictor="learned",
        predictors=predictors,
        calibration=(held_out,),
        accuracy_bound=math.inf,
        check_tokens=100,
    )
    compile_model(tiny_model, tmp_path / "artifact", options, Counted())
    whole, masked = "accuracy check, every neuron", "accuracy check, predicted neurons"
    assert [title for title in counted if title.startswith("accuracy check")] == [whole, masked]
    counted.clear()
    windows = [list(range(3, 40)), list(range(50, 70)), list(range(90, 110))]
    single = check_artifact(tmp_path / "artifact", windows, progress=Counted(), bound=-0.9)
    # Two windows are enough to be sure that chunks are beyond the bound.
    assert counted == {whole: 36 + 19 + 19, masked: 36 + 19, f"{masked}, as generated": 36 + 19 + 19}
    assert single.tokens == 36 + 19 + 19
    with picompile_runtime.load(tmp_path / "artifact") as engine:
        losses = np.concatenate([token_losses(engine, window, "tokens") for window in windows])
    assert single.perplexity == pytest.approx(math.exp(losses.mean()))


@pytest.mark.slow("compiles a model with predictors")
def test_an_accuracy_bound_that_is_not_met(cli: Cli, tiny_model: Path, held_out: Path, tmp_path: Path) -> None:
    predictors = write_predictors(tiny_model, tmp_path / "predictors", bias=-2.0)
    ended = cli(
        "compile", tiny_model, "-o", tmp_path / "artifact", "--predictor", "learned", "--predictors", predictors,
        "--calibration", held_out, "--context", 64, "--accuracy-bound", "0.01%", "--check-tokens", 200,
    )  # fmt: skip
    assert ended.code == 7
    assert ended.err.count("\n") == 1
    for said in ("0.01 %", "layers", "recall by contribution", "--accuracy-bound"):
        assert said in ended.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["predictors"]


@pytest.mark.slow("compiles a model")
def test_the_accuracy_check_of_code_for_another_machine(
    tiny_model: Path, held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads with code for this machine, of which nothing is left."""

    def build_what_runs_here(kernels: Iterable[Kernel], output: Path, isa: Isa, *_: Any) -> None:
        if is_machine(isa.machine):
            build_host_library(kernels, output, isa)
        else:
            output.write_bytes(isa.name.encode())

    build_host_library = build.build_host_library
    monkeypatch.setattr(build, "build_host_library", build_what_runs_here)
    monkeypatch.setattr(toolchain, "require_c_compilers", lambda isas: None)
    target = "cpu-arm64" if is_machine("x86_64") else "cpu-avx2"
    accuracy = compiled(tiny_model, held_out, tmp_path / "artifact", bias=1e4, target=target)
    assert accuracy["relative_change"] == pytest.approx(0, abs=1e-5)
    manifest = picompile_runtime.verify(tmp_path / "artifact")
    assert [variant.isa for variant in manifest.code] == list(TARGETS[target].isas)
    assert [path.name for path in (tmp_path / "artifact" / "kernels").iterdir()] == ["host.so"]


def test_predictors_and_options_that_do_not_fit(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    predictors = write_predictors(tiny_model, tmp_path / "predictors", bias=0.0)
    facts = json.loads((predictors / "predictors.json").read_text())
    facts["model"]["fingerprint"] = "0" * 64
    (predictors / "predictors.json").write_text(json.dumps(facts))
    ended = cli("compile", tiny_model, "-o", tmp_path / "out", "--predictor", "learned", "--predictors", predictors)
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "another model" in ended.err
    for option, value in (("--predictors", tmp_path), ("--profile", tmp_path), ("--calibration", tmp_path / "text")):
        ended = cli("compile", tiny_model, "-o", tmp_path / "out", "--quant", "f16", option, value)
        assert (ended.code, ended.err.count("\n")) == (2, 1) and "choose learned" in ended.err
    # A module in memory has no text to be judged by, and a kind with weights comes in a folder.
    with pytest.raises(UsageError, match="model folder"):
        compile_model(load_model(tiny_model), tmp_path / "out", CompileOptions(predictor="learned", context=32))
    with pytest.raises(UsageError, match="learned-relu"):
        CompileOptions(predictor="learned-relu")
    assert [path.name for path in tmp_path.iterdir()] == ["predictors"]


@pytest.mark.slow("compiles a model")
def test_a_plug_in_kind_without_weights(tiny_model: Path, held_out: Path, tmp_path: Path) -> None:
    """It is inserted in every layer; where it has no kernel, that is said."""
    PREDICTOR_KINDS.add(EVERY_NEURON)
    options = CompileOptions(context=64, predictor=EVERY_NEURON.name, accuracy_bound=None)
    with pytest.raises(UnsupportedGraphError, match=EVERY_NEURON.name):
        compile_model(tiny_model, tmp_path / "artifact", options)
    assert list(tmp_path.iterdir()) == []


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


def retrying(predictors: Path, text: Path) -> CompileOptions:
    # In q4 the arithmetic of prompts and of decoding differs by more than the bound.
    learned = {"predictor": "learned", "predictors": predictors, "calibration": (text,)}
    return CompileOptions(quant="f16", context=64, accuracy_bound=1e-4, check_tokens=100, **learned)


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
    tiny_model: Path,
    held_out: Path,
    tmp_path: Path,
    small_and_large: tuple[Path, Path],
    evaluated: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without room for two it computes everything again; the last attempt may be refused, and leaves nothing."""
    small, large = small_and_large
    compile_model(tiny_model, tmp_path / "at-once", retrying(large, held_out))
    once = Counter(evaluated)
    evaluated.clear()
    said = Mock(wraps=NoProgress())
    report = compile_model(tiny_model, tmp_path / "retried", retrying(small, held_out), said)
    assert report is not None and report.met
    assert sum("trying larger predictors there" in call.args[0] for call in said.say.call_args_list) == 1
    # Each of two layers has three tensors of its predictor; all others are read as often as without a retry.
    parts = [f"predictors.layers.{layer}.{part}" for layer in range(2) for part in ("fc1", "fc2", "bias")]
    assert Counter(evaluated) - once == Counter(parts)
    assert once["model.norm.weight"] == 1 and len(once) > 2 * len(parts)
    assert contents(tmp_path / "retried") == contents(tmp_path / "at-once")
    assert picompile_runtime.verify(tmp_path / "retried").predictor == "learned"
    evaluated.clear()
    with monkeypatch.context() as patch:
        patch.setattr(files, "has_room", lambda output, size: not list(tmp_path.glob(".*.partial/artifact-*")))
        compile_model(tiny_model, tmp_path / "without-room", retrying(small, held_out))
    assert contents(tmp_path / "without-room") == contents(tmp_path / "at-once")
    assert evaluated.count("model.norm.weight") == 2
    with pytest.raises(AccuracyError, match="the predictors raise the perplexity") as error:
        monkeypatch.setattr(AccuracyReport, "met", False)
        compile_model(tiny_model, tmp_path / "refused", retrying(small, held_out))
    assert error.value.exit_code == 7
    assert {path.name for path in tmp_path.iterdir()} == {"at-once", "large", "retried", "small", "without-room"}


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
