"""The cost model against the same sums made neuron by neuron."""

import numpy as np
from hypothesis import given
from test_solver import SEEDS

from helpers.random_tasks import random_task
from picompile.placement.problem import PlacementTask, places_of
from picompile.placement.times import GROUP_NEURONS, LayerTimes, PartPlaces, Times, transfer_launches


def with_gpu(seed: int) -> PlacementTask:
    while True:
        task = random_task(seed)
        if task.machine.gpu_bytes > task.model.workspace_bytes + task.model.table_bytes:
            return task
        seed += 1


def expected_parts(model: LayerTimes, where: PartPlaces, groups: int) -> dict[str, float]:
    layer, machine, shares = model.layer, model.machine, model.firing.shares
    gpu, host = machine.gpu_bytes_per_s * machine.gpu_efficiency, machine.host_bytes_per_s * machine.host_efficiency
    hot = min(groups * GROUP_NEURONS, layer.neurons)

    def neurons(which: range) -> float:
        return sum(layer.gating_bytes + shares[neuron] * (layer.neuron_bytes - layer.gating_bytes) for neuron in which)

    all_silent = 1.0
    for neuron in range(hot, layer.neurons):
        all_silent *= 1 - shares[neuron]
    fires = 0.0 if hot == layer.neurons else 1.0 if layer.gating_bytes else 1 - all_silent
    if not where.attention_on_accelerator:
        exchanges = float(groups > 0)
    elif where.predictor_on_accelerator or not layer.predictor_bytes:
        exchanges = fires
    else:
        exchanges = 1.0 + (fires if groups > 0 else 0.0)
    if where.attention_on_accelerator and not where.kv_cache_on_accelerator:
        exchanges += 1
    crossing = machine.sync_s + 2 * model.crossing_bytes / machine.pcie_bytes_per_s
    # The launches of what sends and receives are in it, and are made on every token.
    beside = max(0.0, crossing - 2 * machine.launch_s)
    which = 0 if groups == 0 else 2 if hot == layer.neurons else 1
    crossing_launches = transfer_launches(layer, where)[which]
    launches = layer.launches
    of_hot = launches.hot + (launches.predictor if layer.predictor_bytes == 0 else 0)
    attention = layer.attention_bytes + layer.shared_bytes
    predictor = layer.predictor_bytes
    return {
        "attention_s": attention / gpu + launches.attention * machine.launch_s
        if where.attention_on_accelerator
        else attention / host,
        "kv_cache_s": model.kv_cache_read_bytes / gpu + launches.kv_cache * machine.launch_s
        if where.kv_cache_on_accelerator
        else model.kv_cache_read_bytes / host,
        "predict_s": predictor / gpu + launches.predictor * machine.launch_s * bool(predictor)
        if where.predictor_on_accelerator
        else predictor / host,
        "hot_s": neurons(range(hot)) / gpu + of_hot * machine.launch_s * (hot > 0),
        "cold_s": neurons(range(hot, layer.neurons)) / host,
        "exchange_s": exchanges * beside + crossing_launches * machine.launch_s,
    }


@given(SEEDS)
def test_times_of_a_layers_parts(seed: int) -> None:
    task = with_gpu(seed)
    model = task.layer_times(0)
    for where in places_of(task.model.layers[0]):
        times: Times = model.times(where)
        for groups in {0, 1, len(times.total_s) // 2, len(times.total_s) - 1}:
            expected = expected_parts(model, where, groups)
            for name, seconds in times.at(groups).items():
                np.testing.assert_allclose(seconds, expected[name], rtol=1e-9, atol=1e-18, err_msg=name)
            sides = max(expected["hot_s"], expected["cold_s"])
            others = sum(value for name, value in expected.items() if name not in ("hot_s", "cold_s"))
            np.testing.assert_allclose(times.total_s[groups], sides + others, rtol=1e-9)
