"""Predictions that are made while the layer before waits for the host: what they cost, and how they are placed."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from test_solver import SEEDS, random_places

from helpers.random_tasks import random_task
from picompile.errors import DoesNotFitError
from picompile.placement.model_bytes import predicting_early
from picompile.placement.planning import PlanOptions, make_plan
from picompile.placement.problem import (
    PlacementTask,
    evaluate,
    latency_problem,
)
from picompile.placement.solver import solve
from picompile.placement.times import PartPlaces


def early_task(seed: int) -> PlacementTask:
    """A random task with a GPU, some of whose layers have predictors that read the layer before."""
    while True:
        task = random_task(seed)
        rng = np.random.default_rng(seed)
        early = set(np.flatnonzero(rng.random(len(task.model.layers)) < 0.8).tolist())
        model = predicting_early(task.model, early)
        is_early = any(layer.predicts_early for layer in model.layers)
        if is_early and task.machine.gpu_bytes > model.workspace_bytes + model.table_bytes:
            return replace(task, model=model)
        seed += 1


@given(SEEDS)
def test_a_prediction_fills_the_time_in_which_the_accelerator_waits(seed: int) -> None:
    """The cost is that of layers in which the next prediction comes behind the hot neurons, beside the cold ones."""
    task = early_task(seed)
    program = latency_problem(task)
    places = random_places(program, seed)
    layers = task.model.layers
    wheres = [program.stages[number].choices[place.choice].label for number, place in enumerate(places)]
    early = [False]
    for number in range(1, len(layers)):
        before, where = wheres[number - 1], wheres[number]
        assert isinstance(before, PartPlaces) and isinstance(where, PartPlaces)
        on_gpu = before.attention_on_accelerator and where.attention_on_accelerator
        early.append(layers[number].predicts_early and on_gpu and where.predictor_on_accelerator)
    expected = 0.0
    for number, place in enumerate(places[:-1]):
        where = wheres[number]
        assert isinstance(where, PartPlaces)
        seconds = task.layer_times(number).times(where).at(place.groups)
        next_s = 0.0
        if number + 1 < len(layers) and early[number + 1]:
            next_s = task.layer_times(number + 1).predict_s(on_accelerator=True)
        own_s = 0.0 if early[number] else seconds["predict_s"]
        expected += seconds["attention_s"] + seconds["kv_cache_s"] + own_s + seconds["exchange_s"]
        expected += max(seconds["hot_s"] + next_s, seconds["cold_s"])
    sides = [False, *(program.stages[n].choices[p.choice].on_accelerator for n, p in enumerate(places)), False]
    switches = sum(one != other for one, other in pairwise(sides))
    head = program.stages[-1].choices[places[-1].choice].cost(0)
    np.testing.assert_allclose(evaluate(program, places).cost, expected + head + switches * program.switch_cost)


# Each example solves several programs.
@settings(max_examples=15)
@given(SEEDS)
def test_a_plan_says_what_is_hidden(seed: int) -> None:
    """Layers, head and transfers make a token's time."""
    task = early_task(seed)
    try:
        plan = make_plan(task.model, task.firing, PlanOptions("random", task.machine, margin=0.0, tokens=task.tokens))
    except DoesNotFitError:
        return
    for number, layer in enumerate(plan.layers):
        parts = layer.attention_s + layer.kv_cache_s + layer.predict_s - layer.predict_hidden_s
        np.testing.assert_allclose(layer.total_s, parts + max(layer.hot_s, layer.cold_s) + layer.exchange_s)
        assert 0 <= layer.predict_hidden_s <= layer.predict_s
        if layer.predict_hidden_s:
            assert task.model.layers[number].predicts_early
            before = plan.layers[number - 1]
            assert layer.attention == layer.predictor == before.attention == "accelerator"
            assert layer.predict_hidden_s <= before.cold_s - before.hot_s
    sides = ["host", *(layer.attention for layer in plan.layers), plan.head, "host"]
    switches = sum(one != other for one, other in pairwise(sides))
    layers_s = sum(layer.total_s for layer in plan.layers)
    np.testing.assert_allclose(plan.token_s, layers_s + plan.head_s + switches * plan.switch_s)


@settings(max_examples=15)
@given(SEEDS)
def test_early_predictions_never_make_a_plan_slower(seed: int) -> None:
    task = early_task(seed)
    late = replace(task, model=predicting_early(task.model, ()))
    early_solution, late_solution = (solve(latency_problem(each), gap=0.0) for each in (task, late))
    assert (early_solution is None) == (late_solution is None)
    if early_solution is not None and late_solution is not None:
        assert early_solution.totals.cost <= late_solution.totals.cost * (1 + 1e-6)


def test_only_predictors_with_weights_behind_the_first_layer_are_early() -> None:
    model = random_task(5).model
    first = replace(model.layers[0], predictor_bytes=7)
    layers = (first, first, replace(first, predictor_bytes=0), first)
    marked = predicting_early(replace(model, layers=layers), range(3))
    assert [layer.predicts_early for layer in marked.layers] == [False, True, False, False]
