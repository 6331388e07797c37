"""The neurons of feed-forward blocks by their weights."""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from picompile_passes.materialize import WeightSource, evaluate_constant
from picompile_passes.nodes import arguments, calls
from picompile_passes.operands import FFN, NEURON_ROWS, SPARSE_FFN


def neuron_rows(graph_module: GraphModule, weights: WeightSource) -> dict[int, Tensor]:
    """For each layer, all that belongs to a neuron in one row: [neurons, gate + up + down + biases], float32.

    The rows are sorted, and those of a layer's parts are together, so that the order of neurons makes no difference:
    two graphs have the same neurons where these are equal.
    """
    parts: dict[int, list[Tensor]] = {}
    for block in calls(graph_module.graph, FFN, SPARSE_FFN):
        parts.setdefault(block.meta["layer"], []).append(_rows(graph_module, block, weights))
    return {layer: _sorted(torch.cat(rows)) for layer, rows in parts.items()}


def _rows(graph_module: GraphModule, block: Node, weights: WeightSource) -> Tensor:
    values = arguments(block)
    constants = [evaluate_constant(graph_module, values[n], weights) for n in NEURON_ROWS if values[n] is not None]
    return torch.cat([constant if constant.dim() == 2 else constant.unsqueeze(1) for constant in constants], dim=1)


def _sorted(rows: Tensor) -> Tensor:
    keys = rows.tolist()
    return rows[sorted(range(len(keys)), key=keys.__getitem__)]
