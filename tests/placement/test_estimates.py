"""Estimates of well-known models: counted as the planner counts, and as fast as its plan."""

from dataclasses import replace

import pytest

from picompile.errors import UnsupportedModelError
from picompile.machine.targets import HOST_DENSE_EFFICIENCY
from picompile.placement.estimates import estimate
from picompile.placement.firing import Firing, firing_of_experts
from picompile.placement.known_models import KNOWN, count_known, known_models, to_json
from picompile.placement.machine import Machine
from picompile.placement.model_bytes import ModelBytes
from picompile.placement.planning import PlanOptions, make_plan
from picompile.synth.shapes import find_shape

# Parameters of the models' cards on the Hugging Face hub, in billions.
PARAMETERS = {
    "qwen2.5-0.5b": 0.49,
    "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21,
    "qwen3-4b": 4.0,
    "olmoe-1b-7b": 6.9,
    "llama-3.1-8b": 8.03,
    "qwen3-14b": 14.8,
    "gpt-oss-20b": 20.9,
    "mistral-small-24b": 23.6,
    "qwen3-30b-a3b": 30.5,
    "qwen3-32b": 32.8,
    "llama-3.3-70b": 70.6,
}
MACHINE = Machine(0, 0.0, 24 * 10**9, 25e9, 0.0, 0.0, host_efficiency=0.5, host_dense_efficiency=HOST_DENSE_EFFICIENCY)
MODELS = {model.name: model for model in known_models()}


def planned_tokens_per_s(model: ModelBytes, machine: Machine) -> float:
    layers = tuple(firing_of_experts(each.neurons, each.chosen_share, 1) for each in model.layers)
    return make_plan(model, Firing(layers, "every neuron"), PlanOptions(target="cpu", machine=machine)).tokens_per_s


def test_parameters_are_those_of_the_models() -> None:
    counted = {name: model.parameters / 1e9 for name, model in MODELS.items()}
    assert counted == pytest.approx(PARAMETERS, rel=0.01)
    assert tuple(MODELS) == KNOWN


@pytest.mark.parametrize(
    "name",
    [
        "qwen2.5-0.5b",
        *(pytest.param(each, marks=pytest.mark.slow("captures a model")) for each in KNOWN if each != "qwen2.5-0.5b"),
    ],
)
def test_the_file_has_what_the_planner_counts(name: str) -> None:
    """If this fails, `python -m picompile.placement.known_models` writes the file again."""
    counted = count_known(name)
    assert MODELS[name] == counted
    assert to_json(MODELS[name]) == to_json(counted)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "olmoe-1b-7b"])
def test_speeds_are_those_of_plans(name: str) -> None:
    found = estimate(MODELS[name], MACHINE)
    assert found.tokens_per_s == pytest.approx(planned_tokens_per_s(MODELS[name], MACHINE), rel=1e-9)
    slower = estimate(MODELS[name], replace(MACHINE, host_dense_efficiency=None))
    assert slower.tokens_per_s == pytest.approx(found.tokens_per_s * 0.5 / HOST_DENSE_EFFICIENCY)


def test_what_does_not_fit_has_no_speed() -> None:
    found = estimate(MODELS["llama-3.3-70b"], MACHINE)
    assert (found.tokens_per_s, found.verdict) == (None, "does not fit")
    assert found.needed_bytes > found.available_bytes == int(24e9 * 0.95)
    assert estimate(MODELS["llama-3.3-70b"], replace(MACHINE, host_bytes=48 * 10**9)).verdict == "slow"


def test_a_gpu_takes_dense_models_alone() -> None:
    with_gpu = replace(MACHINE, gpu_bytes=24 * 10**9, gpu_bytes_per_s=1e12, pcie_bytes_per_s=25e9, sync_s=1e-5)
    dense, mixture = MODELS["llama-3.1-8b"], MODELS["olmoe-1b-7b"]
    assert estimate(mixture, with_gpu) == estimate(mixture, MACHINE)
    faster = estimate(dense, with_gpu).tokens_per_s
    assert faster is not None and faster > 10 * (estimate(dense, MACHINE).tokens_per_s or 0)


def test_synth_makes_no_dense_models() -> None:
    with pytest.raises(UnsupportedModelError, match="'silu' leaves no neuron silent"):
        find_shape("llama-3.1-8b")
