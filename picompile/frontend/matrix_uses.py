"""Which parameters of the model are matrices of a predicted graph, and what each of them does there."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from picompile_passes.formats import PANEL_ROWS
from picompile_passes.graph.axes import MATRIX_AXES, TRANSPOSED_AXES, Axes, axes_of
from picompile_passes.graph.nodes import arguments, attribute, calls, has_real_data, is_call
from picompile_passes.graph.operands import (
    ATTENTION,
    EMBEDDING,
    INDEX_SELECT,
    LINEAR,
    PREDICTORS,
    SPARSE_FFN,
    computes_every_neuron,
    expert_count,
    makes_choices,
    makes_logits,
    matrix_operands,
)


@dataclass(frozen=True)
class MatrixUse:
    """`rows` rows of a parameter, a matrix of `columns`, as a node multiplies with it or looks it up.

    `role` is qk, v, o, ffn (gate and up), down, router, head or embedding, and `layer` that of the node, if any.
    `transposed` says that its rows are columns of the parameter, as its checkpoint has it. `in_panels` says whether
    kernels can read it in panels of rows: so they cannot read neurons that may be skipped, nor rows of a transposed
    parameter.
    """

    parameter: str
    rows: int
    columns: int
    role: str
    layer: int | None
    transposed: bool
    in_panels: bool


def matrix_uses(
    graph_module: GraphModule, *, hot_by_outputs: bool = False, turned: Collection[str] = ()
) -> Iterator[MatrixUse]:
    """Yield the uses of parameters of the model as matrices, in the order of the graph.

    Predictors are left out: those that have matrices of the model read them with the block. `hot_by_outputs` is as in
    `CompileConfig`. The checkpoint has the matrices of the parameters `turned` transposed.
    """
    values = _value_projections(graph_module)
    for node in graph_module.graph.nodes:
        if is_call(node, LINEAR, EMBEDDING):
            yield from _uses(graph_module, node, matrix_operands(node), values, turned)
        elif is_call(node, SPARSE_FFN):
            uses = list(_uses(graph_module, node, matrix_operands(node), values, turned))
            if computes_every_neuron(node, hot=hot_by_outputs) and all(use.in_panels for use in uses):
                yield from uses
            else:
                yield from _uses(graph_module, node, matrix_operands(node), values, turned, by_neurons=True)


def _uses(
    graph_module: GraphModule,
    node: Node,
    operands: Sequence[Node],
    values: dict[Node, str],
    turned: Collection[str],
    *,
    by_neurons: bool = False,
) -> Iterator[MatrixUse]:
    """Yield the uses of matrices by a call. With `by_neurons` the rows of a neuron are read together."""
    down = arguments(node)["down"] if is_call(node, SPARSE_FFN) else None
    experts = max(expert_count(node), 1) if is_call(node, SPARSE_FFN) else 1
    for operand in operands:
        rows, columns = (int(size) for size in operand.meta["val"].shape)
        source = operand
        while is_call(source, INDEX_SELECT) and source.args[1] == 0:
            source = source.all_input_nodes[0]
        stack = axes_of(source)
        if stack is None:
            continue
        name, axes = str(stack.parameter.target), stack.axes
        if has_real_data(attribute(graph_module, name)) or name.startswith(PREDICTORS):
            continue
        if operand is down and not by_neurons:
            # A block that computes every neuron reads down by its outputs.
            rows, columns = experts * columns, rows // experts
            axes = _by_outputs(axes)
        if axes not in (*MATRIX_AXES, *TRANSPOSED_AXES):
            continue
        transposed = (axes in TRANSPOSED_AXES) != (name in turned)
        role, layer = _role(node, operand, values), node.meta.get("layer")
        in_panels = not (transposed or by_neurons) and rows // experts % PANEL_ROWS == 0
        yield MatrixUse(name, rows, columns, role, layer, transposed, in_panels)


def _by_outputs(axes: Axes) -> Axes:
    """Return the axes of down with a row for each output, of those with a row for each neuron."""
    stacked, turned = MATRIX_AXES[1], TRANSPOSED_AXES[1]
    return {stacked: turned, turned: stacked}.get(axes, axes[::-1])


def _role(node: Node, operand: Node, values: dict[Node, str]) -> str:
    if is_call(node, EMBEDDING):
        return "embedding"
    if is_call(node, SPARSE_FFN):
        return "down" if operand is arguments(node)["down"] else "ffn"
    if makes_choices(node):
        return "router"
    return "head" if makes_logits(node) else values.get(node, "o")


def _value_projections(graph_module: GraphModule) -> dict[Node, str]:
    """Return the role of each projection that attention gets its queries, keys or values from."""
    found: dict[Node, str] = {}
    for node in calls(graph_module.graph, ATTENTION):
        operands = arguments(node)
        for name, role in (("q", "qk"), ("k", "qk"), ("v", "v")):
            for linear in _behind(operands[name]):
                found[linear] = "v" if "v" in (role, found.get(linear)) else role
    return found


def _behind(node: Node) -> Iterator[Node]:
    """Yield the nearest projections that a value is made of."""
    if is_call(node, LINEAR):
        yield node
    elif is_call(node, ATTENTION, SPARSE_FFN) or node.op != "call_function":
        return
    else:
        for source in node.all_input_nodes:
            yield from _behind(source)
