"""Adding two values, and keeping the last row of one."""

from picompile_codegen.kernels.kernel import Kernel, KernelFunction
from picompile_codegen.kernels.tensor import Expr, parallel
from picompile_codegen.kernels.vector import blocks, load, store


def add(*, dim: int, rows: int) -> Kernel:
    """y = a + b. a, b float32 [rows, dim] → [rows, dim]."""
    function = KernelFunction("add", dim, f"r{rows}")
    with function:
        tokens = function.tokens(rows)
        a, b, y = (function.floats(name, rows, dim) for name in ("a", "b", "y"))
        with parallel(tokens, when_worth=rows > 1) as t:

            def add_up(c: Expr, valid: int) -> None:
                store(y, t, c, value=load(a, t, c, valid=valid) + load(b, t, c, valid=valid), valid=valid)

            blocks(dim, add_up)
    return function.kernel()


def take_last(*, dim: int, rows: int) -> Kernel:
    """The last of the rows that count: y[0] = x[n - 1]. x float32 [rows, dim] → [1, dim]."""
    function = KernelFunction("take_last", dim, f"r{rows}")
    with function:
        tokens = function.tokens(rows)
        x, y = function.floats("x", rows, dim), function.floats("y", 1, dim)
        blocks(dim, lambda c, valid: store(y, 0, c, value=load(x, tokens - 1, c, valid=valid), valid=valid))
    return function.kernel()
