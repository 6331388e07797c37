"""Expected time of a token by policy, and what prefixes lose against any sets of groups."""

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from benchmarks.placement.direct import most_lost_s, restricted
from benchmarks.placement.models import Row, counted, few_groups, placed_bytes, random_task, solved
from picompile.errors import SolverError
from picompile.placement import policies
from picompile.placement.model_bytes import CROSSING_LAUNCHES
from picompile.placement.problem import (
    PlacementProblem,
    PlacementTask,
    StagePlace,
    dense_first,
    evaluate,
    latency_problem,
)
from picompile.placement.solver import solve
from picompile.placement.times import GROUP_NEURONS, PartPlaces, transfer_launches

FITTING = (0.1, 0.25, 0.5, 0.8, 1.0)


def compare_policies(options: argparse.Namespace) -> list[Row]:
    gains: list[tuple[float, dict[str, float]]] = []
    seen, gaps, number = Counter[str](), list[float](), 0
    for _ in counted(range(options.instances), options.instances):
        found = None
        while found is None:
            number += 1
            task = random_task(np.random.default_rng((options.seed, number)), options.layers)
            try:
                found = token_times(task, alone=len(gains) % options.alone_every == 0)
                seen["does not fit"] += found is None
            except SolverError as error:
                print(json.dumps({"instance": number, "error": str(error)}), flush=True)
                seen["solver failed"] += 1
        of_policies, plan_s, alone_s, gap = found
        gaps.append(gap)
        seen["not solved to the gap in time"] += not solved(gap)
        for name, seconds in of_policies.items():
            seen[f"plan slower than {name}"] += plan_s > seconds * (1 + 1e-9)
        if alone_s is not None:
            seen["solved without policies to start from"] += 1
            seen["then slower than a policy by more than the gap"] += alone_s > min(of_policies.values()) * (
                1 + 1.01e-4
            )
        share = task.machine.gpu_bytes / placed_bytes(task.model)
        gains.append((share, {name: seconds / plan_s for name, seconds in of_policies.items()}))
    print(json.dumps({"instances": len(gains), "worst gap": max(gaps), **seen}))
    return gain_rows(gains)


def token_times(task: PlacementTask, alone: bool) -> tuple[dict[str, float], float, float | None, float] | None:
    """Expected seconds of a token by policy, where it fits; of the plan; of the solver `alone`; the plan's gap."""
    program = latency_problem(task)
    places = {
        "greedy by frequency": policies.greedy(task, program),
        "greedy, KV cache on the GPU": policies.greedy(task, program, True),
        "layers first": policies.layers_first(task, program),
        "host only": policies.host_only(task, program),
    }
    for name, on_accelerator in (("the paper's", False), ("the paper's, KV cache on the GPU", True)):
        if (found := policies.paper(task, program, on_accelerator)) is not None:
            places[name] = found.places
    plan, untold = solve(program, known=list(places.values())), solve(program) if alone else None
    if plan is None:
        return None
    totals = {name: evaluate(program, of_policy) for name, of_policy in places.items()}
    seconds = {name: of_policy.cost for name, of_policy in totals.items() if of_policy.fits(program)}
    dense = policies.dense(task)
    dense_program = latency_problem(dense)
    of_dense = evaluate(dense_program, policies.layers_first(dense, dense_program))
    if of_dense.fits(dense_program):
        seconds["dense, layers first"] = of_dense.cost
    return seconds, plan.totals.cost, untold.totals.cost if untold else None, plan.gap


def gain_rows(gains: Sequence[tuple[float, Mapping[str, float]]]) -> list[Row]:
    """How many times faster the plan is than each policy, by how much of the model the GPU holds."""
    rows: list[Row] = []
    for low, high in zip((0.0, *FITTING, 0.0), (*FITTING, np.inf, np.inf), strict=True):
        within = [gain for share, gain in gains if low <= share < high]
        label = "all" if (low, high) == (0.0, np.inf) else f"{low:.0%} to {high:.0%}" if high < 9 else f"{low:.0%} on"
        for name in dict.fromkeys(name for gain in within for name in gain):
            values = [gain[name] for gain in within if name in gain]
            row: Row = {"GPU holds": label, "policy": name, "instances": len(values)}
            row |= {"mean gain": statistics.fmean(values), "median": statistics.median(values), "most": max(values)}
            rows.append(row | {"gain below 1 %": sum(value < 1.01 for value in values) / len(values)})
    return rows


