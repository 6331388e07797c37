"""What a graph is made of, as a value that can be kept and compared."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from picompile_passes.propagate import value_text


def structure(graph_module: GraphModule) -> Sequence[tuple[Any, ...]]:
    """All that makes up a graph: nodes in order, with targets, arguments and metadata, and the module's tensors.

    Taken before and after something, it tells whether the graph was changed, its metadata and the contents of its
    tensors included. A copy that shares its tensors has the same structure; the stage is no part of it.
    """
    tensors: list[tuple[str, Tensor]] = [*graph_module.named_parameters(remove_duplicate=False)]
    tensors += graph_module.named_buffers(remove_duplicate=False)
    # Torch counts up a tensor's version when it is written to.
    versions = sorted((name, id(tensor), tensor._version) for name, tensor in tensors)
    return [*map(_node, graph_module.graph.nodes), *versions]


def _node(node: Node) -> tuple[Any, ...]:
    meta = {key: value_text(value) if key == "val" else repr(value) for key, value in node.meta.items()}
    return node.name, node.op, node.target, str(node.args), str(node.kwargs), meta
