"""Splits the variants of a packed model over GPU and host, and counts the bytes of their parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from picompile.placement.machine import MachineOptions, find_machine
from picompile.placement.model_options import ModelOptions
from picompile.placement.planning import PlanOptions, make_plan
from picompile.placement.sources import find_model
from picompile.progress import NoProgress
from picompile.synth.shapes import ModelShape
from picompile_codegen.lowering.placement import Placement
from picompile_passes.formats import FORMATS, predictor_format

# Neurons of a layer that the GPU gets are a multiple of this, as in a plan.
_GROUP = 64
# Of the budget, for what is no weight and no cache: workspace, graphs and the kernels themselves.
_SPARED_SHARE = 0.05


class Options(Protocol):
    """The options of a pack that decide how a model is split."""

    @property
    def quant(self) -> str: ...
    @property
    def budget(self) -> float: ...
    @property
    def rank(self) -> int: ...
    @property
    def context(self) -> int: ...


@dataclass(frozen=True)
class Planned:
    """For which machine a variant is planned: a row of the targets, and the curve by which neurons fire."""

    target: str
    firing: str


@dataclass(frozen=True)
class Sizes:
    """Bytes of the parts of a model: of a layer its attention, its cache, its predictor and a neuron; of the head."""

    attention: int
    cache: int
    predictor: int
    neuron: int
    head: int
    neurons: int
    layers: int

    @property
    def dense(self) -> int:
        """All matrices of the model, the embedding included; no predictor."""
        return self.layers * self.layer + 2 * self.head

    @property
    def layer(self) -> int:
        """The matrices of a layer."""
        return self.attention + self.neurons * self.neuron


@dataclass(frozen=True)
class Split:
    """A variant's part on the GPU: so many neurons of each layer, and all else by `placement`.

    `budget` is the share of the dense model's bytes that it may take there. `plan` has what the planner expects.
    """

    hot: Mapping[int, int]
    placement: Placement
    budget: float
    plan: Mapping[str, Any] | None = None

    @property
    def hot_mean(self) -> int:
        """Hot neurons of a layer, the mean of all."""
        return round(sum(self.hot.values()) / len(self.hot)) if self.hot else 0


def sizes_of(shape: ModelShape, options: Options) -> Sizes:
    """Count the bytes of a model's parts."""
    form = FORMATS[options.quant]
    heads, row = (shape.heads + shape.kv_heads) * shape.head_dim, form.row_bytes(shape.hidden)
    projections = (heads + shape.kv_heads * shape.head_dim) * row
    output = shape.hidden * form.row_bytes(shape.heads * shape.head_dim)
    cache = 2 * shape.kv_heads * options.context * shape.head_dim * 2
    # As the pass `quantize` packs them.
    of_predictor = FORMATS[predictor_format(options.quant)]
    first = options.rank * of_predictor.row_bytes(shape.hidden)
    predictor = first + shape.ffn * (of_predictor.row_bytes(options.rank) + 4)
    return Sizes(projections + output, cache, predictor, 3 * row, shape.vocab * row, shape.ffn, shape.layers)


def split_by_budget(sizes: Sizes, budget: float, kind: str) -> Split:
    """Split within a share of the dense model's bytes; `kind` is the name of a variant without its target.

    Attention is first, since it is always used; then come neurons, the same number in every layer.
    """
    every = range(sizes.layers)
    if kind == "gpu":
        return Split(dict.fromkeys(every, sizes.neurons), Placement.all_of(sizes.layers), budget)
    budget_bytes = int((1 - _SPARED_SHARE) * budget * sizes.dense)
    if kind != "hybrid":
        count = min(max(budget_bytes - sizes.head, 0) // (sizes.layer + sizes.cache), sizes.layers)
        resident = frozenset(range(count))
        hot = {index: sizes.neurons if index < count else 0 for index in every}
        return Split(hot, Placement(resident, resident, resident, head=True), budget)
    per_layer = sizes.attention + sizes.cache + sizes.predictor
    with_attention = min(max(budget_bytes - sizes.head, 0) // per_layer, sizes.layers)
    left = budget_bytes - sizes.head - with_attention * per_layer
    hot_neurons = max(left, 0) // (sizes.layers * sizes.neuron) // _GROUP * _GROUP
    resident = frozenset(range(with_attention))
    hot = dict.fromkeys(every, min(hot_neurons, sizes.neurons) if with_attention == sizes.layers else 0)
    return Split(hot, Placement(resident, resident, resident, head=True), budget)


def split_by_plan(shape: ModelShape, sizes: Sizes, options: Options, planned: Planned, kind: str) -> Split:
    """Split as `picompile plan` does for a machine; other variants than `hybrid` get the same bytes of the GPU."""
    machine = find_machine(MachineOptions(planned.target)).machine
    budget = machine.gpu_bytes / sizes.dense
    if kind != "hybrid":
        return split_by_budget(sizes, budget, kind)
    model = ModelOptions(
        source=None, shape=shape.name, firing=planned.firing, profile=None, predictors=None, work=None,
        quant=options.quant, predictor="learned", context=options.context, sequences=1, kv_dtype="f16", on_gpu=True,
    )  # fmt: skip
    found = find_model(model, NoProgress())
    plan = make_plan(found.model, found.firing, PlanOptions(planned.target, machine))
    layers = plan.layers
    placement = Placement(
        attention=frozenset(each.layer for each in layers if each.attention == "gpu"),
        caches=frozenset(each.layer for each in layers if each.kv_cache == "gpu"),
        predictors=frozenset(each.layer for each in layers if each.predictor == "gpu"),
        head=plan.head == "gpu",
    )
    hot = {each.layer: each.hot_neurons for each in layers}
    expected = {
        "target": planned.target,
        "firing": planned.firing,
        "tokens_per_s": 1 / plan.token_s,
        "computed": sum(each.computed for each in layers) / sum(each.neurons for each in layers),
        "hot_neurons": sum(hot.values()),
    }
    return Split(hot, placement, budget, expected)
