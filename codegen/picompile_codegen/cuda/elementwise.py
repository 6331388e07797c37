"""Adding two values, and keeping the last row of one, on a GPU."""

from tvm import tirx

from picompile_codegen.cuda.function import CudaFunction, CudaKernel, Place, blocks_for
from picompile_codegen.cuda.rows import lanes_for, load_lanes, store_lanes
from picompile_codegen.kernels.tensor import Expr, bind

_THREADS = 128


def add(*, dim: int, rows: int) -> CudaKernel:
    """y = a + b. a, b float32 [rows, dim] → [rows, dim]."""
    function, lanes = CudaFunction("add", dim, f"r{rows}"), lanes_for(dim)
    with function:
        a, b, y = (function.floats(name, rows, dim) for name in ("a", "b", "y"))
        with function.launch(grid=(_blocks(dim), rows), block=_THREADS) as place:
            start = _start(place, lanes)
            inside = bind(tirx.And(place.block_y < function.tokens(rows), start < dim))
            index = (place.block_y, start)
            pairs = zip(load_lanes(a, index, lanes, inside), load_lanes(b, index, lanes, inside), strict=True)
            store_lanes(y, index, [first + second for first, second in pairs], inside)
    return function.cuda_kernel()


def take_last(*, dim: int, rows: int) -> CudaKernel:
    """The last of the rows that count: y[0] = x[n - 1]. x float32 [rows, dim] → [1, dim]."""
    function, lanes = CudaFunction("take_last", dim, f"r{rows}"), lanes_for(dim)
    with function:
        x, y = function.floats("x", rows, dim), function.floats("y", 1, dim)
        with function.launch(grid=_blocks(dim), block=_THREADS) as place:
            start = _start(place, lanes)
            last = bind(function.tokens(rows) - 1)
            store_lanes(y, (0, start), load_lanes(x, (last, start), lanes, start < dim), start < dim)
    return function.cuda_kernel()


def _blocks(dim: int) -> int:
    """Blocks for a row."""
    return blocks_for(dim // lanes_for(dim), _THREADS)


def _start(place: Place, lanes: int) -> Expr:
    """The first column of a thread."""
    return (place.block * _THREADS + place.thread) * lanes
