"""Which nodes of a graph run on the host, and which on the accelerator."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from picompile_codegen.lowering.program import Device
from picompile_passes.graph.nodes import arguments, is_call
from picompile_passes.graph.operands import (
    ADD,
    ATTENTION,
    DIVIDE_BY_RMS,
    ELEMENTWISE,
    EMBEDDING,
    LAYER_NORM,
    LINEAR,
    PREDICT,
    RMS_NORM,
    ROTARY,
    SPARSE_FFN,
    state_of,
)
from picompile_passes.predictors import predictor_kind

# The device of each part of a block, by the name that `Partition` gives it.
_PARTS: dict[str, Device] = {"hot": "device", "cold": "host"}


@dataclass(frozen=True)
class Placement:
    """Parts that run on the accelerator beside hot neurons: of which layers, and the head.

    `attention`: norms, projections and additions. `caches`: the KV cache, the rotation before it and what reads it.
    `predictors`: those with weights of their own. Embeddings are on the host: a token needs one row.
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

    With `streams` the device computes all layers, if it computes anything at all: weights of the host come to it when
    they are needed, and caches are lent to it. For a whole chunk of a prompt that takes less time than the host does.
    """
    layers = _layers(nodes)
    last = max((layer for node, layer in layers.items() if is_call(node, ATTENTION)), default=-1)
    devices = {node: _device(node, layers[node], last, placement) for node in nodes}
    if streams and "device" in devices.values():
        come = [
            node for node in nodes if 0 <= layers[node] <= last and not is_call(node, EMBEDDING) and _can_lend(node)
        ]
        devices.update(dict.fromkeys(come, "device"))
    return devices


def _can_lend(node: Node) -> bool:
    """Return whether the state of `node`, if it keeps any, can be lent to the device, as a KV cache is."""
    state = state_of(node)
    return state is None or state.kind == "positional"


def _device(node: Node, layer: int, last: int, placement: Placement) -> Device:
    if is_call(node, SPARSE_FFN) or (is_call(node, PREDICT) and _is_split(node)):
        return _PARTS[node.meta.get("device", "cold")]
    if is_call(node, EMBEDDING) or layer < 0:
        return "host"
    if is_call(node, PREDICT):
        on_device = layer in placement.predictors
    elif is_call(node, ROTARY) or state_of(node):
        on_device = layer in placement.caches
    elif layer > last:
        on_device = placement.head
    else:
        on_device = layer in placement.attention
    return "device" if on_device else "host"


def _is_split(predict: Node) -> bool:
    """Return whether each part of a block predicts for itself."""
    return predictor_kind(arguments(predict)["kind"]).row_local


def _layers(nodes: Sequence[Node]) -> dict[Node, int]:
    """Return the layer that each node belongs to: -1 for embeddings and their sum, one more than the last for the head.

    A norm or a projection behind an attention and before the next feed-forward block is of that attention's layer;
    behind both, of the next. An addition is of the layer whose result it adds, and so is the norm of a block's neurons;
    other arithmetic is of its latest input's. The last projection is the head's, with what follows it and the norm
    before it, whatever became of the last block.
    """
    seen: dict[Node, tuple[int, int]] = {}  # the last attention and the last block that a node depends on
    layers: dict[Node, int] = {}
    for node in nodes:
        sources = [seen[source] for source in node.all_input_nodes if source in seen]
        attention = max((each[0] for each in sources), default=-1)
        block = max((each[1] for each in sources), default=-1)
        if is_call(node, ATTENTION):
            layers[node] = int(arguments(node)["layer"])
        elif is_call(node, SPARSE_FFN, PREDICT):
            layers[node] = int(node.meta["layer"])
        elif is_call(node, ADD, DIVIDE_BY_RMS):
            layers[node] = max(attention, block)
        elif is_call(node, ELEMENTWISE):
            layers[node] = max(layers[source] for source in node.all_input_nodes if source in layers)
        else:
            layers[node] = attention if attention > block else block + 1
        if is_call(node, ATTENTION):
            attention = layers[node]
        elif is_call(node, SPARSE_FFN):
            block = layers[node]
        seen[node] = (attention, block)
    last = max((layers[node] for node in nodes if is_call(node, ATTENTION)), default=-1)
    return layers | dict.fromkeys((node for node in _head(nodes) if layers[node] <= last), last + 1)


def _head(nodes: Sequence[Node]) -> list[Node]:
    """Return the projection to the vocabulary, what makes logits of its result, and the norm before it."""
    found = [node for node in nodes if any(user.op == "output" for user in node.users)]
    while found and is_call(found[-1], ELEMENTWISE):
        found.append(next(source for source in found[-1].all_input_nodes if source in nodes))
    if not found or not is_call(found[-1], LINEAR):
        return []
    x = arguments(found[-1])["x"]
    return [*found, x] if is_call(x, RMS_NORM, LAYER_NORM) else found
