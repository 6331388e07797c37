"""The gate: what predictors do to the model's perplexity, and to each layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from picompile.gate import LayerAccuracy, first_windows, measure_layers
from picompile.layerwise import layerwise_perplexity
from picompile.predictors import Predictors
from picompile.progress import Progress
from picompile_passes.materialize import WeightSource

# Of the held-out tokens, for finding out whom to blame.
_BLAME_TOKENS = 2048


@dataclass
class Gate:
    """Perplexity on `windows`, held-out token ids, of the canonical `graph_module` and of what predictors make of it.

    `known` are the perplexities measured so far, by a key of the choice.
    """

    graph_module: GraphModule
    weights: WeightSource
    windows: Sequence[Sequence[int]]
    thresholds: Mapping[int, float]
    progress: Progress
    known: dict[str, float] = field(default_factory=dict)

    def dense(self) -> float:
        """The perplexity of the model itself."""
        return self._measured("dense", self.graph_module, self.weights)

    def predicted(self, key: str, predictors: Predictors) -> float:
        """The perplexity with `predictors`."""
        graph_module = predictors.insert_pass()(self.graph_module).graph_module
        return self._measured(key, graph_module, predictors.weights(self.weights))

    def _measured(self, key: str, graph_module: GraphModule, weights: WeightSource) -> float:
        if key not in self.known:
            self.known[key] = layerwise_perplexity(graph_module, weights, self.windows, self.progress)
        return self.known[key]

    def layers(self, predictors: Predictors) -> list[LayerAccuracy]:
        """How well each layer's predictor does behind those of the layers before it."""
        graph_module = predictors.insert_pass()(self.graph_module).graph_module
        windows = first_windows(self.windows, _BLAME_TOKENS)
        weights = predictors.weights(self.weights)
        return measure_layers(graph_module, weights, windows, self.thresholds, self.progress)


def entry(layer: LayerAccuracy) -> dict[str, Any]:
    """A layer's figures for `predictors.json`."""
    return {name: value for name, value in vars(layer).items() if name not in ("kind", "rank")}
