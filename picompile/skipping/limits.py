"""Limits from sensitivities: one number, the price of a byte, sets the limits of all layers together.

Skipping values changes the predictions by about ½ Σ (v · s)² nats, where s is a value's sensitivity. It saves the bytes
of the rows that they would be multiplied with. For a given change, most bytes are saved by skipping each value whose
change for a byte is below one price λ: |v| · s ≤ √(2 λ · bytes). So a place's limit is τ · √bytes / s, and only τ is
to be found.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import GraphModule

from picompile.errors import UsageError
from picompile.predictors.store import OverlayWeights
from picompile.skipping.options import SITES
from picompile_passes.graph.materialize import WeightSource
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import FFN, NEURON_LIMITS, PREDICTORS, SPARSE_FFN, expert_count, is_limit
from picompile_passes.passes.insert_predictors import InsertPredictors

# Below this share of its parameter's median a sensitivity counts as that: text may not have shown what a neuron does.
_LEAST_SENSITIVITY = 1e-2


@dataclass(frozen=True)
class SkippingSites:
    """The layers that leave out neurons by their gate, and those that do by their output."""

    gate: tuple[int, ...] = ()
    output: tuple[int, ...] = ()

    @classmethod
    def of(cls, names: Iterable[str]) -> "SkippingSites":
        """Return the sites whose limits are the parameters `names`."""
        places = [name.removeprefix(PREDICTORS).removesuffix("_limits").split(".") for name in names]
        gate, output = (tuple(int(layer) for layer, site in places if site == wanted) for wanted in SITES)
        return cls(gate, output)

    def insertion(self, insert: InsertPredictors) -> InsertPredictors:
        """Return the pass that inserts predictors, as `insert` does, and limits, into a canonical graph."""
        return replace(insert, gate_limits=self.gate, output_limits=self.output)


def skipping_sites(graph_module: GraphModule, asked: Sequence[str]) -> SkippingSites:
    """Return where a canonical graph can have limits.

    Args:
        graph_module: the graph.
        asked: the places, of `SITES`; empty for all.

    Raises:
        UsageError: the graph has none of them.
    """
    asked = asked or SITES
    # A norm across the neurons makes what each of them adds depend on all others. Experts have no limits.
    blocks = [
        node
        for node in calls(graph_module.graph, FFN)
        if arguments(node)["norm_eps"] is None and not expert_count(node)
    ]
    layers = [int(node.meta["layer"]) for node in blocks]
    gated = [layer for layer, node in zip(layers, blocks, strict=True) if arguments(node)["gate"] is not None]
    found = SkippingSites(
        gate=tuple(gated) if "gate" in asked else (),
        output=tuple(layers) if "output" in asked else (),
    )
    if found == SkippingSites():
        raise UsageError(f"nothing of this model can be skipped at {', '.join(asked)}; leave out --skip")
    return found


@dataclass(frozen=True)
class Limits:
    """The limits of a model: float32 [values] by the name of their parameter in a graph."""

    tensors: Mapping[str, Tensor]

    @property
    def sites(self) -> SkippingSites:
        """The places that they are for."""
        return SkippingSites.of(self.tensors)

    def weights(self, base: WeightSource) -> OverlayWeights:
        """Return a source of the model's weights, `base`, and the limits."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        return OverlayWeights(base, shapes, self.tensors.__getitem__)


def no_limits(graph_module: GraphModule) -> Limits:
    """Return limits of 0 for all that a graph has limits for."""
    parameters = [node for node in graph_module.graph.nodes if node.op == "get_attr" and is_limit(str(node.target))]
    return Limits({str(node.target): torch.zeros(node.meta["val"].shape) for node in parameters})


def limits_at(sensitivities: Mapping[str, Tensor], saved: Mapping[str, int], price: float) -> Limits:
    """Return the limits of a price: τ · √saved / sensitivity for each value.

    Args:
        sensitivities: in nats for a unit, float32 [values], by the limits' parameter.
        saved: how many weights are not read for a value that is left out, by the same.
        price: τ, in nats for the root of a weight; 0 leaves out only zeros.
    """
    return Limits({name: _limits(values, price * saved[name] ** 0.5) for name, values in sensitivities.items()})


def _limits(sensitivity: Tensor, change: float) -> Tensor:
    least = float(sensitivity.median()) * _LEAST_SENSITIVITY
    return change / sensitivity.clamp_min(max(least, 1e-30))


def saved_weights(graph_module: GraphModule) -> dict[str, int]:
    """Return how many weights of a predicted graph a left-out value saves, by its limits' parameter."""
    found: dict[str, int] = {}
    for node in calls(graph_module.graph, SPARSE_FFN):
        values = arguments(node)
        for name, rows in zip(NEURON_LIMITS, (2, 1), strict=True):
            if values[name] is not None:
                found[str(values[name].target)] = rows * int(values["down"].meta["val"].shape[1])
    return found
