"""Launches as the planner counts them, against the launches of programs that are lowered for a GPU."""

import functools
import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from torch.fx import GraphModule

from helpers.families import config_of
from picompile.choices import KV_DTYPES
from picompile.frontend.hf import capture_config
from picompile.machine.targets import TARGETS
from picompile.placement.counting import count_bytes
from picompile.placement.firing import Firing, LayerFiring
from picompile.placement.machine import machine_of
from picompile.placement.model_bytes import LayerBytes, LayerLaunches, ModelBytes, Packing
from picompile.placement.policies import dense
from picompile.placement.problem import PlacementTask, places_of
from picompile.placement.times import ALL_ON_ACCELERATOR, PartPlaces, transfer_launches
from picompile.predictors.store import LayerPredictor, Predictors
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import lower
from picompile_codegen.lowering.placement import Placement
from picompile_passes.passes.canonicalize import CANONICALIZE
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline

LAYERS, RANK = 3, 24
CHUNK = 16


class Model(NamedTuple):
    """A variant of tests/helpers/families.py with predictors of one kind, and how it is packed."""

    variant: str
    predictor: str
    quant: str = "q4"
    context: int = 40
    sequences: int = 1
    kv_dtype: str = "f16"

    @property
    def packing(self) -> Packing:
        return Packing(self.quant, self.predictor, self.context, self.sequences, self.kv_dtype, CHUNK)


MODELS = (
    *(Model("llama-relu", predictor) for predictor in ("learned", "sign", "exact", "none")),
    # Attention in parts, and of more query heads than a block takes for a key.
    Model("llama-relu", "learned", "f16", context=384, kv_dtype="f32"),
    Model("mistral-window", "none", "q8", context=200, kv_dtype="q8"),
    Model("bamboo", "learned", context=100),
    # Norms with biases, no rotation, and one matrix less.
    Model("opt-pre-norm", "learned"),
    # Attention and block side by side, behind one norm and behind two.
    Model("falcon-7b", "learned"),
    Model("falcon-40b", "exact", "f16", context=384),
    Model("falcon-serial", "learned", "q8"),
    Model("bitnet", "learned", "q8", sequences=3),
    Model("nemotron", "sign"),
    Model("nanochat", "exact"),
    Model("llama-relu", "learned", sequences=3),
    # Two launches of a plain block of several tokens, where there are three of one.
    Model("opt-galactica", "none", sequences=3),
)
# Norms of heads run where projections do. With the cache on the other side they cross over and back, which the
# planner does not count.
NORMED_BEHIND_ROTARY = ("nanochat",)


class Layer(NamedTuple):
    """Where a layer is: its parts, and how much of its block is hot: "none", "some" or "all"."""

    where: PartPlaces
    hot: str


@functools.cache
def captured(variant: str) -> GraphModule:
    return capture_config(config_of(variant, LAYERS))


@functools.cache
def predicted(variant: str, predictor: str, reads: str = "block") -> GraphModule:
    """The graph with its predictors, to be split; `reads` is what those behind the first layer read."""
    ranks = dict.fromkeys(range(LAYERS), RANK) if predictor == "learned" else {}
    inputs = dict.fromkeys(range(1, LAYERS), reads) if predictor == "learned" else {}
    passes = (*CANONICALIZE, InsertPredictors(predictor, ranks=ranks, inputs=inputs))
    return Pipeline(passes)(captured(variant)).graph_module


@functools.cache
def counted(model: Model) -> ModelBytes:
    predictors = None
    if model.predictor == "learned":
        layers = tuple(LayerPredictor(layer, "learned", "block", RANK) for layer in range(LAYERS))
        predictors = Predictors(Path("given"), layers, {})
    return count_bytes(model.variant, captured(model.variant), model.packing, predictors)


def found(model: Model, layers: Sequence[Layer], head: bool, reads: str = "block") -> Counter[str]:
    """Launches of the GPU in a token of the lowered program, by what its calls do."""
    neurons = counted(model).layers[0].neurons
    parts = {"none": (), "some": range(0, neurons, 2), "all": range(neurons)}
    hot = {number: parts[layer.hot] for number, layer in enumerate(layers)}
    graph_module = Pipeline((Partition(hot), Quantize(model.quant)))(predicted(model.variant, model.predictor, reads))
    wheres = dict(enumerate(layer.where for layer in layers))
    placement = Placement(
        frozenset(number for number, where in wheres.items() if where.attention_on_accelerator),
        frozenset(number for number, where in wheres.items() if where.kv_cache_on_accelerator),
        frozenset(number for number, where in wheres.items() if where.predictor_on_accelerator),
        head,
    )
    kv_dtype = KV_DTYPES[model.kv_dtype]
    options = LowerOptions(model.context, CHUNK, kv_dtype, model.sequences, "cuda", placement)
    lowered = lower(graph_module.graph_module, options)
    launches = {kernel.name: len(kernel.grids) for kernel in lowered.accelerator_built.values()}
    calls = lowered.program.functions["decode" if model.sequences == 1 else "batch"]
    # The first transfer pays for it.
    assert sum(call.op == "inputs" for call in calls) <= 1 or model.sequences > 1
    launched = Counter[str]()
    for call in calls:
        if call.device == "accelerator":
            launched[call.op] += launches[call.kernel]
    return launched


