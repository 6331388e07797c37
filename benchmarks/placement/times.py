"""Seconds that `picompile plan` takes to solve a placement, for both objectives, by the size of the model.

    python -m benchmarks.placement.times [--most 10] [--json FILE]

`plan` is the latency objective with all policies that the solver starts from. Prints a table, and a line for each
budget of the accelerator's memory as it is solved.
"""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.script import argument_parser, markdown, write_json
from picompile.errors import SolverError
from picompile.machine.targets import TARGETS
from picompile.placement import policies
from picompile.placement.counting import shape_bytes
from picompile.placement.firing import Firing, LayerFiring, firing_of_curve
from picompile.placement.goal import OBJECTIVES
from picompile.placement.machine import machine_of
from picompile.placement.model_bytes import ModelBytes, Packing
from picompile.placement.problem import PlacementTask, fixed_bytes, group_bytes, impact_problem, latency_problem
from picompile.placement.solver import solve
from picompile.placement.times import ALL_ON_ACCELERATOR, group_count
from picompile.synth.shapes import find_config

GIB = 2**30
Row = dict[str, object]

# Shape, firing curve, how many times in a row.
SIZES = (
    ("llama-7b", "reglu-7b", 1),
    ("llama-70b", "reglu-70b", 1),
    ("opt-175b", "opt", 1),
    ("opt-175b", "opt", 2),
    ("opt-175b", "opt", 5),
    ("opt-175b", "opt", 10),
)
# Shares of the model on the accelerator; 24 GiB are 0.22 of OPT-175B in q4. Of OPT-175B several times in a row every
# second one.
BUDGETS = (0.05, 0.12, 0.22, 0.36, 0.5, 0.7, 0.9)
CONTEXT = 2048
LIMIT_S = 60.0


def of_size(shape: str, curve: str, times: int) -> PlacementTask:
    """A shape in q4 on a 4090 with memory for all of it, every layer with firing of its own."""
    name, config = find_config(shape)
    model = shape_bytes(name, config, Packing("q4", "learned", CONTEXT))
    firing = firing_of_curve(curve, len(model.layers), model.layers[0].neurons)
    machine = machine_of(TARGETS["4090"], 0, 2 * times * (placed_bytes(model) + model.embedding_bytes), 67.2e9)
    return repeated(PlacementTask(model, firing, machine, CONTEXT // 2), times)


def placed_bytes(model: ModelBytes) -> int:
    """Return the bytes of all that could be on the accelerator."""
    layers = sum(
        fixed_bytes(layer, ALL_ON_ACCELERATOR)[0] + group_count(layer.neurons) * group_bytes(layer)
        for layer in model.layers
    )
    return layers + model.head_bytes + model.workspace_bytes + model.table_bytes


def repeated(task: PlacementTask, times: int) -> PlacementTask:
    """Return the task of a model whose layers are repeated `times` times; every layer has firing of its own."""
    rng = np.random.default_rng(0)
    layers = []
    for layer in task.firing.layers * times:
        shares = np.minimum(layer.shares * rng.lognormal(0.0, 0.2) * rng.lognormal(0.0, 0.1, len(layer.shares)), 1.0)
        layers.append(LayerFiring(np.sort(shares)[::-1].copy()))
    model = replace(task.model, layers=task.model.layers * times)
    return replace(task, model=model, firing=Firing(tuple(layers), "noisy"))


def with_budget(task: PlacementTask, share: float) -> PlacementTask:
    """Return the task with a GPU that holds this share of the model."""
    return replace(task, machine=replace(task.machine, gpu_bytes=int(share * placed_bytes(task.model))))


def times(most: int) -> list[Row]:
    """Return a row for each size, up to `most` times OPT-175B."""
    rows, bases = [], dict[str, PlacementTask]()
    for shape, curve, repetitions in SIZES:
        if repetitions > most:
            continue
        base = bases.setdefault(shape, of_size(shape, curve, 1))
        machine = replace(base.machine, host_bytes=repetitions * base.machine.host_bytes)
        task = replace(repeated(base, repetitions) if repetitions > 1 else base, machine=machine)
        layers, groups = len(task.model.layers), group_count(task.model.layers[0].neurons)
        row: Row = {"shape": shape, "layers": layers, "groups a layer": groups, "groups": layers * groups}
        budgets = BUDGETS if repetitions == 1 else BUDGETS[1::2]
        rows.append(row | solve_times([with_budget(task, share) for share in budgets]))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def solve_times(tasks: Sequence[PlacementTask]) -> Row:
    """Seconds over all budgets, and the worst gap; `plan` is the latency plan with all that it starts from."""
    seconds: dict[str, list[float]] = {name: [] for name in (*OBJECTIVES, "plan")}
    gaps: dict[str, list[float]] = {name: [] for name in OBJECTIVES}
    failed = 0
    for task in tasks:
        of_budget: Row = {"layers": len(task.model.layers), "GPU GiB": task.machine.gpu_bytes / GIB}
        start = time.perf_counter()
        try:
            program = latency_problem(task)
            found = {"latency": solve(program, known=policies.known(task, program), time_limit_s=LIMIT_S)}
            seconds["plan"].append(time.perf_counter() - start)
            found["impact"] = solve(impact_problem(task), time_limit_s=LIMIT_S)
        except SolverError as error:
            print(json.dumps(of_budget | {"error": str(error)}), flush=True)
            failed += 1
            continue
        for name, solution in found.items():
            if solution is None:
                raise SystemExit(f"{name}: {task.machine.gpu_bytes / GIB:.1f} GiB of VRAM do not do")
            seconds[name].append(solution.seconds)
            gaps[name].append(solution.gap)
            of_budget |= {f"{name} s": solution.seconds, f"{name} relaxations": solution.nodes}
            of_budget[f"{name} gap"] = solution.gap
        print(json.dumps(of_budget), flush=True)
    row: Row = {"solver failed": failed}
    for name, values in seconds.items():
        row |= {
            f"{name} median s": statistics.median(values or [np.nan]),
            f"{name} worst s": max(values, default=np.nan),
        }
    return row | {f"{name} worst gap": max(values, default=np.nan) for name, values in gaps.items()}


def cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argument_parser(__doc__, "--json")
    parser.add_argument("--most", type=int, default=10, help="largest size, in multiples of OPT-175B")
    options = parser.parse_args()
    rows = times(options.most)
    write_json(options.json, rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    print(markdown(names, ([cell(row.get(name)) for name in names] for row in rows)))


if __name__ == "__main__":
    main()
