"""Real weights in a graph: in all of it for eager runs, or in one constant at a time for the artifact."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from picompile_passes.base import copy_graph_module
from picompile_passes.errors import PassesError
from picompile_passes.graph.nodes import attribute, has_real_data, is_call
from picompile_passes.graph.operands import INDEX_SELECT, QUANTIZE, RESHAPE, TRANSPOSE
from picompile_passes.graph.packed_rows import PackedRows, packed_rows
from picompile_passes.graph.stamps import require_all_layers
from picompile_passes.graph.weight_source import WeightSource, load_parameter

__all__ = ["WeightSource", "evaluate_constant", "materialize", "node_values"]

_aten = torch.ops.aten
# These take the checkpoint's own dtype, so that no float32 copy of a whole matrix is made: operators that only move
# elements, and quantization, which converts a block of rows at a time.
_IN_OWN_DTYPE = (
    *(TRANSPOSE, INDEX_SELECT, QUANTIZE),
    *(RESHAPE, _aten.flatten.using_ints, _aten.unflatten.int, _aten.permute.default),
)


def materialize(graph_module: GraphModule, weights: WeightSource) -> GraphModule:
    """Return the graph with float32 parameters in place of those on the meta device, to run in eager PyTorch.

    Raises `PassesError` for a parameter that `weights` lacks or holds in another shape, `PassOptionError` for a
    predictor's parameter that `weights` lacks, and `UnsupportedGraphError` for a captured graph whose layers are not
    all there yet.
    """
    require_all_layers(graph_module)
    result = copy_graph_module(graph_module)
    for target in sorted({str(node.target) for node in result.graph.nodes if node.op == "get_attr"}):
        tensor = attribute(result, target)
        if not has_real_data(tensor):
            _set_parameter(result, target, _as_float32(load_parameter(weights, target, tensor)))
    return result


def node_values(graph_module: GraphModule, tokens: Tensor) -> dict[str, Any]:
    """Return the value of every node, by its name, of a graph with real weights, for `tokens` int64 [T]."""
    values: dict[str, Any] = {}

    class Notes(Interpreter):
        def run_node(self, n: Node) -> Any:
            values[n.name] = super().run_node(n)
            return values[n.name]

    with torch.no_grad():
        Notes(graph_module).run(tokens, torch.arange(len(tokens)))
    return values


def evaluate_constant(graph_module: GraphModule, node: Node, weights: WeightSource) -> Tensor:
    """Return the value of one constant subgraph: contiguous, float32 where it is a float.

    A matrix that the source holds in the bytes of a weight format is not rounded again; others are packed in runs of
    matrices (see `PackedRows`). Loads only what `node` depends on and frees each value after its last use. The result
    must not be written to: it may be the weight source's own memory.
    """
    values: dict[Node, Tensor] = {}
    packed: dict[Node, PackedRows] = {}

    def inputs(dependency: Node) -> list[Node]:
        rows = packed_rows(graph_module, dependency)
        if rows is not None:
            packed[dependency] = rows
        return dependency.all_input_nodes if rows is None else []

    order = list(_dependencies(node, inputs))
    read = {each: [] if each in packed else each.all_input_nodes for each in order}
    uses = dict.fromkeys(order, 0)
    for argument in (argument for each in order for argument in read[each]):
        uses[argument] += 1
    for each in order:
        rows = packed.get(each)
        values[each] = _evaluate(graph_module, each, values, weights) if rows is None else rows.pack(weights)
        for argument in read[each]:
            uses[argument] -= 1
            if uses[argument] == 0:
                del values[argument]
    return _as_float32(values[node])


def _dependencies(node: Node, inputs: Callable[[Node], list[Node]]) -> Iterator[Node]:
    """`node` and what it depends on, by `inputs`, arguments first, each late so that little is alive at once."""
    seen: set[Node] = set()
    stack = [(node, False)]
    while stack:
        current, expanded = stack.pop()
        if expanded:
            yield current
        elif current not in seen:
            seen.add(current)
            stack.append((current, True))
            stack.extend((argument, False) for argument in reversed(inputs(current)))


def _evaluate(graph_module: GraphModule, node: Node, values: dict[Node, Tensor], weights: WeightSource) -> Tensor:
    if node.op == "get_attr":
        tensor = attribute(graph_module, str(node.target))
        return tensor if has_real_data(tensor) else load_parameter(weights, str(node.target), tensor)
    if node.op != "call_function" or not callable(node.target):
        raise PassesError(f"{node.name} ({node.op} {node.target}) is not constant, so it has no value ahead of time")
    in_own_dtype = is_call(node, *_IN_OWN_DTYPE)
    convert = values.__getitem__ if in_own_dtype else lambda argument: _as_float32(values[argument])
    args, kwargs = map_arg(node.args, convert), map_arg(node.kwargs, convert)
    with torch.no_grad():
        result: Any = node.target(*args, **kwargs)
    if not isinstance(result, Tensor):
        raise PassesError(f"{node.name} ({node.target}) gives no tensor")
    return result


def _as_float32(tensor: Tensor) -> Tensor:
    """`tensor` contiguous and, where it is a float, float32; itself where it is both already."""
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    if tensor.dtype == dtype and tensor.is_contiguous():
        return tensor
    return torch.empty(tensor.shape, dtype=dtype).copy_(tensor)


def _set_parameter(graph_module: GraphModule, target: str, tensor: Tensor) -> None:
    path, _, name = target.rpartition(".")
    owner = graph_module.get_submodule(path)
    if name in owner._buffers:
        owner.register_buffer(name, tensor)
    else:
        setattr(owner, name, nn.Parameter(tensor, requires_grad=False))
