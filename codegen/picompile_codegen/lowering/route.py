"""A router's choice of experts as a kernel call."""

from torch.fx import Node

from picompile_codegen.lowering.function import Bindings, Function, dimension
from picompile_codegen.lowering.operators import lowers
from picompile_codegen.specs import RouteSpec
from picompile_passes.graph.nodes import arguments
from picompile_passes.graph.operands import ROUTE


@lowers(ROUTE)
def lower_route(node: Node, function: Function) -> None:
    """Append the call that computes the gains of each row's experts."""
    values = arguments(node)
    rules = ("chosen", "scores", "normalized", "scale", "eps", "groups", "chosen_groups", "group_score")
    spec = RouteSpec(
        experts=dimension(node),
        rows=function.rows,
        bias=values["bias"] is not None,
        expert_scale=values["expert_scale"] is not None,
        **{name: values[name] for name in rules},
    )
    bindings: Bindings = {"logits": function.value(values["logits"]), "gains": function.result(node)}
    function.call(spec, bindings | function.vectors(values, "bias", "expert_scale"), layer=node.meta["layer"])
