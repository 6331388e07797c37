"""`Rule`, a named check of a graph, and `Fault`, one breach of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node


@dataclass(frozen=True)
class Fault:
    """One breach of a rule, and the node where it shows; None where it shows at no single node."""

    node: Node | None
    message: str


Check = Callable[[GraphModule], Iterator[Fault]]


@dataclass(frozen=True)
class Rule:
    """One property of a graph. `check` yields a fault for each breach, and none where the property holds."""

    name: str
    check: Check
