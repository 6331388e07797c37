"""From captured to canonical: the passes that raise a graph to the dialect, in order."""

from weakref import WeakKeyDictionary

from torch.fx import GraphModule

from picompile_passes.base import Pass
from picompile_passes.passes.canonicalize.flatten_tokens import FlattenTokens
from picompile_passes.passes.canonicalize.norm_before_turn import NormBeforeTurn
from picompile_passes.passes.canonicalize.raise_attention import RaiseAttention
from picompile_passes.passes.canonicalize.raise_elementwise import RaiseElementwise
from picompile_passes.passes.canonicalize.raise_ffn import RaiseFFN
from picompile_passes.passes.canonicalize.raise_linear import RaiseLinear
from picompile_passes.passes.canonicalize.raise_norms import RaiseNorms
from picompile_passes.passes.canonicalize.raise_rotary import RaiseRotary
from picompile_passes.passes.canonicalize.raise_route import RaiseRoute
from picompile_passes.passes.canonicalize.raise_scores import RaiseScores
from picompile_passes.passes.canonicalize.remove_copies import RemoveCopies
from picompile_passes.passes.canonicalize.stamp_layers import StampLayers
from picompile_passes.pipeline import Pipeline

CANONICALIZE: tuple[Pass, ...] = (
    RemoveCopies(),
    RaiseLinear(),
    RaiseRoute(),
    RaiseNorms(),
    RaiseScores(),
    RaiseAttention(),
    NormBeforeTurn(),
    RaiseRotary(),
    RaiseFFN(),
    RaiseElementwise(),
    FlattenTokens(),
    StampLayers(),
)


def canonicalize(graph_module: GraphModule) -> GraphModule:
    """Return the canonical graph of a captured one: `CANONICALIZE` run on it, without checks between the passes."""
    return Pipeline(CANONICALIZE)(graph_module).graph_module


_known: WeakKeyDictionary[GraphModule, GraphModule] = WeakKeyDictionary()
_raised: WeakKeyDictionary[GraphModule, GraphModule] = WeakKeyDictionary()


def canonical_form(graph_module: GraphModule) -> GraphModule:
    """Return what `canonicalize` does, the same module every time as long as `graph_module` lives: it takes a second.

    Neither module may be changed. A pass may be run on them, since it changes a copy.
    """
    if graph_module not in _known:
        _known[graph_module] = StampLayers()(raised_form(graph_module)).graph_module
    return _known[graph_module]


def raised_form(graph_module: GraphModule) -> GraphModule:
    """Return the canonical graph of the layers that were captured, as `canonical_form` does that of all layers."""
    if graph_module not in _raised:
        _raised[graph_module] = Pipeline(CANONICALIZE[:-1])(graph_module).graph_module
    return _raised[graph_module]
