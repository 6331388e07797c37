"""The latency objective: a model on a machine as a placement program whose cost is a token's time in seconds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from picompile.placement.counting import SPLIT_BYTES
from picompile.placement.firing import Firing
from picompile.placement.machine import Machine
from picompile.placement.model_bytes import LayerBytes, ModelBytes
from picompile.placement.program import Choice, Program, Stage
from picompile.placement.times import ALL_ON_GPU, ALL_ON_HOST, GROUP, LayerTimes, Where, group_count

_FLOAT32_BYTES = 4


@dataclass(frozen=True, eq=False)
class Task:
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


def places_of(layer: LayerBytes) -> Sequence[Where]:
    """The ways in which the parts of a layer that are not neurons can lie."""
    places = [ALL_ON_GPU, Where(True, False, True)]
    if layer.predictor_bytes:
        places += [Where(True, True, False), Where(True, False, False)]
    return (*places, ALL_ON_HOST)


def fixed_bytes(layer: LayerBytes, where: Where, *, split: bool | None = None) -> tuple[int, int]:
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


def capacities(task: Task) -> tuple[int, int]:
    """(GPU, host) bytes that are left for stages: without workspace, tables and the embedding, which the host has."""
    model, machine = task.model, task.machine
    everywhere = model.workspace_bytes + model.table_bytes
    return max(0, machine.gpu_bytes - everywhere), machine.host_bytes - everywhere - model.embedding_bytes


def latency_program(task: Task) -> Program:
    """The program: a stage for each layer with the choices of `places_of`, and one for the output head.

    Where the stream changes sides one vector crosses, which is charged as an exchange. So its one kernel is paid for,
    and so is at the beginning of a token the one that brings its position to the GPU.
    """
    gpu_capacity, host_capacity = capacities(task)
    stages = [_layer_stage(task, number, gpu_capacity > 0) for number in range(len(task.model.layers))]
    return Program(
        stages=(*stages, _head_stage(task, gpu_capacity > 0)),
        gpu_capacity_bytes=gpu_capacity,
        host_capacity_bytes=host_capacity,
        switch_cost=task.machine.crossing_s(_FLOAT32_BYTES * task.model.hidden * task.model.batch),
        from_host=True,
    )


def _layer_stage(task: Task, number: int, gpu: bool) -> Stage:
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
    return Stage(tuple(choices), group_bytes(layer))


def _head_stage(task: Task, gpu: bool) -> Stage:
    model, machine = task.model, task.machine
    on_host = Choice(ALL_ON_HOST, 0, model.head_bytes, np.asarray([head_s(model, machine, False)]), 0, False)
    if not gpu:
        return Stage((on_host,))
    on_gpu = Choice(ALL_ON_GPU, model.head_bytes, 0, np.asarray([head_s(model, machine, True)]), 0, True)
    return Stage((on_gpu, on_host))


def head_s(model: ModelBytes, machine: Machine, on_gpu: bool) -> float:
    """Seconds of the output head for a token."""
    if on_gpu:
        return model.head_bytes / machine.gpu_read_bytes_per_s + model.head_launches * machine.launch_s
    return model.head_bytes / machine.host_read_bytes_per_s
