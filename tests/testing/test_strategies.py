"""Each strategy gives what it says, and all kinds of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picompile.machine.targets import TARGETS, Target
from picompile.testing import (
    LLAMA,
    SKIPPING_KINDS,
    assert_equivalent,
    build,
    every_neuron,
    graphs,
    hot_sets,
    pipelines,
    random_weights,
    skipping_predictors,
    targets,
)
from picompile_passes.base import Effect, Stage, stage_of
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import PREDICT, SPARSE_FFN
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.pipeline import Pipeline, verifying
from picompile_passes.verify import verify


@pytest.mark.slow("draws graphs of a stage; packed ones are fast", but=("quantized",))
@pytest.mark.parametrize("stage", list(Stage), ids=lambda stage: stage.text)
def test_graphs_are_of_their_stage_and_verify(stage):
    kinds = set()

    @settings(max_examples=20 if stage is Stage.PREDICTED else 4)
    @given(data=st.data())
    def check(data):
        graph_module = data.draw(graphs(stage))
        assert stage_of(graph_module) is stage
        verify(graph_module, stage)
        kinds.update(arguments(mask)["kind"] for mask in calls(graph_module.graph, PREDICT))
        if stage is Stage.PREDICTED:
            blocks = {block.meta["layer"]: arguments(block) for block in calls(graph_module.graph, SPARSE_FFN)}
            for layer, hot in data.draw(hot_sets(graph_module)).items():
                assert set(hot) <= set(range(int(blocks[layer]["up"].meta["val"].shape[0])))

    check()
    if stage is Stage.PREDICTED:
        assert kinds >= {"exact", "none"}
        assert len(kinds & set(SKIPPING_KINDS)) >= 2


def test_predictors_that_skip_are_of_all_kinds_and_read_all_inputs():
    kinds, inputs, effects = set(), set(), set()

    @settings(max_examples=40)
    @given(pass_=skipping_predictors(build(LLAMA)))
    def look(pass_):
        kinds.update({pass_.kind, *pass_.kinds.values()})
        inputs.update(pass_.inputs.items())
        effects.add(pass_.effect)

    look()
    assert kinds == {"none", *SKIPPING_KINDS}
    assert inputs == {(0, "block"), (0, "stream"), (1, "block"), (1, "stream"), (1, "previous")}
    assert effects == {Effect.SKIPS}


def test_every_neuron_is_computed_where_a_predictor_would_skip_it():
    before = build(LLAMA)
    weights = random_weights(before)
    skipping = InsertPredictors("sign", thresholds={0: 1.0, 1: 1.0})(before).graph_module
    limited = InsertPredictors("none", gate_limits=(0,), output_limits=(0, 1))(before).graph_module
    with pytest.raises(AssertionError, match="differ"):
        assert_equivalent(before, skipping, weights=weights)
    for after in (skipping, limited):
        assert_equivalent(before, every_neuron(after), weights=weights)


def test_targets_are_known_ones_and_others():
    names = set()

    @given(target=targets())
    def look(target):
        assert isinstance(target, Target)
        names.add(target.name)

    look()
    assert set(TARGETS) < names


@pytest.mark.slow("draws many graphs; passes' own property tests are fast")
@settings(max_examples=15)
@given(data=st.data())
def test_ordered_pipelines_run(data):
    graph_module = data.draw(st.sampled_from([Stage.CANONICAL, Stage.PREDICTED]).flatmap(graphs))
    pipeline = data.draw(pipelines(graph_module=graph_module, ordered=True))
    assert isinstance(pipeline, Pipeline)
    after = Pipeline(pipeline.passes, hook=verifying)(graph_module).graph_module
    assert stage_of(after) >= stage_of(graph_module)
