"""Predictors of neurons of experts: trained, and compiled to what the graph computes with them."""

from pathlib import Path

import pytest
import torch

import picompile_runtime
from helpers.mixtures import MIXTURE, captured_mixture, save_tiny_mixture
from helpers.support import BuildOnce
from picompile.compile import compile_model
from picompile.config import CompileOptions
from picompile.errors import UnsupportedModelError
from picompile.frontend.hf import load_model
from picompile.placement.sources import ModelOptions, find_model
from picompile.predictors.accuracy import measure_layers
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.profile.profile import Profile
from picompile.predictors.profile.run import profile_model
from picompile.predictors.store import Predictors
from picompile.predictors.train.options import TrainOptions
from picompile.predictors.train.run import train_predictors
from picompile.progress import NoProgress
from picompile_passes.graph.materialize import materialize
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import SPARSE_FFN
from picompile_passes.passes.canonicalize import canonicalize

EXPERTS, CHOSEN, SIZE, HIDDEN = 6, 2, 48, 64


@pytest.fixture(scope="module")
def model(build_once: BuildOnce) -> Path:
    return build_once("tiny-mixture", save_tiny_mixture)


@pytest.fixture(scope="module")
def profile(model: Path, prose: Path, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    folder = tmp_path_factory.mktemp("mixture") / "profile"
    return profile_model(model, folder, ProfileOptions((prose,), window=64, tokens=4096, samples=2048))


@pytest.fixture(scope="module")
def predictors(model: Path, profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> Predictors:
    options = TrainOptions(
        kind="learned", ranks=24, epochs=4, recall=0.95, budget=1.0, accuracy_bound=None, exact=False, check_tokens=128
    )
    return train_predictors(model, profile, tmp_path_factory.mktemp("trained") / "predictors", options)


@pytest.mark.slow("profiles and trains a mixture")
def test_predictors_leave_out_silent_neurons_of_chosen_experts(
    predictors: Predictors, model: Path, profile: Profile
) -> None:
    captured = load_model(model)
    graph = predictors.insert_pass()(canonicalize(captured.graph_module)).graph_module
    measured = measure_layers(graph, predictors.weights(captured.weights), profile.held_out()[:4])
    for layer, found in zip(predictors.layers, measured, strict=True):
        assert (layer.kind, layer.rank) == ("learned", 24)
        assert layer.parameters == 24 * (HIDDEN + EXPERTS * SIZE) + EXPERTS * SIZE
        assert (layer.weighted_recall or 0) >= 0.95
        # Shares are of the neurons of two experts, of which a random model silences a half.
        assert 0.4 < found.firing_share < 0.6
        assert found.computed_share < 0.95
        assert found.weighted_recall > 0.9
        assert (layer.computed_share or 0) == pytest.approx(found.computed_share, abs=0.06)


@pytest.mark.slow("compiles a model")
def test_an_artifact_computes_what_the_graph_does_with_them(
    predictors: Predictors, model: Path, profile: Profile, tmp_path: Path
) -> None:
    """Token by token, where masks are made; each token computes as many neurons as the graph keeps."""
    options = CompileOptions(
        quant="f16", context=64, chunk=8, kv_dtype="f32", predictor="learned", predictors=predictors.path,
        accuracy_bound=None, predictor_quant="f16",
    )  # fmt: skip
    compile_model(model, tmp_path / "artifact", options)
    captured = load_model(model)
    graph = predictors.insert_pass()(canonicalize(captured.graph_module)).graph_module
    ids = profile.held_out()[0][:24]
    with torch.no_grad():
        eager = materialize(graph, predictors.weights(captured.weights, "f16"))
        expected = eager(torch.tensor(ids), torch.arange(len(ids)))
    masks = [arguments(block)["mask"] for block in calls(graph.graph, SPARSE_FFN)]
    assert all(arguments(mask)["gains"] is not None for mask in masks)
    with picompile_runtime.load(tmp_path / "artifact") as engine:
        decoded = torch.stack([torch.from_numpy(engine.decode(token).copy()).flatten() for token in ids])
    off = (decoded - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(off.median()) < 1e-2


@pytest.mark.slow("profiles and trains a mixture")
def test_a_plan_reads_the_rows_of_chosen_experts(predictors: Predictors, model: Path, profile: Profile) -> None:
    options = ModelOptions(model, profile=profile.folder, predictors=predictors.path, quant="f16")
    planned = find_model(options, NoProgress())
    for layer in planned.model.layers:
        # fc1 is read for every token; fc2 and the bias have rows of neurons.
        assert 2 * 24 * HIDDEN <= layer.predictor_bytes < 4 * 24 * HIDDEN
        assert layer.gating_bytes >= 2 * 24 + 4
        assert layer.chosen_share == pytest.approx(CHOSEN / EXPERTS)


def test_neurons_that_are_never_silent_have_no_predictors(tmp_path: Path) -> None:
    for kind in ("learned", "sign"):
        with pytest.raises(UnsupportedModelError, match="every neuron of a chosen expert fires"):
            compile_model(captured_mixture(MIXTURE), tmp_path / "artifact", CompileOptions(predictor=kind, context=32))
    assert list(tmp_path.iterdir()) == []
