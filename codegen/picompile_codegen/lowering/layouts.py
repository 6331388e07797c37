"""Layouts of packed tensors as data: how the values of constant subgraphs lie in the weights' file.

A layout is what `PackedTensor.produce` calls. Most tensors have one of those here, so that a table of packed tensors
can be kept and read again without lowering.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from picompile_passes.formats.panels import to_panels

# evaluate(node) → the value of one constant subgraph
Evaluate = Callable[[Node], Tensor]


@dataclass(frozen=True)
class Panels:
    """A matrix in panels of rows: uint8 [panels, panel bytes]. `node` is its rows, packed in `format`."""

    node: Node
    format: str
    columns: int

    def __call__(self, evaluate: Evaluate) -> Tensor:
        """Return the tensor."""
        return to_panels(evaluate(self.node), self.format, self.columns)


@dataclass(frozen=True)
class Interleaved:
    """Packed matrices of equal shape, uint8 [rows, row bytes]: row j · len(nodes) + i is row j of node i."""

    nodes: tuple[Node, ...]
    rows: int
    row_bytes: int

    def __call__(self, evaluate: Evaluate) -> Tensor:
        """Return the tensor."""
        if len(self.nodes) == 1:
            return evaluate(self.nodes[0])
        packed = torch.empty(self.rows // len(self.nodes), len(self.nodes), self.row_bytes, dtype=torch.uint8)
        for part, node in enumerate(self.nodes):
            packed[:, part] = evaluate(node)
        return packed.view(self.rows, self.row_bytes)


@dataclass(frozen=True)
class Floats:
    """The `count` numbers of a constant as float32 [stored], with zeros behind them."""

    node: Node
    count: int
    stored: int

    def __call__(self, evaluate: Evaluate) -> Tensor:
        """Return the tensor."""
        values = torch.zeros(self.stored, dtype=torch.float32)
        values[: self.count] = evaluate(self.node).reshape(-1)
        return values
