"""Columns of a `linear` as a linear of their own: the rows of its weight and bias that make them."""

from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from picompile_passes.constants import SharedConstants
from picompile_passes.nodes import is_call
from picompile_passes.operands import INDEX_SELECT, TRANSPOSE
from picompile_passes.rewriter import Rewriter


@dataclass(frozen=True)
class Projection:
    """The columns `table` of the result of `linear`, or all of them where it is None."""

    linear: Node
    table: Tensor | None

    def rows(self, rewriter: Rewriter, constants: SharedConstants, before: Node) -> tuple[Node, Node | None]:
        """Weight and bias that give these columns alone."""
        _, weight, bias = self.linear.args
        if self.table is None:
            return weight, bias  # type: ignore[return-value]
        table = constants.get("rows", self.table, self.linear)

        def select(matrix: Node) -> Node:
            return rewriter.call(INDEX_SELECT, (matrix, 0, table), before=before, sources=(matrix,))

        return select(weight), None if bias is None else select(bias)  # type: ignore[arg-type]


def down_rows(rewriter: Rewriter, weight: Node, before: Node) -> Node:
    """The weight of a down projection [D, F] with a row for each neuron: its transpose [F, D]."""
    if is_call(weight, TRANSPOSE):
        return weight.all_input_nodes[0]
    return rewriter.call(TRANSPOSE, (weight, 0, 1), before=before, sources=(weight,))
