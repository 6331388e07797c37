"""Projections: the spec of one, and what it is given."""

from torch.fx import Node

from picompile_codegen.lowering.function import Bindings, Function, dimension
from picompile_codegen.specs import LinearSpec
from picompile_passes.graph.nodes import arguments


def linear_call(node: Node, function: Function) -> tuple[LinearSpec, Bindings]:
    """Return the kernel's spec of projection `node`, and all of its bindings but that of the result."""
    values = arguments(node)
    (matrix,) = function.shared.weights.whole_matrices([values["weight"]])
    spec = LinearSpec(
        format=matrix.format,
        n=dimension(node),
        k=dimension(values["x"]),
        rows=function.rows,
        bias=values["bias"] is not None,
        rowwise=function.mode == "sequences" and not matrix.panels,
        panels=matrix.panels,
    )
    bindings: Bindings = {"x": function.value(values["x"]), "w": matrix}
    return spec, bindings | function.vectors(values, "bias")


def is_returned(node: Node) -> bool:
    """Return whether the value of `node` is what the graph returns."""
    return any(user.op == "output" for user in node.users)