def prefixes(options: argparse.Namespace) -> list[Row]:
    rng = np.random.default_rng(options.seed)
    losses, of_bound, kinds = list[float](), list[float](), Counter[str]()
    for _ in counted(range(options.instances), options.instances):
        task = few_groups(rng)
        wheres, head_on_accelerator = dense_first(task, bool(rng.integers(0, 2)))
        program = restricted(latency_problem(task), wheres, head_on_accelerator)
        solution = solve(program, gap=0.0)
        if solution is None:
            kinds["does not fit"] += 1
            continue
        lost_s = solution.totals.cost - best_of_all_sets(task, program)
        kinds["prefix worse" if lost_s > 1e-9 * solution.totals.cost else "equal"] += 1
        losses.append(max(0.0, lost_s) / solution.totals.cost)
        of_bound.append(lost_s / most_lost_s(task))
    worse = [loss for loss in losses if loss > 1e-9]
    row: Row = {"instances": len(losses), **kinds, "mean loss": statistics.fmean(losses)}
    row |= {"mean loss where worse": statistics.fmean(worse or [0.0]), "most": max(losses)}
    return [row | {"most, of a group on the GPU in each layer": max(of_bound)}]


def best_of_all_sets(task: PlacementTask, program: PlacementProblem) -> float:
    """Brute force over every set of groups in every layer; each stage of `program` has one choice."""
    nothing = evaluate(program, [StagePlace(0, 0) for _ in program.stages])
    cost_s, hot_bytes = np.asarray([nothing.cost]), np.asarray([nothing.gpu_bytes])
    for number, stage in enumerate(program.stages[:-1]):
        choice, sets = stage.choices[0], np.asarray(list(product((False, True), repeat=stage.choices[0].last)))
        more_s = any_sets_s(task, number, choice.label, sets) - choice.cost(0)
        cost_s = np.add.outer(cost_s, more_s).ravel()
        hot_bytes = np.add.outer(hot_bytes, sets.sum(axis=1) * stage.group_bytes).ravel()
    return float(cost_s[hot_bytes <= program.gpu_capacity_bytes].min())


def any_sets_s(task: PlacementTask, number: int, where: PartPlaces, sets: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the seconds of a layer with each of `sets`, bool [any, groups], on the GPU: float64 [any]."""
    layer, machine, shares = task.model.layers[number], task.machine, task.firing.layers[number].shares
    times = task.layer_times(number).times(where)
    starts = range(0, layer.neurons, GROUP_NEURONS)
    read_bytes = -np.diff(times.cold_s) * machine.host_read_bytes_per_s
    launch_s = times.hot_s[-1] - read_bytes.sum() / machine.gpu_read_bytes_per_s
    some, all_hot = sets.any(axis=1), sets.all(axis=1)
    hot_s = sets @ read_bytes / machine.gpu_read_bytes_per_s + np.where(some, launch_s, 0.0)
    cold_s = ~sets @ read_bytes / machine.host_read_bytes_per_s
    silent = np.asarray([np.prod(1 - shares[start : start + GROUP_NEURONS]) for start in starts])
    cold_fires = np.where(all_hot, 0.0, 1.0) if layer.gating_bytes else 1 - np.where(sets, 1.0, silent).prod(axis=1)
    exchanges = np.where(some, 1.0, 0.0)
    if where.attention_on_accelerator:
        waits = layer.predictor_bytes > 0 and not where.predictor_on_accelerator
        exchanges = 1.0 + np.where(some & ~all_hot, cold_fires, 0.0) if waits else cold_fires
        exchanges = exchanges + (not where.kv_cache_on_accelerator)
    crossing_s = machine.crossing_s(2 * task.layer_times(number).crossing_bytes)
    beside_s = max(0.0, crossing_s - CROSSING_LAUNCHES * machine.launch_s)
    none, part, every = transfer_launches(layer, where)
    launches = np.where(all_hot, every, np.where(some, part, none))
    before_s = times.attention_s[0] + times.kv_cache_s[0] + times.predict_s[0]
    total_s: NDArray[np.float64] = before_s + np.maximum(hot_s, cold_s) + exchanges * beside_s
    return total_s + launches * machine.launch_s
