"""Plans of random models on random machines: memory, infeasible placements, and never worse than any policy."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.random_tasks import random_task
from picompile.errors import DoesNotFitError, SolverError, UsageError
from picompile.placement import policies
from picompile.placement.goal import OBJECTIVES
from picompile.placement.machine import Machine
from picompile.placement.plan import Plan, check_budgets
from picompile.placement.planning import PlanOptions, make_plan
from picompile.placement.problem import PlacementTask, evaluate, latency_problem
from picompile.quantities import parse_bytes

SEEDS = st.integers(0, 2**32 - 1)
_MIB = 2**20


def options_of(task: PlacementTask, margin: float = 0.05, objective: str = "latency") -> PlanOptions:
    return PlanOptions("random", task.machine, objective=objective, margin=margin, tokens=task.tokens)


def taken(plan: Plan, device: str) -> int:
    return sum(row.bytes for row in plan.memory if row.device == device)


@pytest.mark.slow("plans many random models")
@settings(max_examples=100)
@given(SEEDS, st.sampled_from([0.0, 0.05, 0.5]), st.sampled_from(OBJECTIVES))
def test_every_byte_is_in_the_memory_table_and_within_the_budgets(seed: int, margin: float, objective: str) -> None:
    """On both devices together: the model, a second workspace where there are two, rounding of groups and vectors."""
    task = random_task(seed)
    model = task.model
    try:
        plan = make_plan(model, task.firing, options_of(task, margin, objective))
    except DoesNotFitError:
        return
    check_budgets(plan)
    assert taken(plan, "accelerator") <= task.machine.gpu_bytes * (1 - margin)
    assert taken(plan, "host") <= task.machine.host_bytes * (1 - margin)
    weights, slack = model.embedding_bytes + model.head_bytes, 0
    for layer in model.layers:
        weights += layer.attention_bytes + layer.shared_bytes + layer.predictor_bytes + layer.kv_cache_bytes
        weights += layer.neurons * layer.neuron_bytes
        slack += 64 * (layer.neuron_bytes + layer.number_bytes) + layer.neurons * layer.number_bytes + 2 * 192
    devices = {row.device for row in plan.memory}
    weights += len(devices) * (model.workspace_bytes + model.table_bytes)
    weights += model.staging_bytes if "accelerator" in devices else 0
    lends = "accelerator" in devices and any(layer.kv_cache == "host" for layer in plan.layers)
    weights += 2 * model.lent_bytes if lends else 0
    assert weights <= taken(plan, "accelerator") + taken(plan, "host") <= weights + slack


@pytest.mark.slow("plans many random models")
# Each example solves a dozen programs and more.
@settings(max_examples=30)
@given(SEEDS, st.sampled_from(OBJECTIVES))
def test_the_infeasible_error_names_the_smallest_budgets(seed: int, objective: str) -> None:
    task = random_task(seed)
    try:
        make_plan(task.model, task.firing, options_of(task, objective=objective))
    except DoesNotFitError as error:
        message = str(error)
    else:
        return
    host = re.search(r"--host-memory ([\d.]+[MG]iB)", message)
    gpu = re.search(r"--vram-budget ([\d.]+[MG]iB)", message)
    assert host and len(set(re.findall("[MG]iB", message))) == 1, message
    for found, name in ((host, "host_bytes"), (gpu, "gpu_bytes")):
        if found is None:
            continue
        # The error rounds a budget up to a hundredth of its unit.
        named, rounded = parse_bytes(found[1], name), parse_bytes(f".01{found[1][-3:]}", name)
        for budget, fits in ((named, True), (named - rounded - 2 * _MIB, False)):
            machine = Machine(**{**vars(task.machine), name: max(0, budget)})
            options = PlanOptions("random", machine, objective=objective, tokens=task.tokens)
            if fits:
                make_plan(task.model, task.firing, options)
            elif budget > 0:
                with pytest.raises(DoesNotFitError):
                    make_plan(task.model, task.firing, options)


def test_the_infeasible_error_names_what_a_gpu_can_have() -> None:
    task = random_task(5)
    # With the rest on the GPU, half of what it would need is enough for the host.
    tight = replace(task.machine, gpu_bytes=1, host_bytes=100 * _MIB)
    for most, named in ((None, True), (1 << 40, True), (1 << 20, False)):
        message = _refused(task, tight, most)
        assert message is not None and " of the GPU's may be taken; it would with --host-memory " in message
        assert ("--vram-budget" in message) == named
    message = _refused(task, Machine(0, 0.0, 1, 30e9, 0.0, 0.0), 0)
    assert message is not None and "GPU" not in message


def _refused(task: PlacementTask, machine: Machine, most_gpu_bytes: int | None) -> str | None:
    try:
        make_plan(task.model, task.firing, PlanOptions("any", machine, margin=0.0, most_gpu_bytes=most_gpu_bytes))
    except DoesNotFitError as error:
        return str(error)
    return None


@pytest.mark.slow("plans many random models")
@settings(max_examples=60)
@given(SEEDS)
def test_no_policy_is_faster_than_the_neurons_that_fire_most(seed: int) -> None:
    task = random_task(seed)
    try:
        plan = make_plan(task.model, task.firing, options_of(task, margin=0.0))
    except DoesNotFitError:
        return
    program = latency_problem(PlacementTask(task.model, task.firing, plan.machine, plan.tokens))
    for places in policies.known(PlacementTask(task.model, task.firing, plan.machine, plan.tokens), program):
        totals = evaluate(program, places)
        if totals.fits(program):
            assert plan.token_s <= totals.cost * (1 + 1e-9)
    for layer, firing in zip(plan.layers, task.firing.layers, strict=True):
        np.testing.assert_allclose(layer.hot_computed, firing.shares[: layer.hot_neurons].sum(), rtol=1e-9, atol=1e-12)
        assert layer.hot_neurons == layer.neurons or layer.hot_neurons % 64 == 0
        order = firing.order
        assert layer.hot == (None if order is None else tuple(sorted(order[: layer.hot_neurons].tolist())))


def test_without_a_gpu_everything_is_on_the_host() -> None:
    task = random_task(5)
    machine = Machine(0, 0.0, 1 << 40, 30e9, 0.0, 0.0)
    for objective in ("latency", "impact"):
        plan = make_plan(task.model, task.firing, PlanOptions("cpu", machine, objective=objective))
        assert {row.device for row in plan.memory} == {"host"}
        assert all(layer.hot_neurons == 0 for layer in plan.layers)
        assert set(plan.baselines) == {"host"}


def test_wrong_plan_options_are_refused() -> None:
    for wrong in ({"objective": "speed"}, {"margin": 1.0}, {"margin": -0.1}, {"tokens": -1}):
        with pytest.raises(UsageError, match=str(next(iter(wrong.values())))):
            PlanOptions("cpu", Machine(0, 0.0, 1, 1.0, 0.0, 0.0), **wrong)  # type: ignore[arg-type]


def test_no_plan_takes_more_than_its_budgets() -> None:
    task = random_task(7)
    plan = make_plan(task.model, task.firing, options_of(task, 0.0))
    check_budgets(plan)
    for device, field in (("accelerator", "gpu_bytes"), ("host", "host_bytes")):
        if plan.taken_bytes(device):
            short = replace(plan.machine, **{field: plan.taken_bytes(device) - 1})
            with pytest.raises(SolverError, match=f"bytes of the {device}'s memory"):
                check_budgets(replace(plan, machine=short))
