"""A rule is a name and a function that yields what is wrong."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, and the node where it shows, if it shows at one."""

    node: Node | None
    message: str


Check = Callable[[GraphModule], Iterator[Fault]]


@dataclass(frozen=True)
class Rule:
    """One property of a graph. `check` yields a fault for each breach and nothing where the property holds."""

    name: str
    check: Check
