"""Reading nodes: which operator they call, their arguments by name, the tensors they read, which are constant."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

# The marks of a node's place, in `meta`: those that what is made from it gets as well, and all.
INHERITED_MARKS = ("layer", "part")
MARKS = (*INHERITED_MARKS, "neurons")


def is_call(node: object, *ops: OpOverload) -> bool:
    """Return whether `node` is a node that calls one of `ops`."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in ops


def calls(graph: Graph, *ops: OpOverload) -> Iterator[Node]:
    """Return the nodes that call one of `ops`, in order. The graph may change during the iteration."""
    return iter([node for node in graph.nodes if is_call(node, *ops)])


def arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a call by their names in the operator's schema, in order, defaults filled in.

    Raises `TypeError` for a node that does not call an operator.
    """
    values = {}
    for position, argument in enumerate(_schema_arguments(node)):
        if position < len(node.args):
            values[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            values[argument.name] = node.kwargs[argument.name]
        else:
            values[argument.name] = argument.default_value
    return values


def positions_input(graph: Graph) -> Node:
    """Return the input with the positions [T] of the tokens."""
    found: Node = next(node for node in graph.nodes if node.op == "placeholder" and node.target == "positions")
    return found


def argument_position(node: Node, name: str) -> int:
    """Return the position of the argument `name` in the operator's schema. Raises `KeyError` where there is none."""
    for position, argument in enumerate(_schema_arguments(node)):
        if argument.name == name:
            return position
    raise KeyError(f"{node.target} has no argument {name!r}")


def _schema_arguments(node: Node) -> Any:
    if not isinstance(node.target, OpOverload):
        raise TypeError(f"{node.name} calls {node.target}, which has no schema")
    return node.target._schema.arguments


def constant_nodes(graph: Graph) -> frozenset[Node]:
    """Return the nodes whose values depend on no placeholder."""
    constant: set[Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and all(n in constant for n in node.all_input_nodes)):
            constant.add(node)
    return frozenset(constant)


class EqualValues:
    """Numbers values by how they are computed: the same calls of the same values have one number.

    The operators that are called must always give the same value for the same arguments.
    """

    def __init__(self) -> None:
        """Begin with no value numbered."""
        self._by_description: dict[str, int] = {}
        self._by_node: dict[Node, int] = {}

    def number(self, node: Node) -> int:
        """Return the number of the value of `node`."""
        waiting = [node]
        while waiting:
            last = waiting[-1]
            missing = [value for value in last.all_input_nodes if value not in self._by_node]
            waiting += missing
            if not missing:
                waiting.pop()
                self._by_node[last] = self._by_description.setdefault(self._describe(last), len(self._by_description))
        return self._by_node[node]

    def _describe(self, node: Node) -> str:
        def numbered(value: Node) -> Any:
            return _Numbered(self._by_node[value])

        # Nothing else is written as %7: numbers and names among the arguments are not taken for values.
        given = torch.fx.node.map_arg((node.args, node.kwargs), numbered)
        return f"{node.op} {node.target} {given}"


@dataclass(frozen=True)
class _Numbered:
    number: int

    def __repr__(self) -> str:
        return f"%{self.number}"


def attribute(graph_module: GraphModule, target: str) -> Tensor:
    """Return the tensor that a `get_attr` of the dotted name `target` reads: without data for a parameter.

    Raises `AttributeError` where there is no tensor of that name.
    """
    value: object = graph_module
    for part in target.split("."):
        value = getattr(value, part)
    if not isinstance(value, torch.Tensor):
        raise AttributeError(f"{target} is a {type(value).__name__}, not a tensor")
    return value


def has_real_data(tensor: Tensor) -> bool:
    """Return whether `tensor` is a constant of the graph rather than a parameter, whose data is in a checkpoint."""
    return not tensor.is_meta
