"""Our own passes under the property suite of `picompile.testing`, on random graphs of every stage.

`tests/mutation/check.py` plants faults in the passes and sees whether these tests find them.
"""

from functools import partial

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from helpers.support import HYPOTHESIS_PROFILE as PROFILE
from picompile.testing import (
    assert_equivalent,
    build,
    captured_decoders,
    check_pass,
    check_run,
    graphs,
    hot_sets,
    models,
    pipelines,
    random_weights,
    shapes,
    skipping_predictors,
)
from picompile_passes.base import Pass, Stage, stage_of
from picompile_passes.dialect import FORMATS
from picompile_passes.errors import PassesError, StageError, UnsupportedGraphError
from picompile_passes.graph.dump import graph_text
from picompile_passes.graph.nodes import arguments, attribute, calls, is_call
from picompile_passes.graph.operands import ATTENTION, INDEX_SELECT, SPARSE_FFN
from picompile_passes.passes.canonicalize import CANONICALIZE
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.passes.skip_inputs import SkipInputs
from picompile_passes.pipeline import Pipeline, verifying
from picompile_passes.verify import verify

# The same few in every run of `make test`, more where `tests/mutation/check.py` plants faults, and as many as asked for
# in `make fuzz`.
EXAMPLES = {"ci": 6, "mutation": 20}.get(PROFILE, settings.default.max_examples)
check = partial(check_pass, shrink=not settings.default.derandomize)
pytestmark = pytest.mark.hypothesis


def captured_before(pass_: Pass) -> st.SearchStrategy[torch.fx.GraphModule]:
    """Captured decoders as compilation hands them to `pass_`."""
    before = Pipeline(CANONICALIZE[: CANONICALIZE.index(pass_)])
    return captured_decoders().map(lambda graph_module: before(graph_module).graph_module)


@pytest.mark.parametrize("pass_", CANONICALIZE, ids=lambda pass_: pass_.name)
def test_raising(pass_):
    check(pass_, graphs=captured_before(pass_), may_refuse=False, max_examples=EXAMPLES)


@pytest.mark.slow("draws graphs for each pass; one in another order is fast", but=("raise-attention",))
# All but the last two: one takes whatever arithmetic the others have left, the other ends the stage.
@pytest.mark.parametrize("pass_", CANONICALIZE[:-2], ids=lambda pass_: pass_.name)
def test_raising_out_of_order(pass_):
    check(pass_, graphs=graphs(Stage.CAPTURED), max_examples=EXAMPLES)


def test_insert_predictors():
    check(st.sampled_from(["auto", "none"]).map(InsertPredictors), may_refuse=False, max_examples=EXAMPLES)


def test_insert_predictors_exact():
    check(InsertPredictors("exact"), max_examples=EXAMPLES)


def test_insert_predictors_that_skip():
    check(skipping_predictors, graphs=graphs(Stage.CANONICAL), may_refuse=False, max_examples=EXAMPLES)


def test_skip_inputs():
    def passes(graph_module):
        layers = [arguments(node)["layer"] for node in calls(graph_module.graph, ATTENTION)]
        names = st.sampled_from([("qkv",), ("attention_output",), ("qkv", "attention_output")])
        return st.dictionaries(st.sampled_from(layers), names).map(SkipInputs)

    stages = st.sampled_from([Stage.CANONICAL, Stage.PREDICTED, Stage.PARTITIONED])
    check(passes, graphs=stages.flatmap(graphs), may_refuse=False, max_examples=EXAMPLES)


def test_partition():
    def partitions(graph_module):
        return hot_sets(graph_module).map(Partition)

    check(partitions, graphs=graphs(Stage.PREDICTED), may_refuse=False, max_examples=2 * EXAMPLES)


@pytest.mark.slow("draws graphs for each format; three formats are fast", but=("f16", "q4"))
@pytest.mark.parametrize("form", [*FORMATS])
def test_quantize(form):
    weights = partial(random_weights, representable=form)
    stages = st.sampled_from([Stage.PREDICTED, Stage.PARTITIONED, Stage.PARTITIONED])
    check(
        Quantize(form),
        graphs=stages.flatmap(graphs),
        weights=weights,
        may_refuse=False,
        max_examples=EXAMPLES,
    )


@pytest.mark.slow("draws graphs for each format; one format is fast", but=("q4]",))
@pytest.mark.parametrize("form", [*FORMATS])
def test_quantize_leaves_what_is_packed(form):
    check(
        Quantize(form),
        graphs=graphs(Stage.QUANTIZED),
        weights=partial(random_weights, representable=form),
        may_refuse=False,
        max_examples=EXAMPLES // 2,
    )


