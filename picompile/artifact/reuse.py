"""Tensors that a new weights' file can copy from an earlier one, since they are made of the same in the same way.

A compilation that does not meet its accuracy bound tries again with larger predictors. The other tensors stay what they
are, and need not be read from the checkpoint and packed again, which takes most of the time for a large model.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from picompile.output.files import read_safetensors_header
from picompile_codegen.lowering.packing import PackedTensor
from picompile_passes.graph.nodes import attribute, has_real_data
from picompile_passes.graph.operands import PREDICTORS

Tensors = tuple[GraphModule, Sequence[PackedTensor]]


@dataclass(frozen=True)
class FileRange:
    """The bytes of a tensor in a file: `size_bytes` from `start` on in `path`."""

    path: Path
    start: int
    size_bytes: int


def unchanged_tensors(path: Path, old: Tensors, new: Tensors) -> dict[str, FileRange]:
    """Return where the tensors of `new` lie in the weights' file `path`, by name, as far as it has them.

    Args:
        path: a weights' file that was written from `old`.
        old: the graph that the file was written from, and its packed tensors.
        new: the graph that is written now, and its packed tensors.
    """
    known = _content_keys(*old)
    ranges = _ranges(path)
    return {
        name: ranges[name] for name, key in _content_keys(*new).items() if known.get(name) == key and name in ranges
    }


def _content_keys(graph_module: GraphModule, tensors: Sequence[PackedTensor]) -> dict[str, str]:
    """Return for each tensor a hash of what its bytes are made of.

    Tensors of which that is not known have none, nor have those that depend on a predictor's weights: a larger
    predictor has its parameters under the same names.
    """
    keys: dict[Node, str | None] = {}
    found = {}
    for tensor in tensors:
        parts = [_node_key(graph_module, node, keys) for node in tensor.nodes]
        if parts and None not in parts:
            found[tensor.name] = _digest(repr((tensor.dtype, tensor.shape, parts)).encode())
    return found


def _node_key(graph_module: GraphModule, node: Node, keys: dict[Node, str | None]) -> str | None:
    """Return a hash of the constant subgraph that ends in `node`; None if it depends on a predictor's weights."""
    if node not in keys:
        if node.op == "get_attr":
            keys[node] = _attribute_key(str(node.target), attribute(graph_module, str(node.target)))
        else:
            inputs = {each: _node_key(graph_module, each, keys) for each in node.all_input_nodes}
            shown = repr((str(node.target), map_arg((node.args, dict(node.kwargs)), lambda each: f"<{inputs[each]}>")))
            keys[node] = None if None in inputs.values() else _digest(shown.encode())
    return keys[node]


def _attribute_key(name: str, value: Tensor) -> str | None:
    if has_real_data(value):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        return _digest(repr((value.dtype, tuple(value.shape))).encode(), data)
    return None if name.startswith(PREDICTORS) else f"weight {name}"


def _digest(*parts: bytes | memoryview) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _ranges(path: Path) -> Mapping[str, FileRange]:
    """Return where each tensor of a safetensors file lies."""
    data_start, header = read_safetensors_header(path)
    ends = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: FileRange(path, data_start + start, end - start) for name, (start, end) in ends.items()}
