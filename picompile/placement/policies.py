"""Placements by policy, to start from and to compare with: the paper's, by frequency, layers first, host only."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

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
    fixed_bytes,
    group_bytes,
    impact_problem,
)
from picompile.placement.solver import GAP, solve
from picompile.placement.times import ALL_ON_GPU, ALL_ON_HOST, PartPlaces, computed_by_groups, group_count


class Policy(NamedTuple):
    """What the paper's policy comes to: places of the latency program, and the gap of its own program's solution."""

    places: list[StagePlace]
    gap: float


def paper(
    task: PlacementTask, program: PlacementProblem, kv_cache_on_gpu: bool = False, gap: float = GAP
) -> Policy | None:
    """The paper's policy, solved, as places of `program`; None where the host cannot hold the rest."""
    impact = impact_problem(task, kv_cache_on_gpu)
    found = solve(impact, gap)
    if found is None:
        return None
    chosen = zip(impact.stages, found.places, strict=True)
    places = [
        _place(program, number, stage.choices[place.choice].label, place.groups)
        for number, (stage, place) in enumerate(chosen)
    ]
    return Policy(places, found.gap)


def known(task: PlacementTask, program: PlacementProblem) -> list[list[StagePlace]]:
    """Placements by all policies, to start from; some may not fit."""
    places = [host_only(task, program)]
    if capacities(task)[0] > 0:
        both = (False, True)
        places += [layers_first(task, program), *(greedy(task, program, on_gpu) for on_gpu in both)]
        places += [found.places for found in (paper(task, program, on_gpu) for on_gpu in both) if found is not None]
    return places


def greedy(task: PlacementTask, program: PlacementProblem, kv_cache_on_gpu: bool = False) -> list[StagePlace]:
    """Attention and predictors first, then groups of neurons by how often they fire, whatever exchanges cost."""
    wheres, head_on_gpu = dense_first(task, kv_cache_on_gpu)
    counts = [0 for _ in wheres]
    taken = sum(fixed_bytes(layer, where)[0] for layer, where in zip(task.model.layers, wheres, strict=True))
    free_bytes = capacities(task)[0] - taken - (task.model.head_bytes if head_on_gpu else 0)
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
    return _places(program, wheres, counts, head_on_gpu)


def layers_first(task: PlacementTask, program: PlacementProblem) -> list[StagePlace]:
    """Whole layers on the GPU, in order, as many as fit with their KV cache; then the head."""
    free_bytes = capacities(task)[0]
    wheres, counts = [], []
    for layer in task.model.layers:
        groups = group_count(layer.neurons)
        size = fixed_bytes(layer, ALL_ON_GPU)[0] + groups * group_bytes(layer)
        fits = size <= free_bytes
        free_bytes = free_bytes - size if fits else -1
        wheres.append(ALL_ON_GPU if fits else ALL_ON_HOST)
        counts.append(groups if fits else 0)
    return _places(program, wheres, counts, task.model.head_bytes <= free_bytes)


def gpu_only(task: PlacementTask, program: PlacementProblem) -> list[StagePlace]:
    """Everything on the GPU, which the program must have."""
    counts = [group_count(layer.neurons) for layer in task.model.layers]
    return _places(program, [ALL_ON_GPU for _ in counts], counts, True)


def host_only(task: PlacementTask, program: PlacementProblem) -> list[StagePlace]:
    """Everything on the host."""
    return _places(program, [ALL_ON_HOST for _ in task.model.layers], [0 for _ in task.model.layers], False)


def dense(task: PlacementTask) -> PlacementTask:
    """The same model without predictors, of which every neuron is computed: what dense engines run."""
    layers = tuple(
        replace(
            layer,
            predictor_bytes=0,
            deciding_bytes=layer.neuron_bytes,
            launches=replace(layer.launches, predictor=0),
        )
        for layer in task.model.layers
    )
    model: ModelBytes = replace(task.model, predictor="none", layers=layers)
    firing = tuple(LayerFiring(np.ones(layer.neurons)) for layer in layers)
    return replace(task, model=model, firing=Firing(firing, "every neuron"))


