"""Placement problems: what can be chosen for each stage of a token, and what each choice costs."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from picompile.placement.counting import SPLIT_BYTES
from picompile.placement.firing import Firing
from picompile.placement.machine import Machine
from picompile.placement.model_bytes import LayerBytes, ModelBytes
from picompile.placement.times import (
    ALL_ON_GPU,
    ALL_ON_HOST,
    GROUP,
    LayerTimes,
    PartPlaces,
    computed_by_groups,
    group_count,
)

# The placement program: what can be chosen for each stage of a token, what it takes, and what it costs.
#
# A stage is a layer, or the output head. For each, one `Choice` is made: where its attention, its KV cache and its
# predictor are, and within it how many groups of its neurons are on the GPU. Neurons lie in order of firing, and those
# on the GPU are always the most firing ones, so a number of groups says which they are. Stages follow each other;
# whoever chooses the other side than the stage before pays for a transfer.
#
#     minimize    Σ_l cost_l(choice_l, n_l) + switch · #{l: side_l ≠ side_(l-1)}
#     subject to  Σ_l gpu_l(choice_l) + n_l · group_l  ≤ gpu_capacity
#                 Σ_l host_l(choice_l) - n_l · group_l ≤ host_capacity
#
# Costs are any numbers: seconds for the latency objective, firings lost for the paper's.


@dataclass(frozen=True, eq=False)
class Choice:
    """One way to place a stage; `label` is what it stands for.

    `costs` float64 [k]: with `first`, `first` + 1, … groups on the GPU. `gpu_bytes` and `host_bytes` are taken with no
    group on the GPU; each that is moves the stage's `group_bytes` from the host. `on_gpu` says on which side the stream
    comes in and goes out.
    """

    label: Hashable
    gpu_bytes: int
    host_bytes: int
    costs: NDArray[np.float64]
    first: int = 0
    on_gpu: bool = True

    @property
    def last(self) -> int:
        """The most groups that can be on the GPU."""
        return self.first + len(self.costs) - 1

    def cost(self, groups: int) -> float:
        """What it costs with `groups` on the GPU."""
        return float(self.costs[groups - self.first])


@dataclass(frozen=True, eq=False)
class PlacementStage:
    """One step of a token and the ways to place it, of which there is at least one."""

    choices: tuple[Choice, ...]
    group_bytes: int = 0


@dataclass(frozen=True, eq=False)
class PlacementProblem:
    """All stages in order. The stream begins and ends on the host where `from_host` is set, and anywhere otherwise."""

    stages: tuple[PlacementStage, ...]
    gpu_capacity_bytes: int
    host_capacity_bytes: int
    switch_cost: float = 0.0
    from_host: bool = False


class StagePlace(NamedTuple):
    """What was chosen for a stage: the number of the choice, and groups on the GPU."""

    choice: int
    groups: int


class Totals(NamedTuple):
    """What a placement of all stages comes to."""

    cost: float
    gpu_bytes: int
    host_bytes: int

    def fits(self, program: PlacementProblem) -> bool:
        """Whether both devices hold it."""
        return self.gpu_bytes <= program.gpu_capacity_bytes and self.host_bytes <= program.host_capacity_bytes


def evaluate(program: PlacementProblem, places: Sequence[StagePlace]) -> Totals:
    """Cost and bytes of a placement, the bytes exactly."""
    cost, gpu_bytes, host_bytes = 0.0, 0, 0
    sides = [program.stages[number].choices[place.choice].on_gpu for number, place in enumerate(places)]
    for stage, place in zip(program.stages, places, strict=True):
        choice, moved = stage.choices[place.choice], place.groups * stage.group_bytes
        cost += choice.cost(place.groups)
        gpu_bytes += choice.gpu_bytes + moved
        host_bytes += choice.host_bytes - moved
    if program.from_host:
        sides = [False, *sides, False]
    switches = sum(before != after for before, after in pairwise(sides))
    return Totals(cost + switches * program.switch_cost, gpu_bytes, host_bytes)


# The latency objective: a model on a machine as a placement program whose cost is a token's time in seconds.


_FLOAT32_BYTES = 4


@dataclass(frozen=True, eq=False)
class PlacementTask:
    """What is placed: a model, how its neurons fire, on which machine, and how many tokens are in the cache."""

    model: ModelBytes
    firing: Firing
    machine: Machine
    tokens: int

    def layer_times(self, number: int) -> LayerTimes:
        """The cost model of a layer."""
        layer = self.model.layers[number]
        read = layer.kv_cache_bytes * min(self.tokens, self.model.context) / self.model.context
        crossing = self.model.batch * (_FLOAT32_BYTES * self.model.hidden + layer.neurons / 8)
        return LayerTimes(layer, self.firing.layers[number], self.machine, read, crossing)


def places_of(layer: LayerBytes) -> Sequence[PartPlaces]:
    """The ways in which the parts of a layer that are not neurons can lie."""
    places = [ALL_ON_GPU, PartPlaces(True, False, True)]
    if layer.predictor_bytes:
        places += [PartPlaces(True, True, False), PartPlaces(True, False, False)]
    return (*places, ALL_ON_HOST)


def fixed_bytes(layer: LayerBytes, where: PartPlaces, *, split: bool | None = None) -> tuple[int, int]:
    """(bytes on the GPU, bytes on the host) beside the groups on the GPU. A short last group counts as a full one.

    `split` says whether there can be a part on the GPU, with vectors of its own; by itself where the attention is.
    """
    parts = (
        (layer.attention_bytes + layer.shared_bytes, where.attention_on_gpu),
        (layer.kv_cache_bytes, where.kv_cache_on_gpu),
        (layer.predictor_bytes, where.predictor_on_gpu),
        (group_count(layer.neurons) * group_bytes(layer), False),
    )
    on_gpu = sum(size for size, gpu in parts if gpu)
    on_host = sum(size for size, _ in parts) - on_gpu + SPLIT_BYTES
    return on_gpu + (SPLIT_BYTES if where.attention_on_gpu or split else 0), on_host


def group_bytes(layer: LayerBytes) -> int:
    """Bytes of a full group in a block that is split."""
    return GROUP * (layer.neuron_bytes + layer.number_bytes)


def capacities(task: PlacementTask) -> tuple[int, int]:
    """(GPU, host) bytes that are left for stages: without workspace, tables and the embedding, which the host has."""
    model, machine = task.model, task.machine
    everywhere = model.workspace_bytes + model.table_bytes
    return max(0, machine.gpu_bytes - everywhere), machine.host_bytes - everywhere - model.embedding_bytes


def latency_problem(task: PlacementTask) -> PlacementProblem:
    """The program: a stage for each layer with the choices of `places_of`, and one for the output head.

    Where the stream changes sides one vector crosses, which is charged as an exchange. So its one kernel is paid for,
    and so is at the beginning of a token the one that brings its position to the GPU.
    """
    gpu_capacity, host_capacity = capacities(task)
    stages = [_layer_stage(task, number, gpu_capacity > 0) for number in range(len(task.model.layers))]
    return PlacementProblem(
        stages=(*stages, _head_stage(task, gpu_capacity > 0)),
        gpu_capacity_bytes=gpu_capacity,
        host_capacity_bytes=host_capacity,
        switch_cost=task.machine.crossing_s(_FLOAT32_BYTES * task.model.hidden * task.model.batch),
        from_host=True,
    )


def _layer_stage(task: PlacementTask, number: int, gpu: bool) -> PlacementStage:
    layer, times = task.model.layers[number], task.layer_times(number)
    choices = []
    for where in places_of(layer) if gpu else (ALL_ON_HOST,):
        costs = times.times(where).total_s
        if where.attention_on_gpu:
            choices.append(Choice(where, *fixed_bytes(layer, where), costs))
            continue
        choices.append(Choice(where, *fixed_bytes(layer, where), costs[:1], 0, False))
        if gpu:
            choices.append(Choice(where, *fixed_bytes(layer, where, split=True), costs[1:], 1, False))
    return PlacementStage(tuple(choices), group_bytes(layer))


def _head_stage(task: PlacementTask, gpu: bool) -> PlacementStage:
    model, machine = task.model, task.machine
    on_host = Choice(ALL_ON_HOST, 0, model.head_bytes, np.asarray([head_s(model, machine, False)]), 0, False)
    if not gpu:
        return PlacementStage((on_host,))
    on_gpu = Choice(ALL_ON_GPU, model.head_bytes, 0, np.asarray([head_s(model, machine, True)]), 0, True)
    return PlacementStage((on_gpu, on_host))


def head_s(model: ModelBytes, machine: Machine, on_gpu: bool) -> float:
    """Seconds of the output head for a token."""
    if on_gpu:
        return model.head_bytes / machine.gpu_read_bytes_per_s + model.head_launches * machine.launch_s
    return model.head_bytes / machine.host_read_bytes_per_s


# PowerInfer's placement policy, as published (SOSP'24, section 6, equations 1 to 8).
#
# The impact of a neuron is how often it fires (1), and the GPU gets the most (2) within the memory of both devices (6).
# A layer has no neuron there, or at least C_l (7, 8), so many that computing them there saves what synchronizing costs:
# C_l · T_gpu + T_sync ≤ C_l · T_cpu (4), where the time of a neuron is its bytes over the device's bandwidth (5).
# Neurons are placed 64 at a time.
#
# The paper's program is of neurons. What else there is goes to the GPU first, as in the code that was released:
# attention and predictors layer by layer, then the output head. The KV cache stays on the host, as the paper has it, or
# follows where all of it fits.


def impact_problem(task: PlacementTask, kv_cache_on_gpu: bool = False) -> PlacementProblem:
    """The paper's program, as one of least cost: that is the number of firings that the GPU does not get, negative.

    Its choices are labelled as those of `latency_program`. A layer whose attention the GPU has no room for lies on the
    host whole.
    """
    gpu_capacity, host_capacity = capacities(task)
    wheres, head_on_gpu = dense_first(task, kv_cache_on_gpu)
    stages = [_impact_layer_stage(task, number, where) for number, where in enumerate(wheres)]
    head = (task.model.head_bytes, 0) if head_on_gpu else (0, task.model.head_bytes)
    stages.append(PlacementStage((Choice(ALL_ON_GPU if head_on_gpu else ALL_ON_HOST, *head, np.zeros(1)),)))
    # Inequality 6 is strict.
    return PlacementProblem(tuple(stages), max(0, gpu_capacity - 1), host_capacity - 1)


def dense_first(task: PlacementTask, kv_cache_on_gpu: bool = False) -> tuple[list[PartPlaces], bool]:
    """Where the parts of each layer lie that are not neurons, and whether the head is on the GPU."""
    gpu_capacity, _ = capacities(task)
    free_bytes = gpu_capacity - 1
    wheres = []
    for layer in task.model.layers:
        on_gpu, _ = fixed_bytes(layer, PartPlaces(True, False, True))
        fits = on_gpu <= free_bytes
        free_bytes = free_bytes - on_gpu if fits else -1
        wheres.append(PartPlaces(True, False, True) if fits else ALL_ON_HOST)
    head_on_gpu = task.model.head_bytes <= free_bytes
    free_bytes -= task.model.head_bytes if head_on_gpu else 0
    cache_bytes = sum(layer.kv_cache_bytes for layer in task.model.layers)
    if kv_cache_on_gpu and head_on_gpu and cache_bytes <= free_bytes:
        wheres = [ALL_ON_GPU for _ in wheres]
    return wheres, head_on_gpu


def least_groups(machine: Machine, neuron_bytes: int) -> int | None:
    """C_l in groups: the fewest that are worth synchronizing for; None where no number is."""
    if machine.gpu_bytes_per_s <= 0:
        return None
    gained_s = neuron_bytes * (1 / machine.host_bytes_per_s - 1 / machine.gpu_bytes_per_s)
    if gained_s <= 0:
        return None
    return max(1, math.ceil(machine.sync_s / gained_s / GROUP))


def _impact_layer_stage(task: PlacementTask, number: int, where: PartPlaces) -> PlacementStage:
    layer = task.model.layers[number]
    on_gpu, on_host = fixed_bytes(layer, where)
    nothing = Choice(where, on_gpu, on_host, np.zeros(1), 0, where.attention_on_gpu)
    least = least_groups(task.machine, layer.neuron_bytes)
    fired = computed_by_groups(task.firing.layers[number])
    if not where.attention_on_gpu or least is None or least >= len(fired):
        return PlacementStage((nothing,), group_bytes(layer))
    some = Choice(where, on_gpu, on_host, -fired[least:], least, where.attention_on_gpu)
    return PlacementStage((nothing, some), group_bytes(layer))
