from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from picompile.targets import TARGETS
from picompile.testing import (
    LLAMA,
    OPT,
    TESTING_KINDS,
    assert_equivalent,
    build,
    build_captured,
    captured_styles,
    graphs,
    hot_sets,
    masks,
    partitions,
    pipelines,
    random_weights,
    shapes,
    targets,
    with_predictors,
)
from picompile.testing.strategies import _canonicalized
from picompile_passes.dialect import dequantize_rows, quantize_rows
from picompile_passes.errors import PassesError, is_for_the_user
from picompile_passes.nodes import arguments, calls, has_real_data
from picompile_passes.operands import PREDICT, QUANTIZE, SPARSE_FFN
from picompile_passes.passes.canonicalize import CANONICALIZE
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline, verifying
from picompile_passes.predictors import PredictorKind, add_predictor_kind, predictor_kind
from picompile_passes.stages import Stage, stage_of
from picompile_passes.verify import verify


def many(count):
    """As many examples where they are the same at every run; `make fuzz` draws more."""
    return settings(max_examples=count) if settings.default.derandomize else settings()


def draw_until(strategy, look, wanted, *, least=0):
    """Draws from `strategy` until `look`, which gives several things, has seen all that is `wanted`, and so often."""
    seen = Counter()
    draws = []

    def enough(drawn):
        draws.append(None)
        seen.update(look(drawn))
        return len(draws) >= least and set(wanted) <= seen.keys()

    find(strategy, enough, settings=settings(max_examples=400, phases=[Phase.generate], database=None))
    return seen


def facts(graph_module):
    """What kind of graph it is, in words."""
    graph = graph_module.graph
    for node in graph.nodes:
        if "from" in node.meta:
            yield node.meta["from"].pass_name
    for node in calls(graph, SPARSE_FFN):
        values = arguments(node)
        yield f"predictor {arguments(values['mask'])['kind']}"
        yield f"device {node.meta.get('device')}"
        yield "table" if values["neurons"] is not None else "no table"
    yield from (f"format {arguments(node)['format']}" for node in calls(graph, QUANTIZE))
    yield "all by hand" if not any("from" in node.meta for node in graph.nodes) else "by passes"


PREDICTORS = [f"predictor {kind}" for kind in ("exact", "none", *TESTING_KINDS)]
FACTS = {
    Stage.CAPTURED: ["all by hand", "remove-copies", "raise-linear", "raise-norms", "raise-attention", "raise-ffn"],
    Stage.CANONICAL: ["all by hand", "flatten-tokens"],
    Stage.PREDICTED: [*PREDICTORS, "flatten-tokens"],
    Stage.PARTITIONED: [*PREDICTORS, "device hot", "device cold", "device None", "table", "no table"],
    Stage.QUANTIZED: ["format f16", "format q8", "format q4", "device hot", "device None", "flatten-tokens"],
}


@pytest.mark.parametrize("stage", Stage, ids=lambda stage: stage.text)
def test_graphs_of_a_stage_verify_and_are_of_every_kind(stage):
    def look(graph_module):
        assert stage_of(graph_module) is stage
        verify(graph_module, stage)
        return facts(graph_module)

    seen = draw_until(graphs(stage), look, FACTS[stage], least=10)
    assert stage is not Stage.CAPTURED or "flatten-tokens" not in seen


def test_constant_matrices_of_later_stages_are_held_by_every_format():
    def look(graph_module):
        constants = [
            tensor for tensor in graph_module.buffers() if has_real_data(tensor) and tensor.is_floating_point()
        ]
        for matrix in (tensor for tensor in constants if tensor.dim() == 2):
            for form in ("f16", "q8", "q4"):
                again = dequantize_rows(quantize_rows(matrix, form), form, matrix.shape[1])
                assert torch.equal(again, matrix)
            yield "matrix"

    styles = captured_styles().map(lambda style: replace(style, positions=replace(style.positions, learned="sinusoid")))
    draw_until(styles.map(build_captured).map(_canonicalized), look, ["matrix"], least=3)


@many(10)
@given(shape=shapes(gated=True, layers=1, heads=2, activation="silu"))
def test_fixed_fields_are_not_drawn(shape):
    assert (shape.gated, shape.layers, shape.heads, shape.activation) == (True, 1, 2, "silu")
    assert shape.hidden % (2 * shape.heads) == 0
    assert shape.heads % shape.kv_heads == 0
    verify(build(shape), Stage.CANONICAL)


def test_shapes_are_of_every_kind():
    def look(shape):
        yield from (shape.activation, f"gated {shape.gated}", f"window {shape.window}", f"eps {shape.eps}")
        yield from (name for name in ("fused", "parallel", "bias") if getattr(shape, name))

    activations = ["relu", "relu2", "relu6", "fatrelu(0.02)", "silu", "gelu"]
    kinds = ["gated True", "gated False", "window 0", "window 1", "window 3", "eps 1e-05", "eps 1e-06"]
    draw_until(shapes(), look, [*activations, *kinds, "fused", "parallel", "bias"])


def test_a_shape_is_written_by_what_is_special_of_it():
    assert repr(LLAMA) == "Shape()"
    assert repr(OPT) == "Shape(gated=False)"


