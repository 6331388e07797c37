"""Projections and norms: the spec of one, and what it is given."""

from torch.fx import Node

from picompile_codegen.lowering.function import Bindings, Function, dimension
from picompile_codegen.specs import LayerNormSpec, LinearSpec, Norm, RmsNormSpec
from picompile_passes.graph.nodes import arguments, is_call
from picompile_passes.graph.operands import RMS_NORM


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
        activation_bytes=function.activation_bytes if matrix.panels else 1,
    )
    bindings: Bindings = {"x": function.value(values["x"]), "w": matrix}
    return spec, bindings | function.vectors(values, "bias")


def norm_call(node: Node, function: Function) -> tuple[Norm, Bindings]:
    """Return the kernel's spec of the norm `node`, and the bindings of its vectors."""
    values = arguments(node)
    vectors = function.vectors(values, *(name for name in ("weight", "bias") if name in values))
    shape = {"dim": dimension(node), "rows": function.rows, "eps": values["eps"], "groups": values["groups"]}
    if is_call(node, RMS_NORM):
        return RmsNormSpec(**shape), vectors
    return LayerNormSpec(**shape, weight="weight" in vectors, bias="bias" in vectors), vectors


def is_returned(node: Node) -> bool:
    """Return whether the value of `node` is what the graph returns."""
    return any(user.op == "output" for user in node.users)
