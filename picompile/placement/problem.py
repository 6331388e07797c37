"""Placement problems: what can be chosen for each stage of a token, and what each choice costs."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from picompile.placement.firing import Firing
from picompile.placement.machine import Machine
from picompile.placement.model_bytes import SPLIT_BYTES, LayerBytes, ModelBytes
from picompile.placement.times import (
    ALL_ON_ACCELERATOR,
    ALL_ON_HOST,
    GROUP_NEURONS,
    LayerTimes,
    PartPlaces,
    computed_by_groups,
    group_count,
    hidden_s,
)

# The placement problem: the choices for each stage of a token, with the memory and the cost of each.
#
# A stage is a layer, or the output head. One `Choice` is made for each: where its attention, its KV cache and its
# predictor are. Within a choice, some number of groups of its neurons is on the accelerator. Neurons are in order of
# firing, and those on the accelerator are always the most active ones, so the number says which they are. A stage on
# the other side than the stage before costs a transfer.
#
#     minimize    Σ_l cost_l(choice_l, n_l) + switch · #{l: side_l ≠ side_(l-1)}
#     subject to  Σ_l gpu_l(choice_l) + n_l · group_l  ≤ gpu_capacity
#                 Σ_l host_l(choice_l) - n_l · group_l ≤ host_capacity
#
# A choice may cost less where the choice of the next stage `predicts_early`: then the accelerator works for that stage
# while it waits for the host. These are its `early_costs`.
#
# Costs are any numbers: seconds for the latency objective, firings lost for the paper's.


@dataclass(frozen=True, eq=False)
class Choice:
    """One way to place a stage; `label` is what it stands for.

    `costs` float64 [k] are for `first`, `first` + 1, … groups on the accelerator. `gpu_bytes` and `host_bytes` are the
    bytes taken with no group on the accelerator; each group there moves the stage's `group_bytes` away from the host.
    `on_accelerator`: whether the stage's input and output vectors are on the accelerator. `early_costs`, if there are
    any, take the place of `costs` where the choice of the next stage `predicts_early`; none of them is higher.
    """

    label: Hashable
    gpu_bytes: int
    host_bytes: int
    costs: NDArray[np.float64]
    first: int = 0
    on_accelerator: bool = True
    predicts_early: bool = False
    early_costs: NDArray[np.float64] | None = None

    @cached_property
    def before_early(self) -> "Choice":
        """The choice as it is where the next stage predicts early."""
        return self if self.early_costs is None else replace(self, costs=self.early_costs)

    @property
    def last(self) -> int:
        """The most groups that can be on the accelerator."""
        return self.first + len(self.costs) - 1

    def cost(self, groups: int) -> float:
        """Return the cost with `groups` on the accelerator."""
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
    """The choice made for a stage, by its number, and how many groups are on the accelerator."""

    choice: int
    groups: int


class Totals(NamedTuple):
    """The cost of a placement of all stages, and the bytes that it takes."""

    cost: float
    gpu_bytes: int
    host_bytes: int

    def fits(self, problem: PlacementProblem) -> bool:
        """Return whether accelerator and host can hold it."""
        return self.gpu_bytes <= problem.gpu_capacity_bytes and self.host_bytes <= problem.host_capacity_bytes


def made_choices(problem: PlacementProblem, places: Sequence[StagePlace]) -> list[Choice]:
    """Return the choices of a placement, each with the costs that it has before the choice of the next stage."""
    chosen = [stage.choices[place.choice] for stage, place in zip(problem.stages, places, strict=True)]
    return [
        choice.before_early if after is not None and after.predicts_early else choice
        for choice, after in zip_longest(chosen, chosen[1:])
    ]


def evaluate(problem: PlacementProblem, places: Sequence[StagePlace]) -> Totals:
    """Return the cost and the exact bytes of a placement."""
    cost, gpu_bytes, host_bytes = 0.0, 0, 0
    choices = made_choices(problem, places)
    sides = [choice.on_accelerator for choice in choices]
    for stage, choice, place in zip(problem.stages, choices, places, strict=True):
        moved = place.groups * stage.group_bytes
        cost += choice.cost(place.groups)
        gpu_bytes += choice.gpu_bytes + moved
        host_bytes += choice.host_bytes - moved
    if problem.from_host:
        sides = [False, *sides, False]
    switches = sum(before != after for before, after in pairwise(sides))
    return Totals(cost + switches * problem.switch_cost, gpu_bytes, host_bytes)


# The latency objective: a model on a machine as a placement problem whose cost is a token's time in seconds.


_FLOAT32_BYTES = 4


@dataclass(frozen=True, eq=False)
class PlacementTask:
    """A model to place, how its neurons fire, the machine, and how many tokens are in the cache.

    With `lends_caches` both memories have room for a copy of a layer's cache, which the host lends to the accelerator
    for a prompt if it has any.
    """

    model: ModelBytes
    firing: Firing
    machine: Machine
    tokens: int
    lends_caches: bool = True

    @property
    def lent_bytes(self) -> int:
        """Bytes that each memory has room for, for the copy of a cache that is lent."""
        return self.model.lent_bytes if self.lends_caches else 0

    def layer_times(self, number: int) -> LayerTimes:
        """Return the cost model of a layer."""
        layer = self.model.layers[number]
        read = layer.kv_cache_bytes * min(self.tokens, self.model.context) / self.model.context
        crossing = self.model.sequences * (_FLOAT32_BYTES * self.model.hidden + layer.neurons / 8)
        return LayerTimes(
            layer,
            firing=self.firing.layers[number],
            machine=self.machine,
            kv_cache_read_bytes=read,
            crossing_bytes=crossing,
        )


def predicts_early(layer: LayerBytes, where: PartPlaces) -> bool:
    """Return whether a layer placed so has its mask made early if the layer before has attention on the accelerator."""
    return layer.predicts_early and where.attention_on_accelerator and where.predictor_on_accelerator


def hidden_after(task: PlacementTask, number: int, where: PartPlaces) -> NDArray[np.float64]:
    """Return the seconds of the next layer's prediction that layer `number` hides if it is made early.

    They are float64 [groups + 1], and all 0 where that prediction cannot be made early.
    """
    times = task.layer_times(number).times(where)
    layers = task.model.layers
    if number + 1 == len(layers) or not layers[number + 1].predicts_early or not where.attention_on_accelerator:
        return np.zeros_like(times.hot_s)
    return hidden_s(task.layer_times(number + 1).predict_s(on_accelerator=True), times)


def places_of(layer: LayerBytes) -> Sequence[PartPlaces]:
    """Return the ways to place the parts of a layer that are not neurons."""
    places = [ALL_ON_ACCELERATOR, PartPlaces(True, False, True)]
    if layer.predictor_bytes:
        places += [PartPlaces(True, True, False), PartPlaces(True, False, False)]
    return (*places, ALL_ON_HOST)


def fixed_bytes(layer: LayerBytes, where: PartPlaces, *, split: bool | None = None) -> tuple[int, int]:
    """Return (bytes on the accelerator, bytes on the host) of a layer with no group of neurons on the accelerator.

    A short last group counts as a full one. `split` says whether the block can have a hot part, which has vectors of
    its own; None means that it can if attention is on the accelerator.
    """
    parts = (
        (layer.attention_bytes + layer.shared_bytes, where.attention_on_accelerator),
        (layer.kv_cache_bytes, where.kv_cache_on_accelerator),
        (layer.predictor_bytes, where.predictor_on_accelerator),
        (group_count(layer.neurons) * group_bytes(layer), False),
    )
    accelerator_bytes = sum(size for size, on_accelerator in parts if on_accelerator)
    host_bytes = sum(size for size, _ in parts) - accelerator_bytes + SPLIT_BYTES
    return accelerator_bytes + (SPLIT_BYTES if where.attention_on_accelerator or split else 0), host_bytes


def group_bytes(layer: LayerBytes) -> int:
    """Return the bytes of a full group in a block that is split."""
    return GROUP_NEURONS * (layer.neuron_bytes + layer.number_bytes)


def capacities(task: PlacementTask) -> tuple[int, int]:
    """Return the (accelerator, host) bytes for stages of the problem.

    They are without workspace, tables, the copy of a cache that is lent, the embedding on the host, and memory for
    weights of the host on the accelerator.
    """
    model, machine = task.model, task.machine
    everywhere, lent = model.workspace_bytes + model.table_bytes, task.lent_bytes
    gpu_bytes = machine.gpu_bytes - model.staging_bytes - everywhere - lent
    # To an accelerator that is too small for anything nothing is lent.
    host_bytes = machine.host_bytes - model.embedding_bytes - everywhere - (lent if gpu_bytes > 0 else 0)
    return max(0, gpu_bytes), host_bytes


def latency_problem(task: PlacementTask) -> PlacementProblem:
    """Return the problem with a token's seconds as cost: a stage for each layer, and one for the output head.

    A layer has the choices of `places_of`. Where the stream changes sides one vector crosses, and the cost of a whole
    transfer is charged. That pays for its one kernel, and at the beginning of a token for the kernel that brings the
    token's position to the accelerator.
    """
    gpu_capacity, host_capacity = capacities(task)
    stages = [_layer_stage(task, number, gpu_capacity > 0) for number in range(len(task.model.layers))]
    return PlacementProblem(
        stages=(*stages, _head_stage(task, gpu_capacity > 0)),
        gpu_capacity_bytes=gpu_capacity,
        host_capacity_bytes=host_capacity,
        switch_cost=task.machine.crossing_s(_FLOAT32_BYTES * task.model.hidden * task.model.sequences),
        from_host=True,
    )


def _layer_stage(task: PlacementTask, number: int, has_accelerator: bool) -> PlacementStage:
    layer, times = task.model.layers[number], task.layer_times(number)
    choices = []
    for where in places_of(layer) if has_accelerator else (ALL_ON_HOST,):
        costs = times.times(where).total_s
        if where.attention_on_accelerator:
            hidden = hidden_after(task, number, where)
            early_costs = costs - hidden if hidden.any() else None
            early = predicts_early(layer, where)
            choices.append(
                Choice(where, *fixed_bytes(layer, where), costs, predicts_early=early, early_costs=early_costs)
            )
            continue
        choices.append(Choice(where, *fixed_bytes(layer, where), costs[:1], 0, False))
        if has_accelerator:
            choices.append(Choice(where, *fixed_bytes(layer, where, split=True), costs[1:], 1, False))
    return PlacementStage(tuple(choices), group_bytes(layer))


def _head_stage(task: PlacementTask, has_accelerator: bool) -> PlacementStage:
    model, machine = task.model, task.machine
    host = Choice(ALL_ON_HOST, 0, model.head_bytes, np.asarray([head_s(model, machine, False)]), on_accelerator=False)
    if not has_accelerator:
        return PlacementStage((host,))
    accelerator = Choice(ALL_ON_ACCELERATOR, model.head_bytes, 0, np.asarray([head_s(model, machine, True)]))
    return PlacementStage((accelerator, host))


def head_s(model: ModelBytes, machine: Machine, on_accelerator: bool) -> float:
    """Return the seconds that the output head takes for a token."""
    if on_accelerator:
        return model.head_bytes / machine.gpu_read_bytes_per_s + model.head_launches * machine.launch_s
    return model.head_bytes / machine.host_read_bytes_per_s


# PowerInfer's placement policy, as published (SOSP'24, section 6, equations 1 to 8).
#
# The impact of a neuron is how often it fires (1). The policy puts the largest total impact on the GPU (2) that both
# memories allow (6). A layer has either no neuron there or at least C_l (7, 8): the number from which computing them
# there saves what synchronizing costs, C_l · T_gpu + T_sync ≤ C_l · T_cpu (4). The time of a neuron is its bytes over
# the bandwidth of the memory that it is in (5). Neurons are placed 64 at a time.
#
# The paper's problem is about neurons only. Everything else goes to the GPU first, as in the code that was released:
# attention and predictors layer by layer, then the output head. The KV cache stays on the host, as in the paper, or
# goes to the GPU too if all of it fits.


def impact_problem(task: PlacementTask, kv_cache_on_accelerator: bool = False) -> PlacementProblem:
    """Return the paper's problem; its cost is the negative number of firings on the accelerator.

    Its choices have the same labels as those of `latency_problem`. A layer whose attention does not fit the
    accelerator is on the host altogether.
    """
    gpu_capacity, host_capacity = capacities(task)
    wheres, head_on_accelerator = dense_first(task, kv_cache_on_accelerator)
    stages = [_impact_layer_stage(task, number, where) for number, where in enumerate(wheres)]
    head = (task.model.head_bytes, 0) if head_on_accelerator else (0, task.model.head_bytes)
    stages.append(
        PlacementStage((Choice(ALL_ON_ACCELERATOR if head_on_accelerator else ALL_ON_HOST, *head, np.zeros(1)),))
    )
    # Inequality 6 is strict.
    return PlacementProblem(tuple(stages), max(0, gpu_capacity - 1), host_capacity - 1)


def dense_first(task: PlacementTask, kv_cache_on_accelerator: bool = False) -> tuple[list[PartPlaces], bool]:
    """Return where the paper's policy puts the parts that are not neurons, by layer, and whether the head fits too."""
    gpu_capacity, _ = capacities(task)
    free_bytes = gpu_capacity - 1
    wheres = []
    for layer in task.model.layers:
        size, _ = fixed_bytes(layer, PartPlaces(True, False, True))
        fits = size <= free_bytes
        free_bytes = free_bytes - size if fits else -1
        wheres.append(PartPlaces(True, False, True) if fits else ALL_ON_HOST)
    head_on_accelerator = task.model.head_bytes <= free_bytes
    free_bytes -= task.model.head_bytes if head_on_accelerator else 0
    cache_bytes = sum(layer.kv_cache_bytes for layer in task.model.layers)
    if kv_cache_on_accelerator and head_on_accelerator and cache_bytes <= free_bytes:
        wheres = [ALL_ON_ACCELERATOR for _ in wheres]
    return wheres, head_on_accelerator


