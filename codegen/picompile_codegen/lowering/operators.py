"""How an operator becomes kernel calls: by the function in this folder that `lowers` marks with what graphs call.

    @lowers(negate.target)
    def lower_negate(node: Node, function: Function) -> None:
        kernel = function.kernel(NegateSpec(dim=dimension(node), rows=function.rows))
        function.call(kernel, {"x": function.value(arguments(node)["x"]), "y": function.result(node)}, op="negate")

A package that offers an operator offers its function by an entry point of the group `picompile.operator_kernels`, which
has the operator's name. Its specs bring their bodies (`KernelSpec.bodies`).
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

from torch._ops import OpOverload
from torch.fx import Node

from picompile_codegen.lowering.function import Function
from picompile_codegen.lowering.packages import Lowering, packaged_lowering
from picompile_passes.dialect import operator_of
from picompile_passes.errors import UnsupportedGraphError

LoweringT = TypeVar("LoweringT", bound=Lowering)

ENTRY_POINT_GROUP = "picompile.operator_kernels"
_LOWERS, _UPDATES = "__picompile_lowers__", "__picompile_updates__"


def lowers(*targets: OpOverload) -> Callable[[LoweringT], LoweringT]:
    """Mark the function that appends the calls of nodes that call one of `targets`."""
    return _marking(_LOWERS, targets)


def updates(*targets: OpOverload) -> Callable[[LoweringT], LoweringT]:
    """Mark the function that appends the calls which update the state of such nodes alone, without their result."""
    return _marking(_UPDATES, targets)


def _marking(mark: str, targets: tuple[OpOverload, ...]) -> Callable[[LoweringT], LoweringT]:
    def set_mark(function: LoweringT) -> LoweringT:
        setattr(function, mark, targets)
        return function

    return set_mark


@cache
def _marked(mark: str) -> Mapping[object, Lowering]:
    """Return the functions of this folder that have the mark, by what nodes call."""
    package = __name__.rpartition(".")[0]
    modules = [import_module(each.name) for each in iter_modules(import_module(package).__path__, f"{package}.")]
    functions = [value for module in modules for value in vars(module).values() if inspect.isfunction(value)]
    return {target: function for function in functions for target in getattr(function, mark, ())}


def lower_node(node: Node, function: Function) -> None:
    """Append the calls of one node.

    Raises:
        UnsupportedGraphError: For an operator without a kernel.
        RegistryError: For one whose package's lowering does not import.
    """
    lowering = _marked(_LOWERS).get(node.target)
    if lowering is None and (operator := operator_of(node.target)) is not None:
        lowering = packaged_lowering(ENTRY_POINT_GROUP, operator.name)
    if lowering is None:
        raise UnsupportedGraphError(f"{node.name}: there is no kernel for {node.target}")
    lowering(node, function)


def lower_state(node: Node, function: Function) -> None:
    """Append the calls that update the state of `node`; they may compute its result as well."""
    _marked(_UPDATES).get(node.target, lower_node)(node, function)
