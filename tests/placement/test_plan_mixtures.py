"""Plans of mixtures: a token reads the experts that it chooses, several sequences those that any of them chooses."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.mixtures import MIXTURE, MIXTURES, RELU_MIXTURE
from helpers.published_mixtures import SMALLTHINKER
from helpers.support import Cli
from picompile.placement.counting import graph_bytes, shape_bytes
from picompile.placement.firing import firing_of_curve, firing_of_experts
from picompile.placement.machine import Machine
from picompile.placement.model_bytes import ModelBytes, Packing
from picompile.placement.sources import FiringSource
from picompile.placement.times import ALL_ON_HOST, LayerTimes
from picompile.testing import GraphShape, build

MACHINE = Machine(0, 0.0, 1 << 40, 30e9, 0.0, 0.0)
PACKING = Packing("f16", context=64, chunk=16)


def counted(shape: GraphShape, packing: Packing = PACKING) -> ModelBytes:
    return graph_bytes("mixture", build(shape), packing)


@pytest.mark.parametrize("name", list(MIXTURES))
def test_neurons_of_all_experts_are_counted(name: str) -> None:
    shape = MIXTURES[name]
    model = counted(shape)
    assert model.has_experts
    for layer in model.layers:
        assert (layer.experts, layer.chosen, layer.neurons) == (6, 2, 6 * 48)
        # Rows are padded to 64 bytes; biases are float32.
        rows = (3 if shape.gated else 2) * 64
        assert rows <= layer.neuron_bytes <= rows + 8
        assert layer.predictor_bytes == 0
    whole = counted(replace(shape, experts=0, shared=0))
    assert not whole.has_experts
    assert whole.layers[0].chosen_share == 1.0


def test_layouts_of_layers_are_cut_with_the_layers() -> None:
    layouts = {name: [0, 1, 1, 1] * 3 for name in ("rope_layout", "sliding_window_layout")}
    config = {**SMALLTHINKER, **layouts, "num_hidden_layers": 12}
    layers = shape_bytes("smallthinker", config, PACKING).layers
    assert [(layer.experts, layer.chosen, layer.neurons) for layer in layers] == [(6, 2, 6 * 48)] * 12


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("shape", [MIXTURE, RELU_MIXTURE], ids=["none", "exact"])
def test_a_step_reads_the_experts_that_it_chooses(shape: GraphShape, sequences: int) -> None:
    model = counted(shape, replace(PACKING, sequences=sequences))
    layer = model.layers[1]
    source = FiringSource(None, "20%") if shape is RELU_MIXTURE else FiringSource(None)
    firing = source.firing(model, {}).layers[1]
    seconds = LayerTimes(layer, firing, MACHINE, 0.0, 0.0).times(ALL_ON_HOST).at(0)["cold_s"]
    chosen = 1 - (1 - 2 / 6) ** sequences
    if shape is MIXTURE:
        read = chosen * layer.neurons * layer.neuron_bytes
    else:
        shares = firing_of_curve("20%", 3, layer.neurons).layers[1].shares
        computed = (1 - (1 - shares * 2 / 6) ** sequences).sum()
        gates = layer.gating_bytes
        read = chosen * layer.neurons * gates + computed * (layer.neuron_bytes - gates)
    assert seconds == pytest.approx(read / MACHINE.host_read_bytes_per_s)


def test_experts_are_chosen_alike_where_no_profile_says_otherwise() -> None:
    firing = firing_of_experts(60, 0.25, sequences=2)
    assert firing.chosen == pytest.approx(1 - 0.75**2)
    assert np.allclose(firing.shares, firing.chosen)
    assert firing_of_experts(60, 1.0, sequences=7).chosen == 1.0


def test_the_command_plans_mixtures_for_cpus_alone(cli: Cli, tmp_path: Path) -> None:
    plan = cli("plan", "--shape", "tiny-mixture", "--firing", "10%", "--target", "cpu", "-o", tmp_path / "plan.json")
    assert plan.code == 0, plan.err
    assert "experts 2 of 8 for a token" in plan.out
    for options, code, text in (
        (("--target", "4090", "--firing", "10%"), 3, "is a mixture of experts, which CPUs alone compute for now"),
        (("--target", "cpu"), 2, "fire sparsely"),
    ):
        refused = cli("plan", "--shape", "tiny-mixture", *options)
        assert (refused.code, refused.err.count("error:")) == (code, 1)
        assert text in refused.err
    learned = cli("plan", "--shape", "tiny-mixture", "--target", "cpu", "--firing", "10%", "--predictor", "learned")
    assert learned.code == 0, learned.err
    silu = cli("plan", "--shape", "olmoe-1b-7b", "--target", "cpu", "--firing", "10%", "--predictor", "learned")
    assert (silu.code, silu.err.count("error:")) == (3, 1)
    assert "every neuron of a chosen expert fires" in silu.err
