"""Placements by simple policies, to start the solver from and to compare with, and the error where nothing fits."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from picompile.choices import planned_title
from picompile.errors import DoesNotFitError, SolverError
from picompile.placement.firing import Firing, LayerFiring
from picompile.placement.model_bytes import ModelBytes
from picompile.placement.problem import (
    PlacementProblem,
    PlacementStage,
    PlacementTask,
    StagePlace,
    capacities,
    dense_first,
    evaluate,
    fixed_bytes,
    group_bytes,
    impact_problem,
    latency_problem,
)
from picompile.placement.solver import GAP, solve
from picompile.placement.times import ALL_ON_ACCELERATOR, ALL_ON_HOST, PartPlaces, computed_by_groups, group_count


class Policy(NamedTuple):
    """A placement by the paper's policy: places of the latency problem, and the gap of the paper's own problem."""

    places: list[StagePlace]
    gap: float


def paper(
    task: PlacementTask, problem: PlacementProblem, kv_cache_on_accelerator: bool = False, gap: float = GAP
) -> Policy | None:
    """Return the placement by the paper's policy as places of `problem`; None if the host cannot hold the rest."""
    impact = impact_problem(task, kv_cache_on_accelerator)
    found = solve(impact, gap)
    if found is None:
        return None
    chosen = zip(impact.stages, found.places, strict=True)
    places = [
        _place(problem, number, stage.choices[place.choice].label, place.groups)
        for number, (stage, place) in enumerate(chosen)
    ]
    return Policy(places, found.gap)


def known(task: PlacementTask, problem: PlacementProblem) -> list[list[StagePlace]]:
    """Return the placements of all policies, for the solver to start from; some may not fit."""
    places = [host_only(task, problem)]
    if capacities(task)[0] > 0:
        places += [layers_first(task, problem), *(greedy(task, problem, kv_cache) for kv_cache in (False, True))]
        papers = (paper(task, problem, kv_cache) for kv_cache in (False, True))
        places += [found.places for found in papers if found is not None]
    return places


def greedy(task: PlacementTask, problem: PlacementProblem, kv_cache_on_accelerator: bool = False) -> list[StagePlace]:
    """Return attention and predictors first, then groups of neurons by how often they fire; transfers do not count."""
    wheres, head_on_accelerator = dense_first(task, kv_cache_on_accelerator)
    counts = [0 for _ in wheres]
    taken = sum(fixed_bytes(layer, where)[0] for layer, where in zip(task.model.layers, wheres, strict=True))
    free_bytes = capacities(task)[0] - taken - (task.model.head_bytes if head_on_accelerator else 0)
    gains = [np.diff(computed_by_groups(layer)) for layer in task.firing.layers]
    heap = [(-float(gain[0]), number) for number, gain in enumerate(gains) if wheres[number] != ALL_ON_HOST]
    heapq.heapify(heap)
    while heap:
        _, number = heapq.heappop(heap)
        size = group_bytes(task.model.layers[number])
        if size > free_bytes:
            continue
        free_bytes -= size
        counts[number] += 1
        if counts[number] < len(gains[number]):
            heapq.heappush(heap, (-float(gains[number][counts[number]]), number))
    return _places(problem, wheres, counts, head_on_accelerator)


def layers_first(task: PlacementTask, problem: PlacementProblem) -> list[StagePlace]:
    """Return whole layers on the accelerator, in order, as many as fit with their KV cache; then the head."""
    free_bytes = capacities(task)[0]
    wheres, counts = [], []
    for layer in task.model.layers:
        groups = group_count(layer.neurons)
        size = fixed_bytes(layer, ALL_ON_ACCELERATOR)[0] + groups * group_bytes(layer)
        fits = size <= free_bytes
        free_bytes = free_bytes - size if fits else -1
        wheres.append(ALL_ON_ACCELERATOR if fits else ALL_ON_HOST)
        counts.append(groups if fits else 0)
    return _places(problem, wheres, counts, task.model.head_bytes <= free_bytes)


def accelerator_only(task: PlacementTask, problem: PlacementProblem) -> list[StagePlace]:
    """Return everything on the accelerator, which the problem must have."""
    counts = [group_count(layer.neurons) for layer in task.model.layers]
    return _places(problem, [ALL_ON_ACCELERATOR for _ in counts], counts, True)


def host_only(task: PlacementTask, problem: PlacementProblem) -> list[StagePlace]:
    """Return everything on the host."""
    return _places(problem, [ALL_ON_HOST for _ in task.model.layers], [0 for _ in task.model.layers], False)


def dense(task: PlacementTask) -> PlacementTask:
    """Return the task for the model without predictors, every neuron computed, as dense engines run it."""
    layers = tuple(
        replace(
            layer, predictor_bytes=0, gating_bytes=layer.neuron_bytes, launches=replace(layer.launches, predictor=0)
        )
        for layer in task.model.layers
    )
    model: ModelBytes = replace(task.model, predictor="none", layers=layers)
    # Of experts, any engine computes those that are chosen.
    chosen = [each.chosen for each in task.firing.layers]
    firing = tuple(
        LayerFiring(np.full(layer.neurons, share), chosen=share) for layer, share in zip(layers, chosen, strict=True)
    )
    return replace(task, model=model, firing=Firing(firing, "every neuron"), machine=task.machine.dense)


def _places(
    problem: PlacementProblem, wheres: Sequence[PartPlaces], counts: Sequence[int], head_on_accelerator: bool
) -> list[StagePlace]:
    head = ALL_ON_ACCELERATOR if head_on_accelerator else ALL_ON_HOST
    labels = zip([*wheres, head], [*counts, 0], strict=True)
    return [_place(problem, number, label, groups) for number, (label, groups) in enumerate(labels)]


