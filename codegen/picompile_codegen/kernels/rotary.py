"""Rotary position embedding."""

from picompile_codegen.kernels.kernel import Kernel, KernelFunction
from picompile_codegen.kernels.tensor import Expr, bind, loop, parallel
from picompile_codegen.kernels.vector import blocks, load, store


def rotary(*, heads: int, head_dim: int, rows: int, context: int) -> Kernel:
    """Turns each head's (x[i], x[i + d/2]) by the angle of its position, whose cosine and sine are in tables.

    x float32 [rows, heads · d], cos and sin float32 [context, d/2] → y like x. Row t has position step[1] + t.
    """
    half = head_dim // 2
    function = KernelFunction("rotary", f"{heads}x{head_dim}", f"r{rows}", f"c{context}")
    with function:
        x = function.floats("x", rows, heads * head_dim)
        cos, sin = function.floats("cos", context, half), function.floats("sin", context, half)
        y = function.floats("y", rows, heads * head_dim)
        first_position = function.position()
        with parallel(function.tokens(rows), when_worth=rows > 1) as t:
            position = bind(first_position + t)
            with loop(0, heads) as head:

                def turn(c: Expr, valid: int) -> None:
                    column = head * head_dim + c
                    a = bind(load(x, t, column, valid=valid))
                    b = bind(load(x, t, column + half, valid=valid))
                    cosine = bind(load(cos, position, c, valid=valid))
                    sine = bind(load(sin, position, c, valid=valid))
                    store(y, t, column, value=a * cosine - b * sine, valid=valid)
                    store(y, t, column + half, value=b * cosine + a * sine, valid=valid)

                blocks(half, turn)
    return function.kernel()
