"""Compilation with lossy predictors: where they come from, what the artifact says of them, what the gate refuses."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import picompile_runtime
from helpers.support import BUNDLED_MODEL, Cli
from picompile.compile import compile_model
from picompile.config import CompileOptions
from picompile.errors import AccuracyError, UsageError
from picompile.frontend.checkpoint import fingerprint
from picompile.machine import TARGETS
from picompile.predictors import LayerPredictor, save_predictors
from picompile.predictors.accuracy import check_artifact
from picompile.progress import Advance, NoProgress
from picompile_codegen.build import host_library as build
from picompile_codegen.build import host_library as toolchain
from picompile_codegen.build.isa import Isa
from picompile_codegen.cpu import Kernel
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.predictors import PredictorKind, add_predictor_kind
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
    save_predictors(folder, layers, tensors, {"fingerprint": fingerprint(model), "name": "tiny"})
    return folder


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {number}: def f(x): return x ** {number}\n" for number in range(400)))
    return path


@pytest.mark.slow("compiles a model with predictors")
def test_the_artifact_says_what_its_predictors_cost(tiny_model: Path, held_out: Path, tmp_path: Path) -> None:
    predictors = write_predictors(tiny_model, tmp_path / "predictors", bias=0.0)
    options = CompileOptions(
        quant="f16",
        context=128,
        predictor="learned",
        predictors=predictors,
        calibration=(held_out,),
        gate=math.inf,
        gate_tokens=300,
    )
    compile_model(tiny_model, tmp_path / "artifact", options)
    accuracy = json.loads((tmp_path / "artifact" / "report.json").read_text())["accuracy"]
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


def test_figures_of_layers_are_of_packed_predictors(tiny_model: Path, held_out: Path, tmp_path: Path) -> None:
    predictors = write_predictors(tiny_model, tmp_path / "predictors", bias=0.0)
    found = {}
    for quant in ("f16", "q8", "q4"):
        options = CompileOptions(
            quant="f16",
            predictor_quant=quant,
            context=64,
            predictor="learned",
            predictors=predictors,
            calibration=(held_out,),
            gate=math.inf,
            gate_tokens=200,
        )
        compile_model(tiny_model, tmp_path / quant, options)
        layers = json.loads((tmp_path / quant / "report.json").read_text())["accuracy"]["layers"]
        found[quant] = np.array([layer["computed_share"] for layer in layers])
    differences = {quant: np.abs(shares - found["f16"]).max() for quant, shares in found.items()}
    assert 0 < differences["q4"] < 0.1
    assert differences["q8"] < differences["q4"]


@pytest.mark.slow("compiles a model with predictors")
def test_a_check_that_is_off_measures_nothing(cli: Cli, tiny_model: Path, held_out: Path, tmp_path: Path) -> None:
    predictors = write_predictors(tiny_model, tmp_path / "predictors", bias=0.0)
    ended = cli(
        "compile", tiny_model, "-o", tmp_path / "artifact", "--predictor", "learned", "--predictors", predictors,
        "--calibration", held_out, "--context", 64, "--gate", "off",
    )  # fmt: skip
    assert ended.code == 0
    assert "was not measured (--gate off)" in ended.out
    assert "accuracy" not in json.loads((tmp_path / "artifact" / "report.json").read_text())


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
        context=64, predictor="learned", predictors=predictors, calibration=(held_out,), gate=math.inf, gate_tokens=100
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
def test_an_accuracy_bound_that_is_not_met(cli: Cli, held_out: Path, tmp_path: Path) -> None:
    predictors = write_predictors(BUNDLED_MODEL, tmp_path / "predictors", bias=-2.0)
    ended = cli(
        "compile", BUNDLED_MODEL, "-o", tmp_path / "artifact", "--predictor", "learned", "--predictors", predictors,
        "--calibration", held_out, "--context", 64, "--gate", "0.01%", "--gate-tokens", 200,
    )  # fmt: skip
    assert ended.code == 7
    assert ended.err.count("\n") == 1
    for said in ("0.01 %", "layers", "recall by contribution", "--gate"):
        assert said in ended.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["predictors"]


@pytest.mark.slow("compiles a model with predictors")
def test_predictors_that_compute_every_neuron_pass_any_bound(tiny_model: Path, held_out: Path, tmp_path: Path) -> None:
    predictors = write_predictors(tiny_model, tmp_path / "predictors", bias=1e4)
    options = CompileOptions(
        quant="f16",
        context=64,
        predictor="learned",
        predictors=predictors,
        calibration=(held_out,),
        gate=1e-4,
        gate_tokens=100,
    )
    compile_model(tiny_model, tmp_path / "artifact", options)
    accuracy = json.loads((tmp_path / "artifact" / "report.json").read_text())["accuracy"]
    assert [layer["weighted_recall"] for layer in accuracy["layers"]] == [1, 1]


def test_the_accuracy_check_of_code_for_another_machine(
    tiny_model: Path, held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads with code for this machine, of which nothing is left."""

    def build_what_runs_here(kernels: Iterable[Kernel], output: Path, isa: Isa) -> None:
        if is_machine(isa.machine):
            build_host_library(kernels, output, isa)
        else:
            output.write_bytes(isa.name.encode())

    build_host_library = build.build_host_library
    monkeypatch.setattr(build, "build_host_library", build_what_runs_here)
    monkeypatch.setattr(toolchain, "require_c_compilers", lambda isas: None)
    target = "cpu-arm64" if is_machine("x86_64") else "cpu-avx2"
    predictors = write_predictors(tiny_model, tmp_path / "predictors", bias=1e4)
    options = CompileOptions(
        target, "f16", "learned", context=64, predictors=predictors, calibration=(held_out,), gate_tokens=100
    )
    compile_model(tiny_model, tmp_path / "artifact", options)
    report = json.loads((tmp_path / "artifact" / "report.json").read_text())
    assert report["accuracy"]["relative_change"] == pytest.approx(0, abs=1e-5)
    manifest = picompile_runtime.verify(tmp_path / "artifact")
    assert [variant.isa for variant in manifest.code] == list(TARGETS[target].isas)
    assert [path.name for path in (tmp_path / "artifact" / "kernels").iterdir()] == ["host.so"]