@settings(max_examples=2 * EXAMPLES)
@given(data=st.data())
def test_partition_puts_the_neurons_where_it_was_told(data):
    before = data.draw(graphs(Stage.PREDICTED))
    hot = data.draw(hot_sets(before))
    after = Partition(hot)(before).graph_module
    for layer, blocks in blocks_by_layer(after).items():
        on_device = {block.meta.get("device"): neurons_of(after, block) for block in blocks}
        if layer not in hot:
            assert set(on_device) == {None}
            continue
        total = neuron_count(before, layer)
        cold = [neuron for neuron in range(total) if neuron not in hot[layer]]
        wanted = {"hot": sorted(hot[layer]), "cold": cold}
        assert on_device == {device: neurons for device, neurons in wanted.items() if neurons}
        assert all(arguments(block)["mask"].meta.get("device") in (None, block.meta["device"]) for block in blocks)


@settings(max_examples=EXAMPLES)
@given(data=st.data(), shape=shapes(bias=True))
def test_predictors_are_those_that_were_asked_for(data, shape):
    before = build(shape)
    pass_ = data.draw(skipping_predictors(before), label="pass")
    after = pass_(before).graph_module
    verify(after, Stage.PREDICTED)
    blocks = {layer: arguments(block) for layer, (block,) in blocks_by_layer(after).items()}
    for layer, block in blocks.items():
        predictor = arguments(block["mask"])
        assert predictor["kind"] == pass_.kinds.get(layer, pass_.kind)
        assert predictor["threshold"] == pass_.thresholds.get(layer, 0.0)
        assert (
            predictor["x"]
            is {
                "block": block["x"],
                "stream": arguments(block["x"])["x"],
                "previous": blocks.get(layer - 1, block)["x"],
            }[pass_.inputs.get(layer, "block")]
        )
        own = [str(weight.target) for weight in predictor["weights"] if str(weight.target).startswith("predictors")]
        assert all(name.startswith(f"predictors.layers.{layer}.") for name in own)
        if layer in pass_.ranks:
            assert predictor["weights"][0].meta["val"].shape == (pass_.ranks[layer], shape.hidden)


def blocks_by_layer(graph_module):
    found = {}
    for block in calls(graph_module.graph, SPARSE_FFN):
        found.setdefault(block.meta["layer"], []).append(block)
    return found


def neuron_count(graph_module, layer):
    (block,) = blocks_by_layer(graph_module)[layer]
    return int(arguments(block)["up"].meta["val"].shape[0])


def neurons_of(graph_module, block):
    """Which neurons of the layer the rows of `block` are."""
    up = arguments(block)["up"]
    table = arguments(up)["index"] if is_call(up, INDEX_SELECT) and "device" in block.meta else None
    if table is not None and table.name.endswith("_neurons"):
        return attribute(graph_module, str(table.target)).tolist()
    return list(range(int(up.meta["val"].shape[0])))


@settings(max_examples=3 * EXAMPLES)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_any_order_of_passes_works_or_names_the_stage(data, seed):
    before = data.draw(st.sampled_from(list(Stage)).flatmap(graphs))
    pipeline = data.draw(pipelines(graph_module=before), label="pipeline")
    note(graph_text(before))
    try:
        after = Pipeline(pipeline.passes, hook=verifying)(before).graph_module
    except StageError as error:
        assert "needs a graph of stage" in str(error)
        return
    except UnsupportedGraphError as error:
        # Flattening is for what the other passes have raised, and says at which node it is not. So is arithmetic.
        assert {"flatten-tokens", "raise-elementwise"} & {pass_.name for pass_ in pipeline.passes}
        assert "cannot be expressed in the dialect" in str(error) or "is not supported" in str(error)
        return
    except PassesError as error:
        assert "is partitioned already" in str(error) or "no feed-forward block of that number" in str(error)
        return
    assert pipeline.ensures is None or stage_of(after) >= pipeline.ensures
    if not any(isinstance(pass_, Quantize) for pass_ in pipeline.passes):
        assert_equivalent(before, after, weights=random_weights(before, seed), seed=seed)


@settings(max_examples=EXAMPLES // 2)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_the_pipeline_is_a_pass(data, seed):
    before = data.draw(captured_decoders())
    check_run(
        Pipeline((*CANONICALIZE, InsertPredictors(), Partition())), before, random_weights(before, seed), seed=seed
    )


@pytest.mark.slow("runs all passes on all families")
@settings(max_examples=EXAMPLES // 2)
@given(model=models(), seed=st.integers(0, 2**16))
def test_models_of_all_families(model, seed):
    """From the eager model to the last stage before rounding, hot and cold parts included."""
    note(str(model.config))
    assert_equivalent(model.module, model.graph_module, weights=model.weights, seed=seed)
    graph_module = model.graph_module
    for pass_ in (*CANONICALIZE, InsertPredictors()):
        graph_module = check_run(pass_, graph_module, model.weights, seed=seed).graph_module
    hot = {layer: range(0, neuron_count(graph_module, layer), 3) for layer in blocks_by_layer(graph_module)}
    check_run(Partition(hot), graph_module, model.weights, seed=seed)
