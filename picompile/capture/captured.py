"""What capture gives back."""

from dataclasses import dataclass

from torch.fx import GraphModule

from picompile.capture.facts import ModelFacts
from picompile_passes.materialize import WeightSource


@dataclass(frozen=True)
class Captured:
    """A model: its graph at stage captured, where its weights are, and what it is.

    The graph is forward(tokens int64 [T], positions int64 [T]) → logits float32 [T, V]. Its parameters are on the meta
    device, under the names that `weights` knows. `warning` is a line for the user: what of a config.json has no effect.
    """

    graph_module: GraphModule
    weights: WeightSource
    facts: ModelFacts
    warning: str | None = None
