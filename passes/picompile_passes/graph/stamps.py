"""The record of a graph that has one layer of each kind, until the pass `stamp-layers` repeats them."""

from dataclasses import dataclass

from torch.fx import GraphModule

from picompile_passes.errors import UnsupportedGraphError

_META_KEY = "stamps"


@dataclass(frozen=True)
class Stamps:
    """The layers that a graph lacks, and the captured layers that they equal.

    Attributes:
        prefix: the beginning of all layers' parameter names, up to the layer's number.
        sources: for each layer of the model, the captured one that it equals.
        captured: how many layers the graph has; they are the first ones.
    """

    prefix: str
    sources: tuple[int, ...]
    captured: int


def set_stamps(graph_module: GraphModule, stamps: Stamps | None) -> None:
    """Record that the graph has only the first layers of a model, as `stamps` says; or all of them, with None."""
    graph_module.meta.pop(_META_KEY, None)
    if stamps is not None:
        graph_module.meta[_META_KEY] = stamps


def stamps_of(graph_module: GraphModule) -> Stamps | None:
    """Return the record of the layers that a graph lacks; None if it has all layers."""
    stamps: Stamps | None = graph_module.meta.get(_META_KEY)
    return stamps


def require_all_layers(graph_module: GraphModule) -> None:
    """Raise `UnsupportedGraphError` for a graph that computes another model, since it lacks layers."""
    stamps = stamps_of(graph_module)
    if stamps is not None:
        raise UnsupportedGraphError(
            f"the graph has {stamps.captured} of the model's {len(stamps.sources)} layers; run the pass stamp-layers "
            "first, as canonicalize does"
        )
