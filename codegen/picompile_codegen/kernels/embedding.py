"""Embedding: rows of a table."""

from picompile_codegen.kernels.kernel import Kernel, KernelFunction
from picompile_codegen.kernels.matrix import each_group, matrix_argument
from picompile_codegen.kernels.tensor import Expr, bind, parallel
from picompile_codegen.kernels.vector import LANES, store
from picompile_passes.dialect.formats import GROUP


def embedding(*, format: str, vocab: int, dim: int, rows: int, offset: int) -> Kernel:
    """y[t] = w[ids[t] + offset]. ids int32 [rows], w packed [vocab, dim] → y float32 [rows, dim].

    An id outside the table reads whatever lies there: ids are checked before they get here.
    """
    function = KernelFunction("embedding", format, f"{vocab}x{dim}", f"r{rows}", f"o{offset}")
    with function:
        ids = function.argument("ids", "int32", rows, below=vocab - offset)
        w = matrix_argument(function, "w", format, vocab, dim)
        y = function.floats("y", rows, dim)
        with parallel(function.tokens(rows), when_worth=rows > 1) as t:
            row = w.row(bind(ids[t] + offset))

            def copy_group(group: Expr, lane_counts: tuple[int, ...]) -> None:
                weights = row.group(group).weights()
                for i, valid in enumerate(lane_counts):
                    store(y, t, group * GROUP + i * LANES, value=weights[i], valid=valid)

            each_group(dim, copy_group)
    return function.kernel()