def test_masks_are_from_none_to_all():
    def look(mask):
        assert (mask.shape, mask.dtype) == ((3, 17), torch.bool)
        share = float(mask.float().mean())
        return ["none" if share == 0 else "all" if share == 1 else "few" if share < 0.3 else "some"]

    draw_until(masks(3, 17), look, ["none", "all", "few", "some"])


@pytest.mark.parametrize("neurons", [0, 1, 2, 23])
def test_partitions_are_hot_sets_of_every_kind(neurons):
    def look(hot):
        assert list(hot) == sorted(set(hot))
        assert not hot or 0 <= hot[0] <= hot[-1] < neurons
        yield len(hot)
        if 1 < len(hot) < neurons:
            yield "stretch" if hot[-1] - hot[0] == len(hot) - 1 else "scattered"

    kinds = ["stretch", "scattered"] if neurons > 3 else []
    draw_until(partitions(neurons), look, [0, min(neurons, 1), neurons, *kinds])


@pytest.mark.parametrize("partitioned", [False, True])
def test_hot_sets_are_for_layers_that_are_whole(partitioned):
    graph_module = predicted()
    layers = [(), (0,), (1,), (0, 1)]
    if partitioned:
        graph_module, layers = Partition({0: (1, 2)})(graph_module).graph_module, [(), (1,)]

    def look(hot):
        Partition(hot)(graph_module)
        assert tuple(hot) in layers
        return [tuple(hot)]

    draw_until(hot_sets(graph_module), look, layers)


def predicted():
    return InsertPredictors()(build(OPT)).graph_module


def test_targets_are_ours_and_made_up():
    def look(target):
        assert target.name
        assert target.machine in ("x86_64", "aarch64")
        assert len(set(target.features)) == len(target.features)
        return ["ours" if TARGETS.get(target.name) is target else "made up"]

    draw_until(targets(), look, ["ours", "made up"], least=20)


@many(8)
@given(data=st.data(), stage=st.sampled_from([Stage.CAPTURED, Stage.CANONICAL, Stage.PREDICTED, Stage.PARTITIONED]))
def test_ordered_pipelines_work_on_graphs_of_their_stage(data, stage):
    graph_module = data.draw(graphs(stage))
    pipeline = data.draw(pipelines(graph_module=graph_module, ordered=True))
    result = Pipeline(pipeline.passes, hook=verifying)(graph_module).graph_module
    assert stage_of(result) == (stage if pipeline.ensures is None else pipeline.ensures)


@many(8)
@given(data=st.data())
def test_other_pipelines_work_or_tell_the_user_why_not(data):
    graph_module = data.draw(graphs(Stage.CANONICAL))
    pipeline = data.draw(pipelines(graph_module=graph_module, ordered=False))
    try:
        pipeline(graph_module)
    except PassesError as error:
        assert is_for_the_user(error)


def options(pipeline):
    """Names of the passes, and the options they have."""
    for pass_ in pipeline.passes:
        yield pass_.name
        yield from [f"format {pass_.format}"] if isinstance(pass_, Quantize) else []
        yield from [f"kind {pass_.kind}"] if isinstance(pass_, InsertPredictors) else []
        yield from [f"layers {len(pass_.hot)}"] if isinstance(pass_, Partition) else []


def test_pipelines_hold_every_pass_with_every_option():
    known = [*(pass_.name for pass_ in CANONICALIZE), "format f16", "format q8", "format q4", "kind auto", "kind none"]
    draw_until(pipelines(Stage.CAPTURED, graph_module=build(OPT)), options, [*known, "kind exact", "layers 2"])
    # Without a graph nothing is asked for that only some graphs can give.
    seen = draw_until(pipelines(), options, [*known, "layers 0"])
    assert "kind exact" not in seen
    assert not {name for name in seen if name.startswith("layers")} - {"layers 0"}


def test_pipelines_are_in_order_mostly():
    def look(pipeline):
        order = [*(pass_.name for pass_ in CANONICALIZE), "insert-predictors", "partition", "quantize"]
        names = list(dict.fromkeys(pass_.name for pass_ in pipeline.passes))
        return ["in order" if names == order[: len(names)] else "in disorder"]

    seen = draw_until(pipelines(Stage.CAPTURED), look, ["in order", "in disorder"], least=60)
    assert seen["in order"] > seen["in disorder"]


@pytest.mark.parametrize("kind", TESTING_KINDS)
def test_testing_predictors_make_another_model(kind):
    before = predicted()
    after = with_predictors(before, kind, 0.1)
    verify(after, Stage.PREDICTED)
    assert [arguments(node)["kind"] for node in calls(after.graph, PREDICT)] == [kind, kind]
    assert "predictors_0_0_weight" not in dict(before.named_parameters())
    # Its neurons can be split as any other model's.
    assert_equivalent(after, Partition({0: (3, 1, 4), 1: (1,)})(after).graph_module)
    with pytest.raises(AssertionError, match="differ"):
        assert_equivalent(before, after, weights=random_weights(after))


def test_a_predictor_kind_is_added_once():
    def never(x, weights, threshold):
        return torch.zeros(x.shape[0], weights[0].shape[0], dtype=torch.bool)

    kind = PredictorKind("testing-linear", never, lambda weights: 1, row_local=True)
    with pytest.raises(ValueError, match="there is a predictor kind 'testing-linear' already"):
        add_predictor_kind(kind)
    known = predictor_kind("testing-linear")
    add_predictor_kind(known)
    assert predictor_kind("testing-linear") is known
