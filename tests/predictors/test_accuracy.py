"""Which neurons fire, and what predictors miss: figures of layers equal counts over the whole graph, run in one go."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from helpers.products import sampled
from picompile.errors import UsageError
from picompile.predictors.accuracy import LayerAccuracy, first_windows, measure_layers, rank_layers_by_error
from picompile.predictors.firing import MEASURES, FiringRule
from picompile.testing import GraphShape, build, random_weights
from picompile_passes.dialect import parse_activation
from picompile_passes.graph.materialize import materialize
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import SPARSE_FFN
from picompile_passes.passes.insert_predictors import InsertPredictors

SHAPES = {
    "gated": GraphShape(hidden=30, heads=3, ffn=37, layers=3),
    "plain": GraphShape(hidden=24, heads=3, ffn=41, layers=2, gated=False),
    "normed": GraphShape(hidden=24, heads=3, ffn=41, layers=2, gated=False, ffn_norm=True),
    "parallel": GraphShape(hidden=24, heads=4, kv_heads=2, ffn=33, layers=2, parallel=True),
}


def _insert(kind: str, layers: int) -> InsertPredictors:
    return InsertPredictors(kind=kind, ranks={layer: 5 + layer for layer in range(layers)} if kind == "learned" else {})


class _Recorder(Interpreter):
    """Keeps every value of a run."""

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__(graph_module, garbage_collect_values=False)

    def value(self, node: Node | None) -> Any:
        return None if node is None else self.env[node]


def _counted(graph_module: GraphModule, windows: list[list[int]]) -> list[dict[str, float]]:
    """Per block: figures straight from their definitions, over all windows, one token and one neuron at a time."""
    blocks = list(calls(graph_module.graph, SPARSE_FFN))
    rows: list[list[tuple[Tensor, ...]]] = [[] for _ in blocks]
    for window in windows:
        recorder = _Recorder(graph_module)
        with torch.no_grad():
            recorder.run(torch.tensor(window), torch.arange(len(window)))
        for block, row in zip(blocks, rows, strict=True):
            row.append(_neurons(block, recorder))
    return [_figures(*(torch.cat(part) for part in zip(*row, strict=True))) for row in rows]


def _neurons(block: Node, recorder: _Recorder) -> tuple[Tensor, Tensor, Tensor]:
    values = {name: recorder.value(v) if isinstance(v, Node) else v for name, v in arguments(block).items()}
    x, up = values["x"].double(), values["up"].double()
    raised = x @ up.T + (0 if values["up_bias"] is None else values["up_bias"])
    act = parse_activation(values["activation"]).function
    hidden = act(raised) if values["gate"] is None else act(x @ values["gate"].double().T) * raised
    if values["squares"]:
        hidden = hidden / (hidden.square().mean(dim=1, keepdim=True) + 1e-5).sqrt()
    return hidden, values["mask"], values["down"].double().norm(dim=1).expand_as(hidden)


def _figures(hidden: Tensor, mask: Tensor, length: Tensor) -> dict[str, float]:
    fired = hidden != 0
    weight = hidden.abs() * length
    return {
        "recall": float((fired & mask).sum() / fired.sum()),
        "weighted_recall": float(weight[mask].sum() / weight.sum()),
        "precision": float((fired & mask).sum() / mask.sum()),
        "firing_share": float(fired.double().mean()),
        "computed_share": float(mask.double().mean()),
    }


@sampled(slow="measures every shape of a layer with each predictor", name=SHAPES, kind=("learned", "sign"))
def test_figures_are_those_of_the_whole_graph(name: str, kind: str) -> None:
    graph_module = _insert(kind, SHAPES[name].layers)(build(SHAPES[name])).graph_module
    weights = random_weights(graph_module, seed=2)
    generator = torch.Generator().manual_seed(3)
    windows = [torch.randint(50, (tokens,), generator=generator).tolist() for tokens in (13, 1, 22)]
    measured = measure_layers(graph_module, weights, windows)
    expected = _counted(materialize(graph_module, weights), windows)
    assert [layer.layer for layer in measured] == list(range(SHAPES[name].layers))
    for layer, figures in zip(measured, expected, strict=True):
        assert 0 < figures["recall"] < 1, "the case says nothing"
        assert {key: getattr(layer, key) for key in figures} == pytest.approx(figures, rel=1e-4)
        assert layer.rank == (5 + layer.layer if kind == "learned" else None)
        assert layer.missed_energy > 0


def _of(kind: str, threshold: float = 0.0) -> list[LayerAccuracy]:
    graph_module = InsertPredictors(kind=kind)(build(GraphShape())).graph_module
    windows = [[7, 3, 49, 0, 12]]
    return measure_layers(graph_module, random_weights(graph_module), windows, {0: FiringRule(threshold)})


@pytest.mark.parametrize("kind", ["exact", "none"])
def test_lossless_predictors_are_measured_as_lossless(kind: str) -> None:
    for layer in _of(kind):
        assert (layer.recall, layer.weighted_recall, layer.missed_energy) == (1, 1, 0)
        assert layer.precision == pytest.approx(1 if kind == "exact" else layer.firing_share)


def test_a_threshold_says_which_neurons_count_as_firing() -> None:
    low, high = _of("none"), _of("none", threshold=1e9)
    assert high[0].firing_share == 0 and high[0].recall == 1
    assert low[1] == high[1]


def test_a_rule_by_contribution_decides_what_counts_as_firing() -> None:
    shape = GraphShape(hidden=30, heads=3, ffn=200, layers=1, activation="silu")
    graph_module = _insert("learned", 1)(build(shape)).graph_module
    weights, window = random_weights(graph_module), [7, 3, 49, 0, 12, 30, 41]
    recorder = _Recorder(whole := materialize(graph_module, weights))
    with torch.no_grad():
        recorder.run(torch.tensor(window), torch.arange(len(window)))
    hidden, mask, length = _neurons(next(calls(whole.graph, SPARSE_FFN)), recorder)
    weight = hidden.abs() * length
    threshold = float(weight.median())
    (layer,) = measure_layers(graph_module, weights, [window], {0: FiringRule(threshold, "contribution")})
    fired = weight > threshold
    assert not torch.equal(fired, hidden.abs() > hidden.abs().median()), "the case says nothing"
    assert layer.firing_share == pytest.approx(float(fired.double().mean()), abs=2 / fired.numel())
    assert layer.recall == pytest.approx(float((fired & mask).sum() / fired.sum()), abs=2 / float(fired.sum()))
    assert layer.weighted_recall == pytest.approx(float(weight[fired & mask].sum() / weight[fired].sum()), abs=0.01)


def test_neurons_below_their_limits_are_missed() -> None:
    graph_module = InsertPredictors("none", output_limits=(1,))(build(SHAPES["gated"])).graph_module
    weights, windows = random_weights(graph_module), [list(range(1, 12))]
    limited = measure_layers(graph_module, weights, windows)
    assert [layer.computed_share == 1.0 and layer.missed_energy == 0.0 for layer in limited] == [True, False, True]
    assert 0 < limited[1].computed_share < limited[1].firing_share
    assert limited[1].recall < limited[1].weighted_recall < 1.0 == limited[1].precision
    assert limited[1].missed_energy > 0


def test_the_rule_compares_magnitude_or_contribution_with_its_threshold() -> None:
    magnitude, lengths = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.5, 1.0]]), torch.tensor([1.0, 3.0, 0.25])
    assert FiringRule(1.0).fires(magnitude, lengths).tolist() == [[False, False, True], [True, False, False]]
    by_contribution = FiringRule(1.0, "contribution").fires(magnitude, lengths)
    assert by_contribution.tolist() == [[False, True, False], [True, True, False]]
    # Without a threshold every output but zero fires, even where the product underflows: predictors of ReLU models are
    # exact about zero.
    magnitude, lengths = torch.tensor([[0.0, 1e-30, 1.0]]), torch.tensor([1.0, 1e-30, 0.0])
    for by in MEASURES:
        assert FiringRule(by=by).fires(magnitude, lengths).tolist() == [[False, True, True]]
    with pytest.raises(UsageError, match="unknown measure 'energy' of firing"):
        FiringRule(by="energy")


def test_layers_that_miss_most_rank_first() -> None:
    assert rank_layers_by_error({0: 1.0, 1: 6.0, 2: 3.0, 3: 0.0}) == [1, 2]
    assert rank_layers_by_error({4: 1e-9}) == [4]
    assert rank_layers_by_error({5: 1.0, 3: 1.0, 4: 1.0}) == [3, 4, 5]
    assert rank_layers_by_error({0: 0.0, 1: 0.0}) == rank_layers_by_error({}) == []


def test_as_many_tokens_are_read_as_asked_for() -> None:
    """Windows that are too long are cut, and a single id tells nothing."""
    windows = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert first_windows(windows, 100) == first_windows(windows, 100, 10) == windows
    assert first_windows(windows, 7) == [[1, 2, 3, 4], [5, 6, 7]]
    assert first_windows(windows, 6, 3) == [[1, 2, 3], [5, 6, 7]]
    assert first_windows(windows, 6, 2) == [[1, 2], [3, 4], [5, 6]]
    assert first_windows(windows, 5) == [[1, 2, 3, 4]]
    assert first_windows([[], [1, 2]], 7) == [[1, 2]]
    assert first_windows(windows, 1) == first_windows([], 7) == []
