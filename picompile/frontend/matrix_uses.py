"""Which parameters of the model are matrices of a predicted graph, and what each of them does there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from picompile_passes.formats import PANEL_ROWS
from picompile_passes.graph.nodes import arguments, attribute, calls, has_real_data, is_call
from picompile_passes.graph.operands import (
    ATTENTION,
    EMBEDDING,
    INDEX_SELECT,
    LINEAR,
    PREDICTORS,
    SPARSE_FFN,
    TRANSPOSE,
    computes_every_neuron,
    makes_logits,
    matrix_operands,
)


@dataclass(frozen=True)
class MatrixUse:
    """`rows` rows of a parameter, a matrix of `columns`, as a node multiplies with it or looks it up.

    `role` is qk, v, o, ffn (gate and up), down, head or embedding, and `layer` that of the node, if it is in one.
    `transposed` says that its rows are columns of the parameter. `in_panels` says whether kernels can read it in panels
    of rows: so they cannot read neurons that may be skipped, nor rows of a transposed parameter.
    """

    parameter: str
    rows: int
    columns: int
    role: str
    layer: int | None
    transposed: bool
    in_panels: bool


def matrix_uses(graph_module: GraphModule, *, hot_by_outputs: bool = False) -> Iterator[MatrixUse]:
    """Yield the uses of parameters of the model as matrices, in the order of the graph.

    Predictors are left out: those that have matrices of the model read them with the block. `hot_by_outputs` is as in
    `CompileConfig`.
    """
    values = _value_projections(graph_module)
    for node in graph_module.graph.nodes:
        if is_call(node, LINEAR, EMBEDDING):
            yield from _uses(graph_module, node, matrix_operands(node), values)
        elif is_call(node, SPARSE_FFN):
            uses = list(_uses(graph_module, node, matrix_operands(node), values))
            # A neuron's rows are read together.
            if computes_every_neuron(node, hot=hot_by_outputs) and all(use.in_panels for use in uses):
                yield from uses
            else:
                yield from (_by_neurons(use) for use in uses)


def _by_neurons(use: MatrixUse) -> MatrixUse:
    """Return the use of a matrix of a block that is read neuron by neuron: so are the rows of down."""
    if use.role != "down":
        return replace(use, in_panels=False)
    return replace(use, rows=use.columns, columns=use.rows, transposed=not use.transposed, in_panels=False)


def _uses(
    graph_module: GraphModule, node: Node, operands: Sequence[Node], values: dict[Node, str]
) -> Iterator[MatrixUse]:
    down = arguments(node)["down"] if is_call(node, SPARSE_FFN) else None
    for operand in operands:
        rows, columns = (int(size) for size in operand.meta["val"].shape)
        transposed, source = operand is down, operand
        while is_call(source, INDEX_SELECT) and source.args[1] == 0:
            source = source.all_input_nodes[0]
        if is_call(source, TRANSPOSE):
            transposed, source = not transposed, source.all_input_nodes[0]
        name = str(source.target)
        if source.op != "get_attr" or has_real_data(attribute(graph_module, name)) or name.startswith(PREDICTORS):
            continue
        if operand is down:
            # A block that computes every neuron reads down by its outputs.
            rows, columns = columns, rows
        role, layer = _role(node, operand, values), node.meta.get("layer")
        yield MatrixUse(name, rows, columns, role, layer, transposed, not transposed and rows % PANEL_ROWS == 0)


def _role(node: Node, operand: Node, values: dict[Node, str]) -> str:
    if is_call(node, EMBEDDING):
        return "embedding"
    if is_call(node, SPARSE_FFN):
        return "down" if operand is arguments(node)["down"] else "ffn"
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
