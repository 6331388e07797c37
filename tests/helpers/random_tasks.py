"""Random placement tasks: models, firing curves and machines, small and odd ones among them."""

import numpy as np
from hypothesis import strategies as st

from picompile.placement.firing import Firing, LayerFiring
from picompile.placement.machine import Machine
from picompile.placement.model_bytes import LayerBytes, LayerLaunches, ModelBytes
from picompile.placement.problem import PlacementTask


def tasks(most_layers: int = 6, most_neurons: int = 700) -> st.SearchStrategy[PlacementTask]:
    """Tasks as `random_task` makes them."""
    return st.integers(0, 2**32 - 1).map(lambda seed: random_task(seed, most_layers, most_neurons))


def random_task(seed: int, most_layers: int = 6, most_neurons: int = 700) -> PlacementTask:
    """A task of any kind: layers that differ in everything, budgets from nothing to more than enough."""
    rng = np.random.default_rng(seed)
    layers = tuple(_layer(rng, most_neurons) for _ in range(rng.integers(1, most_layers + 1)))
    context = int(rng.integers(1, 4096))
    tied = bool(rng.integers(0, 2))
    model = ModelBytes(
        name="random",
        quant="q4",
        predictor="learned",
        context=context,
        sequences=int(rng.choice([1, 1, 1, 4])),
        hidden=int(rng.integers(8, 4096)),
        parameters=int(rng.integers(1, 10**9)),
        layers=layers,
        embedding_bytes=0 if tied else _size(rng),
        head_bytes=_size(rng),
        tied=tied,
        table_bytes=_size(rng) // 10,
        workspace_bytes=_size(rng) // 10,
        head_launches=int(rng.integers(0, 10)),
    )
    firing = Firing(tuple(_firing(rng, layer.neurons) for layer in layers), "random")
    return PlacementTask(model, firing, _machine(rng, model), int(rng.integers(0, context + 1)))


def whole_bytes(model: ModelBytes) -> int:
    """About as many bytes as the model takes."""
    layers = sum(
        layer.attention_bytes + layer.predictor_bytes + layer.kv_cache_bytes + layer.neurons * layer.neuron_bytes
        for layer in model.layers
    )
    return layers + model.embedding_bytes + model.head_bytes + model.table_bytes + model.workspace_bytes


def _size(rng: np.random.Generator) -> int:
    return int(10 ** rng.uniform(1, 8))


def _layer(rng: np.random.Generator, most_neurons: int) -> LayerBytes:
    neuron_bytes = int(10 ** rng.uniform(0, 5))
    kind = rng.choice(["learned", "exact", "none"])
    return LayerBytes(
        attention_bytes=_size(rng),
        predictor_bytes=_size(rng) if kind == "learned" else 0,
        neurons=int(rng.integers(1, most_neurons)),
        neuron_bytes=neuron_bytes,
        gating_bytes={"learned": 0, "exact": neuron_bytes // 3, "none": neuron_bytes}[kind],
        shared_bytes=_size(rng) // 100,
        kv_cache_bytes=_size(rng),
        launches=_launches(rng),
        number_bytes=4 if kind == "learned" else 0,
    )


def _launches(rng: np.random.Generator) -> LayerLaunches:
    attention, kv_cache, predictor, hot = (int(count) for count in rng.integers(0, 20, 4))
    return LayerLaunches(attention, kv_cache, predictor, hot)


def _firing(rng: np.random.Generator, neurons: int) -> LayerFiring:
    shares = np.sort(rng.beta(rng.uniform(0.1, 2), rng.uniform(0.1, 20), neurons))[::-1].copy()
    if rng.random() < 0.2:
        shares[rng.integers(0, neurons) :] = 0.0
    return LayerFiring(shares, rng.permutation(neurons) if rng.random() < 0.5 else None)


def _machine(rng: np.random.Generator, model: ModelBytes) -> Machine:
    whole = whole_bytes(model)
    gpu, host = (int(whole * rng.choice([0.0, 0.001, rng.uniform(0, 1.3), 100.0])) for _ in range(2))
    host_speed = 10 ** rng.uniform(9, 11)
    return Machine(
        gpu_bytes=gpu,
        gpu_bytes_per_s=host_speed * rng.uniform(0.5, 30),
        host_bytes=host if rng.random() < 0.5 else 2 * whole,
        host_bytes_per_s=host_speed,
        pcie_bytes_per_s=10 ** rng.uniform(9, 11),
        sync_s=float(rng.choice([0.0, 10 ** rng.uniform(-7, -3)])),
        launch_s=float(rng.choice([0.0, 1e-6])),
    )
