"""Placements by policy, to start from and to compare with: the paper's, by frequency, layers first, host only."""

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from picompile.placement.firing import Firing, LayerFiring
from picompile.placement.impact import dense_first, impact_program
from picompile.placement.latency import Task, capacities, fixed_bytes, group_bytes
from picompile.placement.model_bytes import ModelBytes
from picompile.placement.program import Place, Program
from picompile.placement.solver import GAP, solve
from picompile.placement.times import ALL_ON_GPU, ALL_ON_HOST, Where, computed_by_groups, group_count


class Policy(NamedTuple):
    """What the paper's policy comes to: places of the latency program, and the gap of its own program's solution."""

    places: list[Place]
    gap: float


def paper(task: Task, program: Program, kv_cache_on_gpu: bool = False, gap: float = GAP) -> Policy | None:
    """The paper's policy, solved, as places of `program`; None where the host cannot hold the rest."""
    impact = impact_program(task, kv_cache_on_gpu)
    found = solve(impact, gap)
    if found is None:
        return None
    chosen = zip(impact.stages, found.places, strict=True)
    places = [
        _place(program, number, stage.choices[place.choice].label, place.groups)
        for number, (stage, place) in enumerate(chosen)
    ]
    return Policy(places, found.gap)


def known(task: Task, program: Program) -> list[list[Place]]:
    """Placements by all policies, to start from; some may not fit."""
    places = [host_only(task, program)]
    if capacities(task)[0] > 0:
        both = (False, True)
        places += [layers_first(task, program), *(greedy(task, program, on_gpu) for on_gpu in both)]
        places += [found.places for found in (paper(task, program, on_gpu) for on_gpu in both) if found is not None]
    return places


def greedy(task: Task, program: Program, kv_cache_on_gpu: bool = False) -> list[Place]:
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


def layers_first(task: Task, program: Program) -> list[Place]:
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


def gpu_only(task: Task, program: Program) -> list[Place]:
    """Everything on the GPU, which the program must have."""
    counts = [group_count(layer.neurons) for layer in task.model.layers]
    return _places(program, [ALL_ON_GPU for _ in counts], counts, True)


def host_only(task: Task, program: Program) -> list[Place]:
    """Everything on the host."""
    return _places(program, [ALL_ON_HOST for _ in task.model.layers], [0 for _ in task.model.layers], False)


def dense(task: Task) -> Task:
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


def _places(program: Program, wheres: Sequence[Where], counts: Sequence[int], head_on_gpu: bool) -> list[Place]:
    head = ALL_ON_GPU if head_on_gpu else ALL_ON_HOST
    labels = zip([*wheres, head], [*counts, 0], strict=True)
    return [_place(program, number, label, groups) for number, (label, groups) in enumerate(labels)]


def _place(program: Program, number: int, label: object, groups: int) -> Place:
    labels = [choice.label for choice in program.stages[number].choices]
    return Place(labels.index(label), groups)
