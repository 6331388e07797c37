"""Predictor kinds for tests: they miss neurons that fire and name others that do not, so that masks matter.

| kind | tells by | row-local |
| --- | --- | --- |
| `testing-linear` | x · wᵀ > threshold, w [F, D] | yes |
| `testing-low-rank` | x · aᵀ · bᵀ > threshold, a [R, D], b [F, R] | no |

Importing this module makes them known.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from picompile_passes.infra import copy_graph_module
from picompile_passes.nodes import arguments, calls
from picompile_passes.operands import PREDICT
from picompile_passes.predictors import PredictorKind, add_predictor_kind
from picompile_passes.propagate import fake_like
from picompile_passes.rewriter import Rewriter


def _linear(x: Tensor, weights: list[Tensor], threshold: float) -> Tensor:
    (w,) = weights
    return x @ w.T > threshold


def _low_rank(x: Tensor, weights: list[Tensor], threshold: float) -> Tensor:
    a, b = weights
    return x @ a.T @ b.T > threshold


LINEAR_KIND = PredictorKind("testing-linear", _linear, lambda weights: int(weights[0].shape[0]), row_local=True)
LOW_RANK_KIND = PredictorKind("testing-low-rank", _low_rank, lambda weights: int(weights[1].shape[0]), row_local=False)
TESTING_KINDS = (LINEAR_KIND.name, LOW_RANK_KIND.name)

for _kind in (LINEAR_KIND, LOW_RANK_KIND):
    add_predictor_kind(_kind)


def with_predictors(graph_module: GraphModule, kind: str, threshold: float, rank: int = 2) -> GraphModule:
    """A copy of a graph of stage predicted, with a predictor of `kind`, one of `TESTING_KINDS`, in every block.

    Their weights are new parameters on the meta device. `rank` is R.
    """
    result = copy_graph_module(graph_module)
    rewriter = Rewriter(result, "testing")
    for number, mask in enumerate(calls(result.graph, PREDICT)):
        neurons, hidden = (int(value.meta["val"].shape[1]) for value in (mask, arguments(mask)["x"]))
        shapes = [(neurons, hidden)] if kind == LINEAR_KIND.name else [(rank, hidden), (neurons, rank)]
        weights = [_parameter(result, f"predictors_{number}_{i}_weight", shape) for i, shape in enumerate(shapes)]
        for name, value in (("kind", kind), ("threshold", threshold), ("weights", weights)):
            mask.update_arg(list(arguments(mask)).index(name), value)
        # All at once: in between, the call would be one that its kind does not accept.
        rewriter.set_argument(mask, "weights", weights)
    return result


def _parameter(graph_module: GraphModule, name: str, shape: Sequence[int]) -> Node:
    tensor = nn.Parameter(torch.empty(tuple(shape), device="meta"), requires_grad=False)
    graph_module.register_parameter(name, tensor)
    first = next(iter(graph_module.graph.nodes))
    with graph_module.graph.inserting_before(first):
        node = graph_module.graph.get_attr(name)
    node.meta["val"] = fake_like(graph_module.graph, tensor)
    return node
