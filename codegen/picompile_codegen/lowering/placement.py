"""Which nodes of a graph run on the host, and which on the accelerator."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from picompile_codegen.lowering.program import Device
from picompile_passes.graph.layers import operator_part
from picompile_passes.graph.nodes import arguments, is_call
from picompile_passes.graph.operands import ROTARY, SPARSE_FFN, state_of
from picompile_passes.predictors import predictor_kind

# Hot neurons are computed on the accelerator where there is one, cold ones on the host.
_PARTS: dict[str, Device] = {"hot": "accelerator", "cold": "host"}


@dataclass(frozen=True)
class Placement:
    """Parts that run on the accelerator beside hot neurons: of which layers, and the head.

    `attention`: norms, projections and additions. `caches`: the KV cache, the rotation before it and what reads it.
    `predictors`: those with weights of their own. The embedding part is on the host: a token needs one row.
    """

    attention: frozenset[int] = frozenset()
    caches: frozenset[int] = frozenset()
    predictors: frozenset[int] = frozenset()
    head: bool = False

    @staticmethod
    def all_of(layers: int) -> "Placement":
        """Return the placement of everything, for a model with `layers` layers."""
        every = frozenset(range(layers))
        return Placement(every, every, every, head=True)


ON_HOST = Placement()


def place(nodes: Sequence[Node], placement: Placement, *, streams: bool = False) -> dict[Node, Device]:
    """Return the device of each of `nodes`, which are in the order of the graph.

    With `streams` the accelerator computes all layers, if it computes anything at all: weights of the host come to it
    when they are needed, and caches are lent to it. For a whole chunk of a prompt that takes less time than the host
    does.
    """
    devices = {node: _device(node, placement) for node in nodes}
    if streams and "accelerator" in devices.values():
        devices |= {node: "accelerator" for node in nodes if "layer" in node.meta and _can_lend(node)}
    return devices


def _can_lend(node: Node) -> bool:
    """Return whether the state of `node`, if it keeps any, can be lent to the accelerator, as a KV cache is."""
    state = state_of(node)
    return state is None or state.kind == "positional"


def _device(node: Node, placement: Placement) -> Device:
    is_mask = operator_part(node) == "mask"
    if is_call(node, SPARSE_FFN) or (is_mask and _is_split(node)):
        return _PARTS[node.meta.get("neurons", "cold")]
    layer = node.meta.get("layer")
    if layer is None:
        on_device = placement.head and node.meta.get("part") == "head"
    elif is_mask:
        on_device = layer in placement.predictors
    elif is_call(node, ROTARY) or state_of(node):
        on_device = layer in placement.caches
    else:
        on_device = layer in placement.attention
    return "accelerator" if on_device else "host"


def _is_split(predict: Node) -> bool:
    """Return whether each part of a block predicts for itself."""
    return predictor_kind(arguments(predict)["kind"]).row_local