def _place(problem: PlacementProblem, number: int, label: object, groups: int) -> StagePlace:
    labels = [choice.label for choice in problem.stages[number].choices]
    return StagePlace(labels.index(label), groups)


_ANY_BYTES = 1 << 62
_MIB, _GIB = 2**20, 2**30
_UNITS = {"MiB": _MIB, "GiB": _GIB}


def infeasible_placement_error(
    task: PlacementTask,
    problems: Callable[[PlacementTask], PlacementProblem],
    margin: float,
    most_gpu_bytes: int | None = None,
) -> DoesNotFitError:
    """Build the error for an infeasible placement: what is lacking, and the smallest budgets that would do.

    `problems` makes the placement problem of a task; the share `margin` of the budgets that are named is left free. A
    budget of the GPU above `most_gpu_bytes` is not named.
    """
    host, gpu = _least_budgets(task, problems, margin)
    if gpu is not None and most_gpu_bytes is not None and gpu > most_gpu_bytes:
        gpu = None
    machine = task.machine
    unit = "GiB" if min(host, host if gpu is None else gpu) >= _GIB else "MiB"
    memory = f"{_size(max(0, machine.host_bytes), unit)} of host memory"
    if machine.gpu_bytes_per_s:
        memory += f" and {_size(machine.gpu_bytes, unit)} of the GPU's"
    ways = [f"--host-memory {_budget(host, unit)}"]
    if gpu is not None:
        ways.append(f"--vram-budget {_budget(gpu, unit)}")
    name = f"{task.model.name} in {planned_title(None, task.model.quant)}"
    return DoesNotFitError(f"{name} does not fit: {memory} may be taken; it would with {' or with '.join(ways)}")


def _least_budgets(
    task: PlacementTask, problems: Callable[[PlacementTask], PlacementProblem], margin: float
) -> tuple[float, float | None]:
    """Return the smallest budgets of the host and of the GPU that would do, the other side as it is.

    The GPU's is None where no budget is enough.
    """
    model, machine, kept = task.model, task.machine, 1 - margin
    everywhere, lent = model.workspace_bytes + model.table_bytes, task.lent_bytes
    problem, any_gpu = problems(task), replace(machine, gpu_bytes=_ANY_BYTES)
    host = least_host_bytes(problem) + (lent if problem.gpu_capacity_bytes > 0 else 0)
    gpu: float | None = None
    of_gpu = everywhere + model.staging_bytes
    if machine.gpu_bytes_per_s:
        gpu = _least_gpu_bytes(task, problems, of_gpu + lent, kept * _MIB)
        gpu = None if gpu is None else gpu + lent
    # A side that has everything needs no room for caches that are lent.
    apart = replace(task, machine=any_gpu if machine.gpu_bytes_per_s else machine, lends_caches=False)
    free = latency_problem(apart)
    host = min(host, evaluate(free, host_only(apart, free)).host_bytes)
    if machine.gpu_bytes_per_s:
        whole = evaluate(free, accelerator_only(apart, free))
        if whole.gpu_bytes + of_gpu <= machine.gpu_bytes:
            host = min(host, whole.host_bytes)
        if whole.host_bytes <= free.host_capacity_bytes:
            gpu = whole.gpu_bytes if gpu is None else min(gpu, whole.gpu_bytes)
    return (host + everywhere + model.embedding_bytes) / kept, None if gpu is None else (gpu + of_gpu) / kept


def _size(count: float, unit: str) -> str:
    return f"{count / _UNITS[unit]:.2f} {unit}"


def _budget(count: float, unit: str) -> str:
    """Return a size for the command line, rounded up: what the margin leaves of it is rounded down."""
    hundredths = int(100 * count // _UNITS[unit]) + 1
    return f"{hundredths / 100:.2f}{unit}"


def _least_gpu_bytes(
    task: PlacementTask, problems: Callable[[PlacementTask], PlacementProblem], everywhere: int, tolerance: float
) -> int | None:
    """Return the fewest bytes for stages that the GPU must have for the host as it is, to `tolerance` bytes or `GAP`.

    The result is None if no size is enough. `everywhere` are the bytes that the GPU needs besides stages.

    The GPU must grow at least by the bytes that the host lacks; each step adds these until the placement fits. With the
    paper's policy less may do, since on a larger GPU it places more besides the neurons. So the search then bisects
    between the largest size that failed and the smallest that fits.
    """

    def lacking(gpu_bytes: int) -> int:
        problem = problems(replace(task, machine=replace(task.machine, gpu_bytes=gpu_bytes + everywhere)))
        return least_host_bytes(problem) - problem.host_capacity_bytes

    if lacking(_ANY_BYTES) > 0:
        return None
    low, high, tried = -1, _ANY_BYTES, 0
    while high - low > max(tolerance, GAP * high):
        more = lacking(tried)
        low, high = (tried, high) if more > 0 else (low, tried)
        tried = low + max(more, int(tolerance), 1) if high == _ANY_BYTES else (low + high) // 2
    return high


def least_host_bytes(problem: PlacementProblem) -> int:
    """Return the fewest bytes that the stages take on the host, with the GPU as it is and a host of any size."""
    stages = []
    for stage in problem.stages:
        choices = []
        for choice in stage.choices:
            moved = np.arange(choice.first, choice.last + 1, dtype=np.float64) * stage.group_bytes
            choices.append(replace(choice, costs=choice.host_bytes - moved, early_costs=None))
        stages.append(PlacementStage(tuple(choices), stage.group_bytes))
    found = solve(replace(problem, stages=tuple(stages), switch_cost=0.0, host_capacity_bytes=_ANY_BYTES))
    if found is None:
        raise SolverError("nothing fits a host of any size")
    return found.totals.host_bytes