def _places(
    program: PlacementProblem, wheres: Sequence[PartPlaces], counts: Sequence[int], head_on_gpu: bool
) -> list[StagePlace]:
    head = ALL_ON_GPU if head_on_gpu else ALL_ON_HOST
    labels = zip([*wheres, head], [*counts, 0], strict=True)
    return [_place(program, number, label, groups) for number, (label, groups) in enumerate(labels)]


def _place(program: PlacementProblem, number: int, label: object, groups: int) -> StagePlace:
    labels = [choice.label for choice in program.stages[number].choices]
    return StagePlace(labels.index(label), groups)


_ANY_BYTES = 1 << 62
_MIB, _GIB = 2**20, 2**30


def infeasible_placement_error(
    task: PlacementTask, programs: Callable[[PlacementTask], PlacementProblem], margin: float
) -> DoesNotFitError:
    """Build the error for an infeasible placement: what is lacking, and the smallest budgets that would do.

    `programs` makes the placement problem of a task; the share `margin` of the budgets that are named is left free.
    """
    model, machine, kept = task.model, task.machine, 1 - margin
    everywhere = model.workspace_bytes + model.table_bytes
    text = (
        f"{model.name} in {model.quant} does not fit: {max(0, machine.host_bytes) / _GIB:.2f} GiB of host memory may "
        f"be taken and {machine.gpu_bytes / _GIB:.2f} GiB of the GPU's"
    )
    host = least_host_bytes(programs(task)) + everywhere + model.embedding_bytes
    ways = [f"--host-memory {_budget(host / kept)}"]
    if machine.gpu_bytes_per_s and (gpu := _least_gpu_bytes(task, programs, everywhere, kept * _MIB)) is not None:
        ways.append(f"--vram-budget {_budget((gpu + everywhere) / kept)}")
    return DoesNotFitError(f"{text}; it would with {' or with '.join(ways)}")


def _budget(size: float) -> str:
    """A size for the command line that is no less, for the margin is rounded too."""
    return f"{int(size // _MIB) + 1}MiB"


def _least_gpu_bytes(
    task: PlacementTask, programs: Callable[[PlacementTask], PlacementProblem], everywhere: int, tolerance: float
) -> int | None:
    """The least bytes of stages on the GPU with the host as it is, within `tolerance` bytes or `GAP`.

    None where no number is enough. `everywhere` are the bytes that the GPU has beside stages.

    What the host lacks with a GPU of some size is the least that it must have more. Only the paper's policy may do
    with less, for on a larger GPU it puts more beside the neurons: what was found is halved, down to what doesn't do.
    """

    def lacking(gpu_bytes: int) -> int:
        program = programs(replace(task, machine=replace(task.machine, gpu_bytes=gpu_bytes + everywhere)))
        return least_host_bytes(program) - program.host_capacity_bytes

    if lacking(_ANY_BYTES) > 0:
        return None
    low, high, tried = -1, _ANY_BYTES, 0
    while high - low > max(tolerance, GAP * high):
        more = lacking(tried)
        low, high = (tried, high) if more > 0 else (low, tried)
        tried = low + max(more, int(tolerance), 1) if high == _ANY_BYTES else (low + high) // 2
    return high


def least_host_bytes(program: PlacementProblem) -> int:
    """The least bytes of stages on a host of any size, with the GPU as it is."""
    stages = []
    for stage in program.stages:
        choices = []
        for choice in stage.choices:
            moved = np.arange(choice.first, choice.last + 1, dtype=np.float64) * stage.group_bytes
            choices.append(replace(choice, costs=choice.host_bytes - moved))
        stages.append(PlacementStage(tuple(choices), stage.group_bytes))
    found = solve(replace(program, stages=tuple(stages), switch_cost=0.0, host_capacity_bytes=_ANY_BYTES))
    if found is None:
        raise SolverError("nothing fits a host of any size")
    return found.totals.host_bytes
