"""The instances of the placement benchmarks: random ones of every kind, and models and machines of given sizes."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np

from picompile.machine.targets import TARGETS
from picompile.placement.firing import Firing, LayerFiring
from picompile.placement.machine import Machine, machine_of
from picompile.placement.model_bytes import LayerBytes, LayerLaunches, ModelBytes
from picompile.placement.problem import PlacementTask, fixed_bytes, group_bytes
from picompile.placement.solver import GAP
from picompile.placement.times import ALL_ON_ACCELERATOR, group_count

GIB = 2**30
WEIGHT_BYTES = {"f16": 2.0, "q8": 1.0625, "q4": 0.5625}
_GPUS = tuple(target for target in TARGETS.values() if target.vram_bytes)
Row = dict[str, object]
_Item = TypeVar("_Item")


def counted(items: "Iterator[_Item] | range", count: int) -> "Iterator[_Item] | Iterator[int]":
    """The items, with a line on a terminal that says how far it is."""
    for number, item in enumerate(items):
        if sys.stderr.isatty():
            print(f"\r{number}/{count}", end="", file=sys.stderr, flush=True)
        yield item
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)


def solved(gap: object) -> bool:
    """Whether a solver that was told the usual gap came to it; None where it found nothing."""
    return isinstance(gap, float) and gap <= GAP * (1 + 1e-6)


def placed_bytes(model: ModelBytes) -> int:
    """All that could be on the GPU."""
    layers = sum(
        fixed_bytes(layer, ALL_ON_ACCELERATOR)[0] + group_count(layer.neurons) * group_bytes(layer)
        for layer in model.layers
    )
    return layers + model.head_bytes + model.workspace_bytes + model.table_bytes


def everything_bytes(model: ModelBytes) -> int:
    """All that there is, on a host without a GPU."""
    return placed_bytes(model) + model.embedding_bytes


def random_model(rng: np.random.Generator, most_layers: int = 100) -> ModelBytes:
    """A transformer of any shape, weight format, predictor and context."""
    hidden = int(rng.integers(8, 100)) * 128
    neurons = int(hidden * rng.uniform(2, 5))
    matrices = int(rng.integers(2, 4))
    quant = str(rng.choice(list(WEIGHT_BYTES)))
    weight_bytes = WEIGHT_BYTES[quant]
    kv_share = float(rng.choice([1.0, 0.25, 0.125]))
    context, batch = int(2 ** rng.uniform(7, 15)), int(rng.choice([1, 1, 1, 4]))
    kind = str(rng.choice(["learned", "exact", "sign"]))
    neuron_bytes = int(matrices * hidden * weight_bytes)
    attention = int((2 + 2 * kv_share) * hidden**2 * weight_bytes)
    layer_bytes = attention + neurons * neuron_bytes
    layer = LayerBytes(
        attention_bytes=attention,
        predictor_bytes=int(layer_bytes * rng.uniform(0.03, 0.1)) if kind == "learned" else 0,
        neurons=neurons,
        # The bits of `sign` are beside the weights.
        neuron_bytes=neuron_bytes + (hidden // 8 if kind == "sign" else 0),
        gating_bytes={"learned": 0, "exact": neuron_bytes // matrices, "sign": hidden // 8}[kind],
        shared_bytes=int(hidden * 2),
        kv_cache_bytes=int(4 * kv_share * hidden * context * batch),
        # Those of a Llama.
        launches=LayerLaunches(3, 1, {"learned": 2, "exact": 0, "sign": 1}[kind], 2),
        number_bytes=4 if kind == "learned" else 0,
    )
    layers = int(rng.integers(2, most_layers + 1))
    head = int(rng.integers(10_000, 200_000) * hidden * weight_bytes)
    tied = bool(rng.integers(0, 2))
    return ModelBytes(
        name="random",
        quant=quant,
        predictor=kind,
        context=context,
        batch=batch,
        hidden=hidden,
        parameters=int(layers * layer_bytes / weight_bytes),
        layers=(layer,) * layers,
        embedding_bytes=0 if tied else head,
        head_bytes=head,
        tied=tied,
        table_bytes=512 * context,
        workspace_bytes=100 * hidden * 4 * batch,
        head_launches=3,
    )


def random_firing(rng: np.random.Generator, model: ModelBytes) -> Firing:
    """Curves of any sparsity and skew, which layers differ in."""
    active, skew, growth = 10 ** rng.uniform(-2, -0.4), 10 ** rng.uniform(-1, 0.5), 10 ** rng.uniform(0, 1.5)
    layers = []
    for number, layer in enumerate(model.layers):
        mean = active * growth ** (number / len(model.layers) - 0.5) * rng.uniform(0.8, 1.25)
        mean = min(mean, 0.9)
        shares = rng.beta(skew * mean + 1e-3, skew * (1 - mean), layer.neurons)
        layers.append(LayerFiring(np.sort(shares)[::-1].copy()))
    return Firing(tuple(layers), "random")


def random_machine(rng: np.random.Generator, model: ModelBytes) -> Machine:
    """One of the targets with as much memory as brings some of the model to the GPU, or all; and a host of any kind."""
    gpu, size = _GPUS[rng.integers(len(_GPUS))], everything_bytes(model)
    machine = machine_of(
        gpu,
        gpu_bytes=int(size * rng.uniform(0.01, 1.3)),
        host_bytes=int(size * rng.choice([2.0, rng.uniform(0.3, 1.2)])),
        host_bytes_per_s=10 ** rng.uniform(10.3, 11.6),
    )
    return replace(machine, sync_s=10 ** rng.uniform(-5.3, -3.3), launch_s=rng.uniform(1e-6, 5e-6))


def random_task(rng: np.random.Generator, most_layers: int = 100) -> PlacementTask:
    """A model, curves and a machine at random. Not all of them fit."""
    model = random_model(rng, most_layers)
    machine = random_machine(rng, model)
    return PlacementTask(model, random_firing(rng, model), machine, int(model.context * rng.random()))


def repeated(task: PlacementTask, times: int, seed: int = 0) -> PlacementTask:
    """Return the task of a model whose layers are repeated `times` times; every layer has firing of its own."""
    rng = np.random.default_rng(seed)
    layers = []
    for layer in task.firing.layers * times:
        shares = np.minimum(layer.shares * rng.lognormal(0.0, 0.2) * rng.lognormal(0.0, 0.1, len(layer.shares)), 1.0)
        layers.append(LayerFiring(np.sort(shares)[::-1].copy()))
    model = replace(task.model, layers=task.model.layers * times)
    return replace(task, model=model, firing=Firing(tuple(layers), "noisy"))
