"""Embedding on a GPU: a thread unpacks 16 bytes of a row of the table."""

from tvm import tirx

from picompile_codegen.cuda.function import CudaFunction, CudaKernel, blocks_for
from picompile_codegen.cuda.matrix import matrix_argument
from picompile_codegen.cuda.rows import lanes_for, store_lanes
from picompile_codegen.kernels.tensor import bind, when

_THREADS = 64


def embedding(*, format: str, vocab: int, dim: int, rows: int, offset: int) -> CudaKernel:
    """y[t] = w[ids[t] + offset]. ids int32 [rows], w packed [vocab, dim] → y float32 [rows, dim].

    An id outside the table reads whatever lies there: ids are checked before they get here.
    """
    function = CudaFunction("embedding", format, f"{vocab}x{dim}", f"r{rows}", f"o{offset}")
    with function:
        ids = function.argument("ids", "int32", rows, below=vocab - offset)
        w = matrix_argument(function, "w", format, vocab, dim)
        y = function.floats("y", rows, dim)
        lanes, units = lanes_for(dim), blocks_for(dim, w.unit_weights)
        with function.launch(grid=(blocks_for(units, _THREADS), rows), block=_THREADS) as place:
            token, number = place.block_y, bind(place.block * _THREADS + place.thread)
            with when(tirx.And(token < function.tokens(rows), number < units)):
                unit = w.unit(bind(ids[token] + offset), number)
                weights = [bind(unit.weight(i)) for i in range(w.unit_weights)]
                for i in range(0, w.unit_weights, lanes):
                    column = unit.first + i
                    store_lanes(y, (token, column), weights[i : i + lanes], column < dim)
    return function.cuda_kernel()
