"""Linear layers: a packed matrix times the activations of one token, or of a chunk."""

from picompile_codegen.kernels.dot import dot, prepare_vector
from picompile_codegen.kernels.kernel import Kernel, KernelFunction
from picompile_codegen.kernels.matrix import Matrix, matrix_argument
from picompile_codegen.kernels.tensor import Expr, Tensor, parallel, worth_a_region
from picompile_codegen.kernels.tiles import ROW_BLOCK, Projection, project_rows


def linear(*, format: str, n: int, k: int, rows: int, bias: bool) -> Kernel:
    """y = x · wᵀ + bias. x float32 [rows, k], w packed [n, k], bias float32 [n] → y float32 [rows, n]."""
    function = KernelFunction("linear", format, f"{n}x{k}", f"r{rows}", "b" if bias else "")
    with function:
        x = function.floats("x", rows, k)
        w = matrix_argument(function, "w", format, n, k)
        biases = function.optional_floats("bias", n, bias)
        y = function.floats("y", rows, n)
        if rows == 1:
            _linear_one(x, w, biases, y)
        else:
            _linear_chunk(x, w, biases, y, function.tokens(rows))
    return function.kernel()


def _linear_one(x: Tensor, w: Matrix, bias: Tensor | None, y: Tensor) -> None:
    """Row by row: a single forward stream is what processors foresee best."""
    vector = prepare_vector(x, w)
    with parallel(w.rows, when_worth=worth_a_region(w.bytes)) as row:
        product = dot(w, row, vector)
        y[0, row] = product if bias is None else product + bias[row]


def _linear_chunk(x: Tensor, w: Matrix, bias: Tensor | None, y: Tensor, tokens: Expr) -> None:
    projection = Projection(w, w.rows, lambda row: row, bias)
    with parallel(-(-w.rows // ROW_BLOCK), when_worth=worth_a_region(w.bytes)) as block:
        project_rows(projection, block, x, tokens, y)