def expected(model: ModelBytes, layers: Sequence[Layer], head: bool) -> Counter[str]:
    """Return the launches as the planner counts them, summed by what it distinguishes."""
    launches = Counter[str]()
    for counts, (where, hot) in zip(model.layers, layers, strict=True):
        of_layer = counts.launches
        launches["stream"] += of_layer.attention * where.attention_on_accelerator
        launches["attention"] += of_layer.kv_cache * where.kv_cache_on_accelerator
        # One whose mask serves both parts of a block; another goes with the hot neurons.
        launches["block"] += of_layer.predictor * (where.predictor_on_accelerator and counts.predictor_bytes > 0)
        launches["block"] += counts.hot_launches * (hot != "none")
        launches["stream"] += transfer_launches(counts, where)[("none", "some", "all").index(hot)]
    sides = [False, *(layer.where.attention_on_accelerator for layer in layers), head]
    # A value that is received from the layer before goes through a norm of its own.
    launches["stream"] += sum((before != after) * (1 + after) for before, after in pairwise(sides))
    launches["stream"] += model.head_launches * head
    return launches


def in_sums(launched: Counter[str]) -> Counter[str]:
    """`launched` in the same sums."""
    sums = {
        "stream": ("norm", "ffn_norm", "elementwise", "linear", "add", "head", "leading", "send", "receive"),
        "attention": ("rotary", "attention", "cache"),
        "block": ("predict", "ffn"),
    }
    # What brings the token's position, at the beginning.
    assert set(launched) <= {*(op for ops in sums.values() for op in ops), "inputs"}
    return Counter({name: sum(launched[op] for op in ops) for name, ops in sums.items()})


def placements(layer: LayerBytes) -> list[tuple[list[Layer], bool]]:
    """All layers alike, in each way that the planner knows; and layers that differ."""
    ways = [Layer(where, hot) for where in places_of(layer) for hot in ("none", "some", "all")]
    alike = [([way] * LAYERS, random.random() < 0.5) for way in ways]
    mixed = [(random.choices(ways, k=LAYERS), random.random() < 0.5) for _ in range(4)]
    return [*alike, *mixed]


def _crosses(where: PartPlaces) -> bool:
    return where.attention_on_accelerator and not where.kv_cache_on_accelerator


@pytest.mark.slow("lowers a model per case")
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_launches_are_those_of_the_lowered_program(model: Model) -> None:
    for layers, head in placements(counted(model).layers[0]):
        if model.variant in NORMED_BEHIND_ROTARY and any(_crosses(layer.where) for layer in layers):
            continue
        assert in_sums(found(model, layers, head)) == expected(counted(model), layers, head), (layers, head)


@pytest.mark.slow("lowers models")
@pytest.mark.parametrize("model", [MODELS[0], MODELS[7]], ids=str)
def test_early_predictions_have_the_launches_of_others(model: Model) -> None:
    for where in (ALL_ON_ACCELERATOR, PartPlaces(True, False, True)):
        for hot in ("none", "some", "all"):
            layers = [Layer(where, hot)] * LAYERS
            assert in_sums(found(model, layers, True, "previous")) == expected(counted(model), layers, True)


@pytest.mark.slow("lowers two models per predictor; one is fast", but=("sign",))
@pytest.mark.parametrize("predictor", ["learned", "sign", "exact"])
def test_a_dense_model_has_no_launches_of_predictors(predictor: str) -> None:
    model, without = counted(Model("llama-relu", predictor)), counted(Model("llama-relu", "none"))
    firing = Firing(tuple(LayerFiring(np.ones(layer.neurons)) for layer in model.layers), "all")
    layers = dense(PlacementTask(model, firing, machine_of(TARGETS["4090"], 1, 1, 1.0), 0)).model.layers
    assert [layer.launches for layer in layers] == [layer.launches for layer in without.layers]
    assert [layer.hot_launches for layer in layers] == [layer.hot_launches for layer in without.layers]


def test_launches_of_a_gated_layer() -> None:
    """By hand: q, k and v; the projection with the addition and the norm; the other addition with the next norm."""
    model = counted(Model("llama-relu", "learned", "f16", 384, 1, "f32"))
    assert {layer.launches for layer in model.layers} == {LayerLaunches(3, 1, 2, 2)}
    # Mask and input; the addition receives the result.
    assert transfer_launches(model.layers[0], ALL_ON_ACCELERATOR) == (1, 1, 0)
    # The matrix, and two for the highest logits.
    assert model.head_launches == 3
    # For several sequences the projections are separate, and a launch makes halves for each of the four.
    model = counted(Model("llama-relu", "learned", "f16", 384, 3, "f32"))
    assert {layer.launches for layer in model.layers} == {LayerLaunches(10, 1, 2, 2)}
