"""PowerInfer's placement policy, as published (SOSP'24, section 6, equations 1 to 8).

The impact of a neuron is how often it fires (1), and the GPU gets the most (2) within the memory of both devices (6). A
layer has no neuron there, or at least C_l (7, 8), so many that computing them there saves what synchronizing costs:
C_l · T_gpu + T_sync ≤ C_l · T_cpu (4), where the time of a neuron is its bytes over the device's bandwidth (5). Neurons
are placed 64 at a time.

The paper's program is of neurons. What else there is goes to the GPU first, as in the code that was released:
attention and predictors layer by layer, then the output head. The KV cache stays on the host, as the paper has it, or
follows where all of it fits.
"""

import math

import numpy as np

from picompile.placement.latency import Task, capacities, fixed_bytes, group_bytes
from picompile.placement.machine import Machine
from picompile.placement.program import Choice, Program, Stage
from picompile.placement.times import ALL_ON_GPU, ALL_ON_HOST, GROUP, Where, computed_by_groups


def impact_program(task: Task, kv_cache_on_gpu: bool = False) -> Program:
    """The paper's program, as one of least cost: that is the number of firings that the GPU does not get, negative.

    Its choices are labelled as those of `latency_program`. A layer whose attention the GPU has no room for lies on the
    host whole.
    """
    gpu_capacity, host_capacity = capacities(task)
    wheres, head_on_gpu = dense_first(task, kv_cache_on_gpu)
    stages = [_layer_stage(task, number, where) for number, where in enumerate(wheres)]
    head = (task.model.head_bytes, 0) if head_on_gpu else (0, task.model.head_bytes)
    stages.append(Stage((Choice(ALL_ON_GPU if head_on_gpu else ALL_ON_HOST, *head, np.zeros(1)),)))
    # Inequality 6 is strict.
    return Program(tuple(stages), max(0, gpu_capacity - 1), host_capacity - 1)


def dense_first(task: Task, kv_cache_on_gpu: bool = False) -> tuple[list[Where], bool]:
    """Where the parts of each layer lie that are not neurons, and whether the head is on the GPU."""
    gpu_capacity, _ = capacities(task)
    free_bytes = gpu_capacity - 1
    wheres = []
    for layer in task.model.layers:
        on_gpu, _ = fixed_bytes(layer, Where(True, False, True))
        fits = on_gpu <= free_bytes
        free_bytes = free_bytes - on_gpu if fits else -1
        wheres.append(Where(True, False, True) if fits else ALL_ON_HOST)
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


def _layer_stage(task: Task, number: int, where: Where) -> Stage:
    layer = task.model.layers[number]
    on_gpu, on_host = fixed_bytes(layer, where)
    nothing = Choice(where, on_gpu, on_host, np.zeros(1), 0, where.attention_on_gpu)
    least = least_groups(task.machine, layer.neuron_bytes)
    fired = computed_by_groups(task.firing.layers[number])
    if not where.attention_on_gpu or least is None or least >= len(fired):
        return Stage((nothing,), group_bytes(layer))
    some = Choice(where, on_gpu, on_host, -fired[least:], least, where.attention_on_gpu)
    return Stage((nothing, some), group_bytes(layer))
