"""Our own passes under the property suite of `picompile.testing`, on random graphs of every stage.

`tests/mutation/check.py` plants faults in the passes and sees whether these tests find them.
"""

from contextlib import suppress
from functools import partial

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from helpers.random_models import models
from helpers.support import HYPOTHESIS_PROFILE as PROFILE
from helpers.weight_formats import ROW_FORMATS
from picompile.testing import (
    PROPERTIES,
    CapturedStyle,
    PropertyError,
    assert_equivalent,
    build,
    build_captured,
    captured_decoders,
    check_run,
    graphs,
    hot_sets,
    pipelines,
    random_weights,
    shapes,
    skipping_predictors,
)
from picompile.testing.properties import Snapshot, Trial
from picompile_passes.base import Stage, stage_of
from picompile_passes.errors import PassesError, StageError, UnsupportedGraphError
from picompile_passes.graph.dump import graph_text
from picompile_passes.graph.nodes import arguments, attribute, calls, is_call
from picompile_passes.graph.operands import INDEX_SELECT, SPARSE_FFN
from picompile_passes.passes.canonicalize import CANONICALIZE
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline, verifying
from picompile_passes.verify import verify

# The same few in every run of `make test`, more where faults are planted in the passes, and as many as asked for in
# `make fuzz`.
EXAMPLES = {"ci": 3, "mutation": 20}.get(PROFILE, settings.default.max_examples)
pytestmark = pytest.mark.hypothesis
few = partial(settings, deadline=None, suppress_health_check=list(HealthCheck))


def walked(graph_module, passes, weights, seed, bound=None):
    """Run passes one behind the other, and hold each to its properties. That it `continues`, the next ones show."""
    for pass_ in passes:
        trial = Trial(pass_, graph_module, Snapshot.of(graph_module), pass_(graph_module), weights, bound, seed)
        for name, faults_of in PROPERTIES.items():
            for fault in faults_of(trial) if name != "continues" else ():
                raise PropertyError(name, pass_, fault)
        graph_module = trial.after
    return graph_module


def walked_to_the_end(captured, weights, seed):
    """Take a captured graph through all passes; every third neuron is hot, and matrices are rounded to float16."""
    predicted = walked(captured, (*CANONICALIZE, InsertPredictors()), weights, seed)
    hot = {layer: range(0, neuron_count(predicted, layer), 3) for layer in blocks_by_layer(predicted)}
    partitioned = walked(predicted, [Partition(hot)], weights, seed)
    walked(partitioned, [Quantize("f16")], weights, seed, bound=0.05)


@few(max_examples=EXAMPLES)
@given(captured=captured_decoders(), seed=st.integers(0, 2**16))
def test_all_passes_in_order(captured, seed):
    walked_to_the_end(captured, random_weights(captured, seed), seed)


@few(max_examples=EXAMPLES // 2)
@given(before=graphs(Stage.CAPTURED), seed=st.integers(0, 2**16))
def test_raising_out_of_order(before, seed):
    """All but the last three: one takes whatever arithmetic the others have left, the others end the stage."""
    weights = random_weights(before, seed)
    for pass_ in CANONICALIZE[:-3]:
        with suppress(UnsupportedGraphError):
            check_run(pass_, before, weights, seed=seed)


@few(max_examples=2 * EXAMPLES)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_insert_predictors(data, seed):
    before = data.draw(graphs(Stage.CANONICAL))
    plain = st.sampled_from(["auto", "none", "exact"]).map(InsertPredictors)
    pass_ = data.draw(st.one_of(plain, skipping_predictors(before)), label="pass")
    check_run(pass_, before, random_weights(before, seed), seed=seed, may_refuse=pass_.kind == "exact")


@few(max_examples=2 * EXAMPLES)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_partition_puts_the_neurons_where_it_was_told(data, seed):
    before = data.draw(graphs(Stage.PREDICTED))
    hot = data.draw(hot_sets(before))
    after = check_run(Partition(hot), before, random_weights(before, seed), seed=seed).graph_module
    for layer, blocks in blocks_by_layer(after).items():
        by_mark = {block.meta.get("neurons"): neurons_of(after, block) for block in blocks}
        if layer not in hot:
            assert set(by_mark) == {None}
            continue
        total = neuron_count(before, layer)
        cold = [neuron for neuron in range(total) if neuron not in hot[layer]]
        wanted = {"hot": sorted(hot[layer]), "cold": cold}
        assert by_mark == {mark: neurons for mark, neurons in wanted.items() if neurons}
        assert all(arguments(block)["mask"].meta.get("neurons") in (None, block.meta["neurons"]) for block in blocks)


@few(max_examples=2 * EXAMPLES)
@given(data=st.data(), form=st.sampled_from(ROW_FORMATS), seed=st.integers(0, 2**16))
def test_quantize(data, form, seed):
    """Matrices that are packed already stay as they are."""
    stages = [Stage.PREDICTED, Stage.PARTITIONED, Stage.PARTITIONED, Stage.QUANTIZED]
    before = data.draw(st.sampled_from(stages).flatmap(graphs))
    check_run(Quantize(form), before, random_weights(before, seed, representable=form), seed=seed)


@few(max_examples=4 * EXAMPLES)
@given(data=st.data(), shape=st.one_of(shapes(bias=True), shapes(bias=True, gated=False)))
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
    table = arguments(up)["index"] if is_call(up, INDEX_SELECT) and "neurons" in block.meta else None
    if table is not None and table.name.endswith("_neurons"):
        return attribute(graph_module, str(table.target)).tolist()
    return list(range(int(up.meta["val"].shape[0])))


@few(max_examples=2 * EXAMPLES)
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


def test_the_pipeline_is_a_pass():
    before = build_captured(CapturedStyle())
    check_run(Pipeline((*CANONICALIZE, InsertPredictors(), Partition())), before, random_weights(before, 0))


@pytest.mark.slow("runs all passes on all families")
@few(max_examples=EXAMPLES // 2)
@given(model=models(), seed=st.integers(0, 2**16))
def test_models_of_all_families(model, seed):
    note(str(model.config))
    assert_equivalent(model.module, model.graph_module, weights=model.weights, seed=seed)
    walked_to_the_end(model.graph_module, model.weights, seed)
