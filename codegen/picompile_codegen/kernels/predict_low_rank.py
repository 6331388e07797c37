"""Predictors that were trained: two matrices of low rank tell which neurons a token will fire."""

from tvm import tirx

from picompile_codegen.kernels.byte_tiles import declare_rows
from picompile_codegen.kernels.dot import dot, prepare_vector
from picompile_codegen.kernels.kernel import Kernel, KernelFunction
from picompile_codegen.kernels.matrix import Matrix, matrix_argument
from picompile_codegen.kernels.tensor import Tensor, loop, maximum, parallel, worth_a_region
from picompile_codegen.kernels.tiles import Projection, project


def predict_low_rank(
    *, formats: tuple[str, str], neurons: int, rank: int, dim: int, relu: bool, rows: int = 1
) -> Kernel:
    """mask[t, j] = 1 where fc2[j] · h[t] + bias[j] > threshold, else 0; h = fc1 · x, or relu(fc1 · x) with `relu`.

    x float32 [rows, dim], fc1 packed [rank, dim], fc2 packed [neurons, rank], in `formats`, bias float32 [neurons],
    threshold float32 [1] → mask uint8 [rows, neurons].
    """
    shape = f"{neurons}x{rank}x{dim}"
    function = KernelFunction(
        "predict", "relu" if relu else "linear", *formats, shape, f"r{rows}" if rows > 1 else ""
    )  # fmt: skip
    with function:
        x = function.floats("x", rows, dim)
        fc1 = matrix_argument(function, "fc1", formats[0], rank, dim)
        fc2 = matrix_argument(function, "fc2", formats[1], neurons, rank)
        bias, threshold = function.floats("bias", neurons), function.floats("threshold", 1)
        hidden = function.scratch("hidden", "float32", rows, rank)
        if rows == 1:
            _predict_one(x, fc1, fc2, bias, threshold, hidden, function.argument("mask", "uint8", 1, neurons), relu)
        else:
            _predict_batch(function, x, fc1, fc2, bias, threshold, hidden, relu)
    return function.kernel()


def _predict_one(
    x: Tensor, fc1: Matrix, fc2: Matrix, bias: Tensor, threshold: Tensor, hidden: Tensor, mask: Tensor, relu: bool
) -> None:
    inputs = prepare_vector(x, fc1)
    with parallel(fc1.rows, when_worth=worth_a_region(fc1.bytes)) as row:
        product = dot(fc1, row, inputs, [row + fc1.rows_ahead])
        hidden[0, row] = maximum(product, tirx.FloatImm("float32", 0.0)) if relu else product
    inputs = prepare_vector(hidden, fc2)
    with parallel(fc2.rows, when_worth=worth_a_region(fc2.bytes)) as neuron:
        product = dot(fc2, neuron, inputs, [neuron + fc2.rows_ahead])
        mask[0, neuron] = tirx.Cast("uint8", product + bias[neuron] > threshold[0])


def _predict_batch(
    function: KernelFunction,
    x: Tensor,
    fc1: Matrix,
    fc2: Matrix,
    bias: Tensor,
    threshold: Tensor,
    hidden: Tensor,
    relu: bool,
) -> None:
    """Two products of tiles, and a comparison for each token and neuron."""
    rows = int(hidden.rows)
    x_bytes = None if fc1.scale is None else declare_rows(function, "x", rows, fc1.columns)
    hidden_bytes = None if fc2.scale is None else declare_rows(function, "hidden", rows, fc2.columns)
    scores = function.scratch("scores", "float32", rows, fc2.rows)
    mask = function.argument("mask", "uint8", rows, fc2.rows)
    tokens = function.tokens(rows)
    project(Projection(fc1, fc1.rows, lambda row: row, None), x, x_bytes, tokens, hidden)
    if relu:
        with parallel(tokens) as token, loop(0, fc1.rows) as row:
            hidden[token, row] = maximum(hidden[token, row], tirx.FloatImm("float32", 0.0))
    project(Projection(fc2, fc2.rows, lambda row: row, bias), hidden, hidden_bytes, tokens, scores)
    with parallel(tokens) as token, loop(0, fc2.rows) as neuron:
        mask[token, neuron] = tirx.Cast("uint8", scores[token, neuron] > threshold[0])
