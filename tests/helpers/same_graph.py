"""Whether two graphs compute the same from the same parameters, whatever their nodes are called."""

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from picompile_passes.graph.layers import token_calls
from picompile_passes.graph.nodes import attribute, has_real_data


def description(graph_module: GraphModule) -> list[tuple[Any, ...]]:
    """Return what each call that depends on the tokens computes, and its marks, in order."""
    places = {node: f"%{place}" for place, node in enumerate(token_calls(graph_module.graph))}

    def text(value: Node) -> Any:
        if value in places or value.op == "placeholder":
            return places.get(value, value.name)
        if value.op == "get_attr":
            tensor = attribute(graph_module, str(value.target))
            return _values(tensor) if has_real_data(tensor) else f"{value.target} {tuple(tensor.shape)}"
        return f"{value.target}{map_arg((value.args, value.kwargs), text)}"

    found = [
        (str(node.target), str(map_arg((node.args, node.kwargs), text)), node.meta["part"], node.meta.get("layer"))
        for node in places
    ]
    (result,) = graph_module.graph.output_node().all_input_nodes
    return [*found, ("output", places[result])]


def _values(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tensor.tolist()}"
