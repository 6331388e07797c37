"""A captured model together with its canonical graph and the eager model that both must equal."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from picompile.frontend.captured import Captured
from picompile_passes.base import Stage
from picompile_passes.graph.materialize import materialize
from picompile_passes.passes.canonicalize import CANONICALIZE
from picompile_passes.verify import verify


@dataclass(frozen=True)
class Model:
    """One model at three levels."""

    eager: nn.Module
    captured: Captured
    canonical: GraphModule

    def logits(self, ids: Tensor) -> list[Tensor]:
        """Logits [tokens, vocabulary] of the captured and of the canonical graph."""
        graphs = [materialize(g, self.captured.weights) for g in (self.captured.graph_module, self.canonical)]
        with torch.no_grad():
            return [graph(ids, torch.arange(len(ids))) for graph in graphs]


def canonicalize(graph_module: GraphModule) -> GraphModule:
    """The canonical graph of a captured one; both stages are verified."""
    verify(graph_module, Stage.CAPTURED)
    for pass_ in CANONICALIZE:
        graph_module = pass_(graph_module).graph_module
    verify(graph_module, Stage.CANONICAL)
    return graph_module
