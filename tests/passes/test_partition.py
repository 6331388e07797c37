import pytest
import torch

from picompile.testing import LLAMA, OPT, GraphShape, assert_equivalent, build
from picompile_passes.base import Stage, stage_of
from picompile_passes.errors import PassOptionError
from picompile_passes.graph.nodes import arguments, attribute, calls
from picompile_passes.graph.operands import ADD, DIVIDE_BY_RMS, INDEX_SELECT, SPARSE_FFN
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.verify import verify


def predicted(shape=LLAMA, kind="auto"):
    return InsertPredictors(kind)(build(shape)).graph_module


def parts(graph_module, layer):
    return [node for node in calls(graph_module.graph, SPARSE_FFN) if node.meta["layer"] == layer]


@pytest.mark.parametrize(
    ("shape", "hot", "kind"),
    [
        (GraphShape(gated=False), {0: (5, 1, 39), 1: (0,)}, "auto"),
        (GraphShape(up_activation="relu", kv_heads=1), {1: range(1, 40)}, "none"),
        (GraphShape(fused=True, layers=1), {0: (39, 0)}, "auto"),
    ],
)
def test_partitioned_graph_computes_the_same(shape, hot, kind):
    before = predicted(shape, kind)
    after = Partition(hot)(before).graph_module
    verify(after, Stage.PARTITIONED)
    assert_equivalent(before, after)
    for layer in range(shape.layers):
        sizes = [int(arguments(part)["up"].meta["val"].shape[0]) for part in parts(after, layer)]
        assert sizes == ([len(hot[layer]), shape.ffn - len(hot[layer])] if layer in hot else [shape.ffn])


def test_rows_of_a_part_are_selected_by_its_table():
    """The order of the hot neurons does not matter, and the bias of down is added once."""
    before = predicted(OPT)
    after = Partition({0: (7, 2, 30)})(before).graph_module
    hot, cold = parts(after, 0)
    assert (hot.meta["neurons"], cold.meta["neurons"]) == ("hot", "cold")
    tables = []
    for part in (hot, cold):
        values = arguments(part)
        selected = [values["up"], values["down"], values["up_bias"], *arguments(values["mask"])["weights"]]
        assert all(node.target is INDEX_SELECT for node in selected)
        (table,) = {arguments(node)["index"] for node in selected}
        tables.append(attribute(after, table.target))
        assert values["mask"].meta["neurons"] == part.meta["neurons"]
        assert values["neurons"] is None
    assert [table.tolist() for table in tables] == [[2, 7, 30], [n for n in range(40) if n not in (2, 7, 30)]]
    assert all(table.dtype == torch.int64 for table in tables)
    assert arguments(hot)["down_bias"].target == arguments(parts(before, 0)[0])["down_bias"].target
    assert arguments(cold)["down_bias"] is None


@pytest.mark.parametrize("shape", [GraphShape(ffn_norm=True), GraphShape(gated=False, ffn_norm=True)])
def test_squares_of_the_parts_are_added_before_they_divide(shape):
    before = predicted(shape)
    after = Partition({0: (1, 2, 30)})(before).graph_module
    division, whole = calls(after.graph, DIVIDE_BY_RMS)
    values = arguments(division)
    assert values["x"].target is ADD
    assert list(values["x"].args) == parts(after, 0)
    assert all(arguments(part)["squares"] and arguments(part)["down_bias"] is None for part in parts(after, 0))
    assert (values["neurons"], values["eps"]) == (shape.ffn, shape.eps)
    assert [arguments(whole)["x"]] == parts(after, 1)
    assert_equivalent(before, after)


@pytest.mark.parametrize(("hot", "marked"), [((), "cold"), (tuple(range(40)), "hot")])
def test_a_side_without_neurons_is_left_out(hot, marked):
    before = predicted(OPT)
    after = Partition({1: hot})(before).graph_module
    (part,) = parts(after, 1)
    assert part.meta["neurons"] == arguments(part)["mask"].meta["neurons"] == marked
    assert not list(calls(after.graph, INDEX_SELECT))
    # The input's own nodes, and the other layer, have no mark.
    assert all("neurons" not in node.meta for node in [*before.graph.nodes, *parts(after, 0)])


