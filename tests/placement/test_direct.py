"""The prefix form against programs in which any set of groups may be hot, and these against every set there is."""

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from helpers.direct_placement import Direct, direct_impact, direct_latency, most_lost_s, restricted
from helpers.random_tasks import random_task, whole_bytes
from picompile.placement.problem import (
    PlacementProblem,
    PlacementTask,
    Totals,
    capacities,
    dense_first,
    fixed_bytes,
    group_bytes,
    impact_problem,
    latency_problem,
    places_of,
)
from picompile.placement.solver import solve
from picompile.placement.times import (
    ALL_ON_ACCELERATOR,
    ALL_ON_HOST,
    GROUP_NEURONS,
    PartPlaces,
    group_count,
    transfer_launches,
)

SEEDS = st.integers(0, 2**32 - 1)
ROUNDING = 1e-6


def small_task(seed: int) -> PlacementTask:
    """Up to three layers of up to five groups, on a machine with a GPU of which mostly some is free for neurons."""
    task, rng = random_task(seed, 3, 5 * GROUP_NEURONS), np.random.default_rng(seed)
    model = replace(task.model, head_bytes=task.model.head_bytes // 100, workspace_bytes=10, table_bytes=10)
    neurons = sum(group_count(layer.neurons) * group_bytes(layer) for layer in model.layers)
    fixed = sum(fixed_bytes(layer, ALL_ON_ACCELERATOR)[0] for layer in model.layers) + model.head_bytes + 20
    gpu = int(fixed * rng.choice([1.0, 1.0, 1.0, rng.uniform(0, 1)]) + neurons * rng.uniform(0, 1.1)) + 1
    gpu += model.staging_bytes + model.lent_bytes
    host = int(whole_bytes(model) * rng.choice([2.0, rng.uniform(0, 1)])) + 2 * neurons
    sync_s = float(10 ** rng.uniform(-9, -3))
    machine = replace(task.machine, gpu_bytes=gpu, host_bytes=host, sync_s=sync_s)
    return replace(task, model=model, machine=machine)


def placed(task: PlacementTask, seed: int) -> tuple[list[PartPlaces], bool]:
    """The parts of layers that are not neurons, and the head, anywhere."""
    rng = np.random.default_rng(seed)
    if rng.random() < 0.5:
        return dense_first(task, bool(rng.integers(0, 2)))
    wheres = [places_of(layer)[rng.integers(len(places_of(layer)))] for layer in task.model.layers]
    return wheres, bool(rng.integers(0, 2))


def subsets(groups: int) -> NDArray[np.bool_]:
    """Every set of groups: bool [2 ** groups, groups]."""
    return np.asarray(list(itertools.product((False, True), repeat=groups)))


def best_of_all(
    task: PlacementTask, wheres: list[PartPlaces], head_on_accelerator: bool, costs: list[NDArray[np.float64]]
) -> float | None:
    """The least sum of `costs` (float64 [2 ** groups] for each layer) that both devices have room for."""
    gpu, host = capacities(task)
    head = task.model.head_bytes
    totals = [np.zeros(1), np.asarray([head * head_on_accelerator]), np.asarray([head * (not head_on_accelerator)])]
    for layer, where, of_layer in zip(task.model.layers, wheres, costs, strict=True):
        moved = subsets(group_count(layer.neurons)).sum(axis=1) * group_bytes(layer)
        on_accelerator, on_host = fixed_bytes(layer, where)
        parts = (of_layer, on_accelerator + moved, on_host - moved)
        totals = [np.add.outer(total, part).ravel() for total, part in zip(totals, parts, strict=True)]
    cost, gpu_bytes, host_bytes = totals
    fits = (gpu_bytes <= gpu) & (host_bytes <= host) & np.isfinite(cost)
    return float(cost[fits].min()) if fits.any() else None


def group_sums(task: PlacementTask, number: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(bytes read in each group, firings of each) of a layer."""
    layer, shares = task.model.layers[number], task.firing.layers[number].shares
    starts = range(0, layer.neurons, GROUP_NEURONS)
    fired = np.asarray([shares[start : start + GROUP_NEURONS].sum() for start in starts])
    looked_at = np.asarray([len(shares[start : start + GROUP_NEURONS]) for start in starts]) * layer.gating_bytes
    return looked_at + fired * (layer.neuron_bytes - layer.gating_bytes), fired


def impact_costs(task: PlacementTask, number: int, where: PartPlaces) -> NDArray[np.float64]:
    """Firings that a layer's sets of groups do not bring to the GPU, negative; infinite where inequality 4 fails."""
    layer, machine = task.model.layers[number], task.machine
    sets = subsets(group_count(layer.neurons))
    size = GROUP_NEURONS * sets.sum(axis=1) * layer.neuron_bytes
    worth = size / machine.gpu_bytes_per_s + machine.sync_s <= size / machine.host_bytes_per_s
    allowed = ~sets.any(axis=1) | (worth & where.attention_on_accelerator)
    return np.where(allowed, -(sets @ group_sums(task, number)[1]), np.inf)


def latency_costs(task: PlacementTask, number: int, where: PartPlaces) -> NDArray[np.float64]:
    """Seconds of a layer for each of its sets of groups, written out anew."""
    layer, machine, shares = task.model.layers[number], task.machine, task.firing.layers[number].shares
    times = task.layer_times(number).times(where)
    sets = subsets(group_count(layer.neurons))
    read, _ = group_sums(task, number)
    launch_s = layer.hot_launches * machine.launch_s
    hot_s = sets @ read / machine.gpu_read_bytes_per_s + np.where(sets.any(axis=1), launch_s, 0.0)
    cold_s = ~sets @ read / machine.host_read_bytes_per_s
    starts = range(0, layer.neurons, GROUP_NEURONS)
    silent = np.asarray([np.prod(1 - shares[start : start + GROUP_NEURONS]) for start in starts])
    fires = 1 - np.where(sets, 1.0, silent).prod(axis=1)
    if layer.gating_bytes:
        fires = np.where(sets.all(axis=1), 0.0, 1.0)
    exchanges = np.where(sets.any(axis=1), 1.0, 0.0)
    if where.attention_on_accelerator:
        exchanges = fires
        if layer.predictor_bytes and not where.predictor_on_accelerator:
            exchanges = 1.0 + np.where(sets.any(axis=1) & ~sets.all(axis=1), fires, 0.0)
        exchanges = exchanges + (not where.kv_cache_on_accelerator)
    crossing_s = machine.crossing_s(2 * task.model.sequences * (4 * task.model.hidden + layer.neurons / 8))
    beside_s = max(0.0, crossing_s - 2 * machine.launch_s)
    none, some, every = transfer_launches(layer, where)
    launches = np.where(sets.all(axis=1), every, np.where(sets.any(axis=1), some, none))
    before_s = times.attention_s[0] + times.kv_cache_s[0] + times.predict_s[0]
    return before_s + np.maximum(hot_s, cold_s) + exchanges * beside_s + launches * machine.launch_s


def given_s(
    task: PlacementTask, program: PlacementProblem, wheres: list[PartPlaces], head_on_accelerator: bool
) -> float:
    """Head and transfers between the sides."""
    label = ALL_ON_ACCELERATOR if head_on_accelerator else ALL_ON_HOST
    head = next(choice for choice in program.stages[-1].choices if choice.label == label)
    sides = [False, *(where.attention_on_accelerator for where in wheres), head_on_accelerator, False]
    return head.cost(0) + sum(one != other for one, other in itertools.pairwise(sides)) * program.switch_cost


def agree(found: Direct | Totals | None, expected: float | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return abs(found.cost - expected) <= ROUNDING * max(1e-6, abs(expected))


def prefixes(program: PlacementProblem) -> Totals | None:
    found = solve(program, gap=0.0)
    return None if found is None else found.totals


@given(SEEDS, st.booleans())
def test_prefixes_of_neurons_solve_the_papers_problem(seed: int, kv_cache_on_accelerator: bool) -> None:
    task = small_task(seed)
    wheres, head_on_accelerator = dense_first(task, kv_cache_on_accelerator)
    # Inequality 6 is strict.
    smaller = replace(task.machine, gpu_bytes=task.machine.gpu_bytes - 1, host_bytes=task.machine.host_bytes - 1)
    costs = [impact_costs(task, number, where) for number, where in enumerate(wheres)]
    expected = best_of_all(replace(task, machine=smaller), wheres, head_on_accelerator, costs)
    assert agree(prefixes(impact_problem(task, kv_cache_on_accelerator)), expected)
    assert agree(direct_impact(task, kv_cache_on_accelerator, gap=0.0), expected)


@given(SEEDS)
def test_the_direct_program_in_order_has_the_prefix_solution(seed: int) -> None:
    task = small_task(seed)
    wheres, head_on_accelerator = placed(task, seed)
    program = restricted(latency_problem(task), wheres, head_on_accelerator)
    costs = []
    for number, where in enumerate(wheres):
        sets = subsets(group_count(task.model.layers[number].neurons))
        in_order = (sets[:, :-1] >= sets[:, 1:]).all(axis=1)
        costs.append(np.where(in_order, latency_costs(task, number, where), np.inf))
    expected = best_of_all(task, wheres, head_on_accelerator, costs)
    if expected is not None:
        expected += given_s(task, program, wheres, head_on_accelerator)
    assert agree(prefixes(program), expected)
    assert agree(direct_latency(task, wheres, head_on_accelerator, gap=0.0), expected)


@given(SEEDS)
def test_other_sets_than_prefixes_gain_less_than_a_group_on_the_gpu(seed: int) -> None:
    task = small_task(seed)
    task = replace(task, machine=replace(task.machine, host_bytes=10**15))
    wheres, head_on_accelerator = placed(task, seed)
    program = restricted(latency_problem(task), wheres, head_on_accelerator)
    costs = [latency_costs(task, number, where) for number, where in enumerate(wheres)]
    of_all = best_of_all(task, wheres, head_on_accelerator, costs)
    solution = solve(program, gap=0.0)
    if of_all is None or solution is None:
        assert of_all is solution
        return
    of_all += given_s(task, program, wheres, head_on_accelerator)
    lost_s = solution.totals.cost - of_all
    assert -ROUNDING * of_all <= lost_s <= most_lost_s(task) * (1 + ROUNDING) + ROUNDING * of_all
