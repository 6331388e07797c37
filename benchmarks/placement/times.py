"""The time that both objectives take, by the size of the model."""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.placement.models import GIB, Row, everything_bytes, placed_bytes, repeated
from picompile.errors import SolverError
from picompile.machine.targets import TARGETS
from picompile.placement import policies
from picompile.placement.counting import shape_bytes
from picompile.placement.firing import firing_of_curve
from picompile.placement.goal import OBJECTIVES
from picompile.placement.machine import machine_of
from picompile.placement.model_bytes import Packing
from picompile.placement.problem import PlacementTask, impact_problem, latency_problem
from picompile.placement.solver import solve
from picompile.placement.times import group_count
from picompile.synth.shapes import find_config

# Shape, firing curve, how many times in a row.
SIZES = (
    ("llama-7b", "reglu-7b", 1),
    ("llama-70b", "reglu-70b", 1),
    ("opt-175b", "opt", 1),
    ("opt-175b", "opt", 2),
    ("opt-175b", "opt", 5),
    ("opt-175b", "opt", 10),
)
# Of the model, on the GPU; 24 GiB are 0.22 of OPT-175B in q4.
# Of OPT-175B several times in a row every second one.
BUDGETS = (0.05, 0.12, 0.22, 0.36, 0.5, 0.7, 0.9)
CONTEXT = 2048
LIMIT_S = 60.0


def of_size(shape: str, curve: str, times: int) -> PlacementTask:
    """A shape in q4 on a 4090 with memory for all of it, every layer with firing of its own."""
    name, config = find_config(shape)
    model = shape_bytes(name, config, Packing("q4", "learned", CONTEXT))
    firing = firing_of_curve(curve, len(model.layers), model.layers[0].neurons)
    machine = machine_of(TARGETS["4090"], 0, 2 * times * everything_bytes(model), 67.2e9)
    return repeated(PlacementTask(model, firing, machine, CONTEXT // 2), times)


def with_budget(task: PlacementTask, share: float) -> PlacementTask:
    """Return the task with a GPU that holds this share of the model."""
    return replace(task, machine=replace(task.machine, gpu_bytes=int(share * placed_bytes(task.model))))


def times(options: argparse.Namespace) -> list[Row]:
    rows, bases = [], dict[str, PlacementTask]()
    for shape, curve, repetitions in SIZES:
        if repetitions > options.most:
            continue
        base = bases.setdefault(shape, of_size(shape, curve, 1))
        machine = replace(base.machine, host_bytes=repetitions * base.machine.host_bytes)
        task = replace(repeated(base, repetitions) if repetitions > 1 else base, machine=machine)
        layers, groups = len(task.model.layers), group_count(task.model.layers[0].neurons)
        row: Row = {"shape": shape, "layers": layers, "groups a layer": groups, "groups": layers * groups}
        budgets = BUDGETS if repetitions == 1 else BUDGETS[1::2]
        rows.append(row | solve_times([with_budget(task, share) for share in budgets]))
        print(json.dumps(rows[-1]), flush=True)
    if options.plot:
        plot(rows, options.plot)
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


def plot(rows: Sequence[Row], file: Path) -> None:
    """Seconds against the number of groups, both on a logarithmic scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.8, 5.0), layout="constrained")
    lines = (
        ("latency worst s", "latency, worst of the budgets", "o-", "#1f6fb4"),
        ("latency median s", "latency, median", "o--", "#8ab8dd"),
        ("impact worst s", "impact, worst of the budgets", "s-", "#3a8a4d"),
    )
    for key, label, style, color in lines:
        points = [(float(str(row["groups"])), float(str(row[key]))) for row in rows if row.get(key) is not None]
        if points:
            axes.loglog(*zip(*points, strict=True), style, color=color, label=label)
    axes.set(xlabel="groups of 64 neurons, all layers", ylabel="solve time in seconds")
    axes.grid(alpha=0.3, which="both", linewidth=0.5)
    figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=2)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
