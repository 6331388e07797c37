"""Real weights in a graph: in all of it for eager runs, or in one constant at a time for the artifact."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from picompile_passes.base import copy_graph_module
from picompile_passes.errors import PassesError, PassOptionError
from picompile_passes.graph.axes import MATRIX_AXES, TRANSPOSED_AXES, axes_of
from picompile_passes.graph.nodes import attribute, has_real_data, is_call
from picompile_passes.graph.operands import INDEX_SELECT, PREDICTORS, QUANTIZE, RESHAPE, TRANSPOSE, is_limit
from picompile_passes.graph.stamps import require_all_layers

_aten = torch.ops.aten
# These take the checkpoint's own dtype, so that no float32 copy of a whole matrix is made: operators that only move
# elements, and quantization, which converts a block of rows at a time.
_IN_OWN_DTYPE = (
    *(TRANSPOSE, INDEX_SELECT, QUANTIZE),
    *(RESHAPE, _aten.flatten.using_ints, _aten.unflatten.int, _aten.permute.default),
)


class WeightSource(Protocol):
    """A source of the parameters' values: a checkpoint, or a module in memory."""

    def names(self) -> Iterable[str]:
        """The names of all tensors there are."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor `name`, without reading it."""
        ...

    def load(self, name: str) -> Tensor:
        """The tensor `name`, in the checkpoint's dtype, on the CPU. It must not be written to."""
        ...


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
            _set_parameter(result, target, _as_float32(_load(weights, target, tensor)))
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

    A matrix that the source holds in the bytes of a weight format is not rounded again. Loads only what `node` depends
    on and frees each value after its last use. The result must not be written to: it may be the weight source's own
    memory.
    """
    values: dict[Node, Tensor] = {}

    def is_known(dependency: Node) -> bool:
        packed = _packed(graph_module, dependency, weights)
        if packed is not None:
            values[dependency] = packed
        return packed is not None

    order = list(_dependencies(node, is_known))
    uses = dict.fromkeys([*order, *values], 0)
    for dependency in order:
        for argument in dependency.all_input_nodes:
            uses[argument] += 1
    for dependency in order:
        values[dependency] = _evaluate(graph_module, dependency, values, weights)
        for argument in dependency.all_input_nodes:
            uses[argument] -= 1
            if uses[argument] == 0:
                del values[argument]
    return _as_float32(values[node])


def _packed(graph_module: GraphModule, node: Node, weights: WeightSource) -> Tensor | None:
    """Return the bytes of a `quantize` as the weight source has them already, None where it has them not.

    The matrix is a parameter, or its transpose, or a stack of matrices or of transposes one behind the other, or rows
    of one of them: rows are packed each by itself, and only those that are wanted.
    """
    packed: Callable[..., Tensor | None] | None = getattr(weights, "packed", None)
    if packed is None or not is_call(node, QUANTIZE):
        return None
    matrix, form = node.args
    table: Tensor | None = None
    if is_call(matrix, INDEX_SELECT):
        matrix, dim, rows = matrix.args  # type: ignore[union-attr]
        if dim != 0 or not isinstance(rows, Node) or rows.op != "get_attr":
            return None
        table = attribute(graph_module, str(rows.target))
    stack = axes_of(matrix) if isinstance(matrix, Node) else None
    if stack is None or stack.axes not in (*MATRIX_AXES, *TRANSPOSED_AXES):
        return None
    source, transposed = stack.parameter, stack.axes in TRANSPOSED_AXES
    if str(source.target).startswith(PREDICTORS):
        return None
    if has_real_data(attribute(graph_module, str(source.target))):
        return None
    wanted = () if table is None else (table,)
    return packed(str(source.target), str(form), transposed, *wanted)


def _dependencies(node: Node, is_known: Callable[[Node], bool]) -> Iterator[Node]:
    """`node` and what it depends on, arguments first, each as late as it can be so that little is alive at once.

    What is known, and what only that depends on, is left out.
    """
    seen: set[Node] = set()
    stack = [(node, False)]
    while stack:
        current, expanded = stack.pop()
        if expanded:
            yield current
        elif current not in seen:
            seen.add(current)
            if not is_known(current):
                stack.append((current, True))
                stack.extend((argument, False) for argument in reversed(current.all_input_nodes))


def _evaluate(graph_module: GraphModule, node: Node, values: dict[Node, Tensor], weights: WeightSource) -> Tensor:
    if node.op == "get_attr":
        tensor = attribute(graph_module, str(node.target))
        return tensor if has_real_data(tensor) else _load(weights, str(node.target), tensor)
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


def _load(weights: WeightSource, name: str, expected: Tensor) -> Tensor:
    try:
        tensor = weights.load(name)
    except KeyError as error:
        if name.startswith(PREDICTORS):
            why = (
                "limits need values of their own" if is_limit(name) else "a learned predictor needs weights of its own"
            )
            raise PassOptionError(f"the weights hold no {name}: {why}") from error
        raise PassesError(f"the weights hold no tensor {name!r}, which the graph reads") from error
    if tensor.shape != expected.shape:
        raise PassesError(f"{name} is {list(tensor.shape)} in the weights but {list(expected.shape)} in the graph")
    return tensor


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
