"""The accuracy check: how much predictors raise the model's perplexity, and how well each layer's predictor does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from picompile.predictors import Predictors
from picompile.predictors.accuracy import LayerAccuracy, first_windows, measure_layers
from picompile.progress import Progress
from picompile.streaming import streamed_perplexity
from picompile_passes.graph.materialize import WeightSource

# Held-out tokens that layers are ranked by error on.
_RANKING_TOKENS = 2048


@dataclass
class AccuracyCheck:
    """Measures perplexity with and without predictors: of the canonical `graph_module`, on held-out `windows`.

    `thresholds` are the layers' firing thresholds. `known` holds the perplexities measured so far, by `choice_key`.
    """

    graph_module: GraphModule
    weights: WeightSource
    windows: Sequence[Sequence[int]]
    thresholds: Mapping[int, float]
    progress: Progress
    known: dict[str, float] = field(default_factory=dict)

    def dense(self) -> float:
        """Return the perplexity of the model without predictors."""
        return self._measured("dense", self.graph_module, self.weights)

    def predicted(self, key: str, predictors: Predictors) -> float:
        """Return the perplexity with `predictors`, whose choice has the key `key`."""
        graph_module = predictors.insert_pass()(self.graph_module).graph_module
        return self._measured(key, graph_module, predictors.weights(self.weights))

    def _measured(self, key: str, graph_module: GraphModule, weights: WeightSource) -> float:
        if key not in self.known:
            self.known[key] = streamed_perplexity(graph_module, weights, self.windows, self.progress)
        return self.known[key]

    def layers(self, predictors: Predictors) -> list[LayerAccuracy]:
        """Measure each layer's predictor, with predictors in the layers before it too."""
        graph_module = predictors.insert_pass()(self.graph_module).graph_module
        windows = first_windows(self.windows, _RANKING_TOKENS)
        weights = predictors.weights(self.weights)
        return measure_layers(graph_module, weights, windows, self.thresholds, self.progress)


def layer_figures(layer: LayerAccuracy) -> dict[str, Any]:
    """Return a layer's figures as `predictors.json` has them."""
    return {name: value for name, value in vars(layer).items() if name not in ("kind", "rank")}
