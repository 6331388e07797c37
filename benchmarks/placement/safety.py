"""The memory of plans against their budgets, for budgets, shapes and contexts of all kinds."""

import argparse
import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np

from benchmarks.placement.models import Row, counted, random_task
from picompile.errors import DoesNotFitError, SolverError
from picompile.placement.goal import OBJECTIVES
from picompile.placement.planning import PlanOptions, make_plan
from picompile.placement.problem import PlacementTask


def safety(options: argparse.Namespace) -> list[Row]:
    seen = Counter[str]()
    for number in counted(range(options.first, options.first + options.count), options.count):
        rng = np.random.default_rng((options.seed, number))
        task = absurd(random_task(rng, options.layers), rng)
        margin, objective = float(rng.choice([0.0, 0.05, 0.1, 0.5, 0.99])), str(rng.choice(OBJECTIVES))
        plan_options = PlanOptions(
            "random",
            task.machine,
            objective=objective,
            margin=margin,
            tokens=int(rng.choice([0, task.tokens, 10**9])),
        )
        try:
            plan = make_plan(task.model, task.firing, plan_options)
        except DoesNotFitError as error:
            seen["refused"] += 1
            if number % options.every == 0:
                seen.update(named_budgets(task, plan_options, str(error)))
            continue
        except SolverError as error:
            print(json.dumps({"instance": number, "error": str(error)}), flush=True)
            seen["solver failed"] += 1
            continue
        seen["planned"] += 1
        for device, budget in (("gpu", task.machine.gpu_bytes), ("host", task.machine.host_bytes)):
            taken = sum(row.bytes for row in plan.memory if row.device == device)
            seen["more than the budget less its margin"] += taken > budget * (1 - margin)
            seen["within 1 MiB of it"] += budget * (1 - margin) - 2**20 < taken <= budget * (1 - margin)
        everything = plan.machine.gpu_bytes + plan.machine.host_bytes
        seen["more than there is"] += sum(row.bytes for row in plan.memory) > everything
        seen["no speed"] += not 0 < plan.tokens_per_s < np.inf
    seen["more than the budget less its margin"] += 0
    return [{"case": name, "count": count} for name, count in sorted(seen.items())]


def absurd(task: PlacementTask, rng: np.random.Generator) -> PlacementTask:
    """Return the task with budgets and contexts that nobody would choose."""
    budgets = [0, 1, int(10 ** rng.uniform(0, 9)), 1 << 50, 1 << 60]
    machine, model = task.machine, task.model
    gpu = int(rng.choice([*budgets, *[machine.gpu_bytes] * 5]))
    host = int(rng.choice([*budgets, *[machine.host_bytes] * 5]))
    if rng.random() < 0.2:
        scale = float(rng.choice([0.0, 1e-3, 1e3, 1e6]))
        layers = tuple(replace(layer, kv_cache_bytes=int(layer.kv_cache_bytes * scale)) for layer in model.layers)
        model = replace(model, context=max(1, int(model.context * scale)), layers=layers)
    return replace(task, model=model, machine=replace(machine, gpu_bytes=gpu, host_bytes=host))


def named_budgets(task: PlacementTask, options: PlanOptions, text: str) -> list[str]:
    """Whether the budgets that a refusal names will do, and whether 1 % less would not."""
    found = []
    for option, field in (("--host-memory", "host_bytes"), ("--vram-budget", "gpu_bytes")):
        named = re.search(rf"{option} (\d+)MiB", text)
        if named is None:
            found.append(f"no {option} named")
            continue
        budget = int(named[1]) * 2**20
        for share, word in ((1.0, "named"), (0.99, "named less 1 % and 2 MiB")):
            size = int(share * budget) - (0 if share == 1 else 2**21)
            smaller = replace(options, machine=replace(options.machine, **{field: max(0, size)}))
            try:
                make_plan(task.model, task.firing, smaller)
                found.append(f"{option} {word} does")
            except DoesNotFitError:
                found.append(f"{option} {word} does not")
            except SolverError as error:
                print(json.dumps({"model": task.model.name, option: size, "error": str(error)}), flush=True)
                found.append("solver failed")
    return found