def test_layers_that_are_not_named_stay_whole():
    after = Partition({1: (0,)})(predicted(LLAMA)).graph_module
    assert [len(parts(after, layer)) for layer in (0, 1)] == [1, 2]
    assert "neurons" not in parts(after, 0)[0].meta
    for part in parts(after, 1):
        assert list(arguments(arguments(part)["mask"])["weights"]) == [arguments(part)["gate"]]


def test_without_hot_sets_only_the_stage_moves():
    before = predicted(LLAMA)
    result = Partition()(before)
    assert (stage_of(before), stage_of(result.graph_module)) == (Stage.PREDICTED, Stage.PARTITIONED)
    assert [node.name for node in result.graph_module.graph.nodes] == [node.name for node in before.graph.nodes]
    again = Partition()(result.graph_module)
    assert not again.modified
    assert again.graph_module is result.graph_module


def with_kind(kind, **options):
    return InsertPredictors(kind, **options)(build(OPT)).graph_module


@pytest.mark.parametrize("kind", ["learned", "learned-relu", "testing-low-rank"])
def test_predictor_that_is_not_row_local_stays_whole(kind):
    before = with_kind(kind, ranks={0: 2, 1: 3}, inputs={0: "stream", 1: "previous"})
    after = Partition({0: (3, 0, 17), 1: (5,)})(before).graph_module
    hot, cold = parts(after, 0)
    assert arguments(hot)["mask"] is arguments(cold)["mask"]
    assert "neurons" not in arguments(hot)["mask"].meta
    assert attribute(after, arguments(hot)["neurons"].target).tolist() == [0, 3, 17]
    verify(after, Stage.PARTITIONED)
    assert_equivalent(before, after)


@pytest.mark.parametrize("kind", ["sign", "testing-linear"])
def test_predictor_that_is_row_local_is_split_with_the_rows(kind):
    before = with_kind(kind)
    after = Partition({0: (3, 0, 17)})(before).graph_module
    verify(after, Stage.PARTITIONED)
    for part in parts(after, 0):
        (matrix,) = arguments(arguments(part)["mask"])["weights"]
        assert arguments(matrix)["index"] is arguments(arguments(part)["up"])["index"]
        assert (matrix is arguments(part)["up"]) == (kind == "sign")
    assert_equivalent(before, after)


@pytest.mark.parametrize(
    ("hot", "message"),
    [
        ({2: (0,)}, "hot neurons of layer 2: the graph has no feed-forward block of that number"),
        ({0: (0, 40)}, "hot neurons of layer 0: neuron 40 is not among the layer's 0 to 39"),
        ({1: (-1, 3)}, "hot neurons of layer 1: neuron -1 is not among the layer's 0 to 39"),
        ({3: (1, 8, 2, 8)}, "hot neurons of layer 3: neuron 8 is given twice"),
    ],
)
def test_hot_sets_that_do_not_fit_the_graph_are_refused(hot, message):
    with pytest.raises(PassOptionError, match=message):
        Partition(hot)(predicted(LLAMA))


def test_a_partitioned_layer_is_not_partitioned_again():
    for hot in ((0,), ()):
        once = Partition({0: hot})(predicted(LLAMA)).graph_module
        with pytest.raises(PassOptionError, match="hot neurons of layer 0: that layer is partitioned already"):
            Partition({0: (1,)})(once)
        assert len(parts(Partition({1: (1,)})(once).graph_module, 1)) == 2


@pytest.mark.parametrize("kind", ["none", "learned", "sign"])
def test_limits_are_split_with_the_rows(kind):
    options = {"ranks": {0: 2, 1: 3}} if kind == "learned" else {}
    shape = GraphShape(activation="silu")
    before = InsertPredictors(kind, gate_limits=(0,), output_limits=(0, 1), **options)(build(shape)).graph_module
    after = Partition({0: (3, 0, 17), 1: (5,)})(before).graph_module
    verify(after, Stage.PARTITIONED)
    for part in parts(after, 0):
        values = arguments(part)
        for name in ("gate_limits", "output_limits"):
            assert arguments(values[name])["index"] is arguments(values["up"])["index"]
            assert arguments(values[name])["self"].target == f"predictors.layers.0.{name}"
    assert all(arguments(part)["gate_limits"] is None for part in parts(after, 1))
    assert_equivalent(before, after)
