"""Losses of matrices that are rounded alone, against a run of the whole model with that matrix rounded."""

import pytest
import torch
import torch.nn.functional as F

from picompile.progress import NoProgress
from picompile.rounding.losses import divergence, measure_losses, read_losses, write_losses
from picompile.testing import RandomWeights, random_weights
from picompile_passes.dialect.formats import dequantize_rows, quantize_rows
from picompile_passes.graph.materialize import materialize
from picompile_passes.passes.canonicalize import CANONICALIZE
from picompile_passes.passes.insert_predictors import InsertPredictors

_WINDOWS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8]]


@pytest.fixture(scope="module")
def predicted(captured_variant):
    def make(name):
        graph = captured_variant(name)
        for pass_ in (*CANONICALIZE, InsertPredictors()):
            graph = pass_(graph).graph_module
        return graph

    return make


def _rounded(weight, form, *, transposed):
    """The weight as a format has it, whose rows are those of the transpose where kernels read these."""
    matrix = weight.T if transposed else weight
    near = dequantize_rows(quantize_rows(matrix, form), form, matrix.shape[1])
    return (near.T if transposed else near).contiguous()


def _logits(graph, weights):
    module = materialize(graph, weights)
    with torch.no_grad():
        return [module(torch.tensor(ids), torch.arange(len(ids))).double() for ids in _WINDOWS]


@pytest.mark.parametrize("name", ["llama-relu", "opt-pre-norm", "falcon-7b"])
def test_the_loss_of_each_unit(name, predicted):
    graph = predicted(name)
    weights = random_weights(graph, seed=5)
    units = measure_losses(graph, weights, _WINDOWS, NoProgress())
    exact = _logits(graph, weights)
    named = {parameter for unit in units for parameter in unit.parameters}
    matrices = {each for each in weights.names() if weights.load(each).dim() == 2}
    assert matrices - named <= {each for each in matrices if "embed" in each}
    for unit in units:
        changed = {each: weights.load(each) for each in weights.names()}
        for parameter in unit.parameters:
            # Down is kept with a row for each neuron.
            down = parameter.split(".")[-2] in ("down_proj", "fc2", "dense_4h_to_h")
            changed[parameter] = _rounded(weights.load(parameter), "q4", transposed=down)
        other = _logits(graph, RandomWeights(changed))
        tokens = sum(map(len, _WINDOWS))
        expected = sum(
            float((a.softmax(-1) * (a.log_softmax(-1) - b.log_softmax(-1))).sum())
            for a, b in zip(exact, other, strict=True)
        )
        assert unit.losses["q4"] == pytest.approx(expected / tokens, rel=2e-2, abs=1e-9), unit.name
        assert unit.losses["q4"] > unit.losses["q4m"] > unit.losses["q6"] > unit.losses["q8"] >= 0
        assert unit.weights == sum(weights.load(each).numel() for each in unit.parameters)


def test_divergence_of_distributions():
    a, b = torch.randn(5, 40), torch.randn(5, 40)
    p, q = a.double().softmax(-1), b.double().softmax(-1)
    assert divergence(a, b) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-9)
    assert divergence(a, a) == 0.0
    assert divergence(a, a + 3.0) == pytest.approx(0.0, abs=1e-12)
    assert F.softmax(a, -1).shape == b.shape


def test_losses_are_read_for_the_same_inputs_alone(predicted, tmp_path):
    graph = predicted("llama-relu")
    units = measure_losses(graph, random_weights(graph, seed=1), _WINDOWS, NoProgress())
    write_losses(tmp_path / "losses.json", "these", units)
    assert read_losses(tmp_path / "losses.json", "these") == units
    assert read_losses(tmp_path / "losses.json", "others") is None
    assert read_losses(tmp_path / "nothing.json", "these") is None
    (tmp_path / "losses.json").write_text("{")
    assert read_losses(tmp_path / "losses.json", "these") is None
