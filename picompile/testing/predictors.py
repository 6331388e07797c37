"""Predictors for tests: they miss neurons that fire and name others that do not, so that masks matter.

| kind | tells by | row-local |
| --- | --- | --- |
| `testing-linear` | x · wᵀ > threshold, w [F, D] | yes |
| `testing-low-rank` | x · aᵀ · bᵀ > threshold, a [R, D], b [F, R] | no |

Importing this module makes them known. They are plug-in kinds, which have weights of their own.
"""

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from picompile_passes.base import copy_graph_module, without_unused
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import FFN, PREDICT, PREDICTORS, SPARSE_FFN, stream_of
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.predictors import PredictorKind, add_predictor_kind, predictor_kind


def _linear(x: Tensor, weights: list[Tensor], threshold: float) -> Tensor:
    (w,) = weights
    return x @ w.T > threshold


def _low_rank(x: Tensor, weights: list[Tensor], threshold: float) -> Tensor:
    a, b = weights
    return x @ a.T @ b.T > threshold


LINEAR_KIND = PredictorKind(
    "testing-linear", _linear, lambda weights: int(weights[0].shape[0]), row_local=True, parameters={"w": "FD"}
)
LOW_RANK_KIND = PredictorKind(
    "testing-low-rank",
    _low_rank,
    lambda weights: int(weights[1].shape[0]),
    row_local=False,
    parameters={"a": "RD", "b": "FR"},
)
TESTING_KINDS = (LINEAR_KIND.name, LOW_RANK_KIND.name)

for _kind in (LINEAR_KIND, LOW_RANK_KIND):
    add_predictor_kind(_kind)

SKIPPING_KINDS = ("learned", "learned-relu", "sign", *TESTING_KINDS)
"""The kinds that skip neurons which fire."""

# With the first about half of the neurons fire, then most, then few, and in the end all. Not 0, which a row of zeros is
# always next to.
_LOGITS = (0.1, -0.5, 1.0, -1e9)
_SHARES = (0.5, 0.4, 0.6, -1.0)


def with_predictors(graph_module: GraphModule, kind: str, threshold: float, rank: int = 2) -> GraphModule:
    """A copy of a graph of stage predicted, with a predictor of `kind`, one of `TESTING_KINDS`, in every block.

    Their weights are new parameters on the meta device. `rank` is R.
    """
    result = copy_graph_module(graph_module)
    rewriter = Rewriter(result, "testing")
    for mask in calls(result.graph, PREDICT):
        neurons, hidden = (int(value.meta["val"].shape[1]) for value in (mask, arguments(mask)["x"]))
        sizes = {"F": neurons, "D": hidden, "R": rank}
        shapes = {name: [sizes[i] for i in text] for name, text in (predictor_kind(kind).parameters or {}).items()}
        prefix = f"{PREDICTORS}{mask.meta['layer']}."
        weights = [rewriter.parameter(prefix + name, shape, sources=(mask,)) for name, shape in shapes.items()]
        for name, value in (("kind", kind), ("threshold", threshold), ("weights", weights)):
            mask.update_arg(list(arguments(mask)).index(name), value)
        # All at once: in between, the call would be one that its kind does not accept.
        rewriter.set_argument(mask, "weights", weights)
    return without_unused(result)


@st.composite
def skipping_predictors(draw: st.DrawFn, graph_module: GraphModule) -> InsertPredictors:
    """Passes that put predictors of `SKIPPING_KINDS` into a canonical graph: one kind mostly, any in some layers."""
    inputs = {block.meta["layer"]: arguments(block)["x"] for block in calls(graph_module.graph, FFN)}
    kind = draw(st.sampled_from(SKIPPING_KINDS))
    others = st.sampled_from([None, None, *SKIPPING_KINDS, "none"])
    kinds = {layer: other for layer in inputs if (other := draw(others)) is not None}
    ranks, sources, thresholds = {}, {}, {}
    for layer, x in inputs.items():
        chosen = predictor_kind(kinds.get(layer, kind))
        if chosen.has_rank:
            ranks[layer] = draw(st.integers(1, 4))
        if chosen.parameters is not None:
            known = ["block", *(["stream"] if stream_of(x) else []), *(["previous"] if layer - 1 in inputs else [])]
            sources[layer] = draw(st.sampled_from(known))
        if chosen.name != "none":
            thresholds[layer] = draw(st.sampled_from(_SHARES if chosen.name == "sign" else _LOGITS))
    return InsertPredictors(kind, kinds, ranks, sources, thresholds)


def every_neuron(graph_module: GraphModule) -> GraphModule:
    """A copy of a graph in which every neuron is computed, whatever its predictors say."""
    result = copy_graph_module(graph_module)
    rewriter = Rewriter(result, "testing")
    for block in calls(result.graph, SPARSE_FFN):
        mask = arguments(block)["mask"]
        x, layer = arguments(block)["x"], block.meta.get("layer")
        rows = rewriter.constant("rows", torch.zeros(int(mask.meta["val"].shape[1]), 1))
        everything = rewriter.call(PREDICT, (x, [rows], "none", 0.0), before=block, sources=(mask,), layer=layer)
        rewriter.set_argument(block, "mask", everything)
    return without_unused(result)
