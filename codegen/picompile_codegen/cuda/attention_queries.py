"""The queries that a block has of a chunk."""

from dataclasses import dataclass

from picompile_codegen.kernels.attention_arguments import Shape, first_position
from picompile_codegen.kernels.step_rows import StepRows
from picompile_codegen.kernels.tensor import Expr, bind, minimum

# Queries of a block; keys, and columns of values, that it takes at once.


@dataclass(frozen=True)
class ChunkTile:
    """The queries of a block: from `begin` on of `total`, which are numbered token by token, and in these head by head.

    They are of head `kv_head` of the keys of the sequence in `slot`.
    """

    shape: Shape
    slot: Expr
    kv_head: Expr
    begin: Expr
    total: Expr
    tokens: StepRows

    def query(self, index: Expr) -> tuple[Expr, Expr]:
        """Row and head of a query of the tile. Past the last that is repeated."""
        query = bind(minimum(self.begin + index, self.total - 1))
        row = bind(query // self.shape.group)
        return row, bind(self.kv_head * self.shape.group + query % self.shape.group)

    def seen(self, index: Expr) -> tuple[Expr, Expr]:
        """The first and the last position that a query sees."""
        position = bind(self.tokens.position(self.query(index)[0]))
        return first_position(self.shape, position), position