def least_groups(machine: Machine, neuron_bytes: int) -> int | None:
    """Return C_l in groups: the fewest that are worth synchronizing for; None if no number is."""
    if machine.gpu_bytes_per_s <= 0:
        return None
    gained_s = neuron_bytes * (1 / machine.host_bytes_per_s - 1 / machine.gpu_bytes_per_s)
    if gained_s <= 0:
        return None
    return max(1, math.ceil(machine.sync_s / gained_s / GROUP_NEURONS))


def _impact_layer_stage(task: PlacementTask, number: int, where: PartPlaces) -> PlacementStage:
    layer = task.model.layers[number]
    accelerator_bytes, host_bytes = fixed_bytes(layer, where)
    nothing = Choice(
        where,
        gpu_bytes=accelerator_bytes,
        host_bytes=host_bytes,
        costs=np.zeros(1),
        first=0,
        on_accelerator=where.attention_on_accelerator,
    )
    least = least_groups(task.machine, layer.neuron_bytes)
    fired = computed_by_groups(task.firing.layers[number])
    if not where.attention_on_accelerator or least is None or least >= len(fired):
        return PlacementStage((nothing,), group_bytes(layer))
    some = Choice(
        where,
        gpu_bytes=accelerator_bytes,
        host_bytes=host_bytes,
        costs=-fired[least:],
        first=least,
        on_accelerator=where.attention_on_accelerator,
    )
    return PlacementStage((nothing, some), group_bytes(layer))
