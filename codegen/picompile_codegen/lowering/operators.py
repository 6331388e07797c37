"""How an operator becomes kernel calls: by the function in this folder that `lowers` marks with what graphs call.

    @lowers(negate.target)
    def lower_negate(node: Node, function: Function) -> None:
        spec = NegateSpec(dim=dimension(node), rows=function.rows)
        function.call(spec, {"x": function.value(arguments(node)["x"]), "y": function.result(node)})

A package that offers an operator offers its function by an entry point of the group `picompile.operator_kernels`, which
has the operator's name. Its specs bring their bodies (`KernelSpec.bodies`).
"""

from collections.abc import Callable, Mapping
from functools import cache

from torch._ops import OpOverload
from torch.fx import Node

from picompile_codegen.lowering.function import Function
from picompile_passes.dialect import operator_name
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.plugins import Registry, mark, marked

# lowering(node, function): appends the calls of a node.
Lowering = Callable[[Node, Function], None]

_FOLDER = __name__.rpartition(".")[0]


def lowers(*targets: OpOverload) -> Callable[[Lowering], Lowering]:
    """Mark the function that appends the calls of nodes that call one of `targets`."""
    return mark("lowerings", *targets)


def updates(*targets: OpOverload) -> Callable[[Lowering], Lowering]:
    """Mark the function that appends the calls which update the state of such nodes alone, without their result."""
    return mark("updates", *targets)


@cache
def _lowerings() -> Registry[Lowering]:
    """Return the lowerings by the operator's name."""
    ours = {operator_name(target): function for target, function in marked("lowerings", _FOLDER).items()}
    return Registry("operator kernel", "picompile.operator_kernels", Callable, ours)


@cache
def _updates() -> Mapping[OpOverload, Lowering]:
    return marked("updates", _FOLDER)


def lower_node(node: Node, function: Function) -> None:
    """Append the calls of one node.

    Raises:
        UnsupportedGraphError: For an operator without a kernel.
        RegistryError: For one whose package's lowering does not import.
    """
    lowering = _lowerings().get(operator_name(node.target))
    if lowering is None:
        raise UnsupportedGraphError(f"{node.name}: there is no kernel for {node.target}")
    lowering(node, function)


def lower_state(node: Node, function: Function) -> None:
    """Append the calls that update the state of `node`; they may compute its result as well."""
    _updates().get(node.target, lower_node)(node, function)  # type: ignore[call-overload]
