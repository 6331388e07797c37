"""Linear layers: a packed matrix times the activations of one token, or of a chunk."""

from picompile_codegen.kernels.byte_tiles import declare_rows
from picompile_codegen.kernels.dot import dot, prepare_vector
from picompile_codegen.kernels.kernel import Kernel, KernelFunction
from picompile_codegen.kernels.matrix import Matrix, matrix_argument
from picompile_codegen.kernels.tensor import Tensor, parallel, worth_a_region
from picompile_codegen.kernels.tiles import Projection, project


def linear(*, format: str, n: int, k: int, rows: int, bias: bool) -> Kernel:
    """y = x · wᵀ + bias. x float32 [rows, k], w packed [n, k], bias float32 [n] → y float32 [rows, n]."""
    function = KernelFunction("linear", format, f"{n}x{k}", f"r{rows}", "b" if bias else "")
    with function:
        x = function.floats("x", rows, k)
        w = matrix_argument(function, "w", format, n, k)
        biases = function.optional_floats("bias", n, bias)
        quantized = declare_rows(function, "x", rows, k) if rows > 1 and w.scale is not None else None
        y = function.floats("y", rows, n)
        if rows == 1:
            _linear_one(x, w, biases, y)
        else:
            projection = Projection(w, n, lambda row: row, biases)
            project(projection, x, quantized, function.tokens(rows), y)
    return function.kernel()


def _linear_one(x: Tensor, w: Matrix, bias: Tensor | None, y: Tensor) -> None:
    """Row by row, front to back."""
    vector = prepare_vector(x, w)
    with parallel(w.rows, when_worth=worth_a_region(w.bytes)) as row:
        product = dot(w, row, vector, [row + w.rows_ahead])
        y[0, row] = product if bias is None else product + bias[row]
