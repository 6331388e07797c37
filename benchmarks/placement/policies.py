"""Expected time of a token by policy."""

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.placement.models import Row, counted, placed_bytes, random_task, solved
from picompile.errors import SolverError
from picompile.placement import policies
from picompile.placement.problem import (
    PlacementTask,
    evaluate,
    latency_problem,
)
from picompile.placement.solver import solve

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
