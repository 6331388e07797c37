"""Lowerings that installed packages offer, by entry points."""

from collections.abc import Callable
from importlib.metadata import entry_points

from torch.fx import Node

from picompile_codegen.lowering.function import Function
from picompile_passes.errors import RegistryError

# lowering(node, function): appends the calls of a node.
Lowering = Callable[[Node, Function], None]


def packaged_lowering(group: str, name: str) -> Lowering | None:
    """Return the lowering that the entry point `name` of a group leads to, or None if there is none.

    Raises:
        RegistryError: If two packages offer one, or it does not import.
    """
    points = list(entry_points(group=group, name=name))
    if not points:
        return None
    if len(points) > 1:
        offers = " and ".join(point.value for point in points)
        raise RegistryError(f"two packages offer a kernel for {name!r}: {offers}")
    try:
        lowering: Lowering = points[0].load()
    except Exception as error:
        raise RegistryError(f"{points[0].value}, the kernel for {name!r}, does not import: {error}") from error
    return lowering
