"""Normalization of each token's activations on a GPU: a block takes a token, and reads it once."""

from tvm import tirx

from picompile_codegen.cuda.function import CudaFunction, CudaKernel
from picompile_codegen.cuda.memory import block_sum
from picompile_codegen.cuda.rows import Columns, block_threads
from picompile_codegen.kernels.tensor import Expr, bind, when


def rms_norm(*, dim: int, rows: int, eps: float) -> CudaKernel:
    """y = x / sqrt(mean(x²) + eps) · weight. x float32 [rows, dim], weight float32 [dim] → y like x."""
    function, threads = CudaFunction("rms_norm", dim, f"r{rows}", eps), block_threads(dim)
    with function:
        x, weight, y = function.floats("x", rows, dim), function.floats("weight", dim), function.floats("y", rows, dim)
        with function.launch(grid=rows, block=threads) as place, when(place.block < function.tokens(rows)):
            columns = Columns.of(dim, place.thread)
            # The weights are asked for before threads wait for each other, so that nobody waits for memory twice.
            values, weights = columns.load(x, place.block), columns.load(weight)
            squares = block_sum(_total([value * value for value in values]), place.thread, threads)
            factor = _inverse_root(squares / float(dim), eps)
            scaled = [value * factor * scale for value, scale in zip(values, weights, strict=True)]
            columns.store(y, place.block, scaled)
    return function.cuda_kernel()


def layer_norm(*, dim: int, rows: int, eps: float, weight: bool, bias: bool) -> CudaKernel:
    """y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias. x float32 [rows, dim], weight, bias [dim] → y like x."""
    function = CudaFunction("layer_norm", dim, f"r{rows}", eps, "w" * weight + "b" * bias)
    threads = block_threads(dim)
    with function:
        x = function.floats("x", rows, dim)
        weights = function.optional_floats("weight", dim, weight)
        biases = function.optional_floats("bias", dim, bias)
        y = function.floats("y", rows, dim)
        with function.launch(grid=rows, block=threads) as place, when(place.block < function.tokens(rows)):
            columns = Columns.of(dim, place.thread)
            values = columns.load(x, place.block)
            factors = [1.0] * len(values) if weights is None else columns.load(weights)
            summands = [0.0] * len(values) if biases is None else columns.load(biases)
            mean = bind(block_sum(_total(values), place.thread, threads) / float(dim))
            # Columns that do not exist were read as 0, which is not the mean.
            deviations = columns.or_zeros([value - mean for value in values])
            squares = block_sum(_total([value * value for value in deviations]), place.thread, threads)
            root = _inverse_root(squares / float(dim), eps)
            affine = zip(deviations, factors, summands, strict=True)
            columns.store(y, place.block, [value * root * factor + summand for value, factor, summand in affine])
    return function.cuda_kernel()


def _total(values: list[Expr]) -> Expr:
    """The sum, by halves: less rounding than one after another, and additions that need not wait for each other."""
    while len(values) > 1:
        rest = values[-1:] if len(values) % 2 else []
        values = [bind(a + b) for a, b in zip(values[::2], values[1::2], strict=False)] + rest
    return values[0]


def _inverse_root(value: Expr, eps: float) -> Expr:
    return bind(tirx.FloatImm("float32", 1.0) / tirx.sqrt(value + tirx.FloatImm("float32", eps)))