def test_predictors_of_another_model(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    predictors = write_predictors(tiny_model, tmp_path / "predictors", bias=0.0)
    facts = json.loads((predictors / "predictors.json").read_text())
    facts["model"]["fingerprint"] = "0" * 64
    (predictors / "predictors.json").write_text(json.dumps(facts))
    ended = cli("compile", tiny_model, "-o", tmp_path / "out", "--predictor", "learned", "--predictors", predictors)
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "another model" in ended.err


def test_lossless_predictors_refuse_options_for_learned_ones(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    for option, value in (("--predictors", tmp_path), ("--profile", tmp_path), ("--calibration", tmp_path / "text")):
        ended = cli("compile", tiny_model, "-o", tmp_path / "out", "--quant", "f16", option, value)
        assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
        assert "choose learned" in ended.err


def test_a_module_in_memory_has_no_text_to_be_judged_by(tiny_model: Path, tmp_path: Path) -> None:
    from picompile.frontend import load_model

    with pytest.raises(UsageError, match="model folder"):
        compile_model(load_model(tiny_model), tmp_path / "artifact", CompileOptions(predictor="learned", context=32))


def test_an_accuracy_error_carries_the_layers() -> None:
    assert AccuracyError("too far", [3, 1]).layers == (3, 1)
    assert AccuracyError.exit_code == 7


def test_a_plug_in_kind_without_weights(tiny_model: Path, held_out: Path, tmp_path: Path) -> None:
    """It is inserted in every layer; where it has no kernel, that is said."""
    add_predictor_kind(EVERY_NEURON)
    options = CompileOptions(context=64, predictor=EVERY_NEURON.name, gate=None)
    with pytest.raises(UnsupportedGraphError, match=EVERY_NEURON.name):
        compile_model(tiny_model, tmp_path / "artifact", options)
    assert list(tmp_path.iterdir()) == []


def test_a_kind_with_weights_comes_in_a_folder() -> None:
    with pytest.raises(UsageError, match="learned-relu"):
        CompileOptions(predictor="learned-relu")
