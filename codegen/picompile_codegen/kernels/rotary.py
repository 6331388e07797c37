"""Rotary position embedding."""

from collections.abc import Callable
from dataclasses import dataclass

from picompile_codegen.kernels.kernel import Kernel, KernelFunction
from picompile_codegen.kernels.step_rows import Mode, mode_name, step_rows
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, loop, parallel
from picompile_codegen.kernels.vector import blocks, load, store


@dataclass(frozen=True)
class Angles:
    """Cosines and sines of the angles of each position, float32 [context, d/2]."""

    cos: Tensor
    sin: Tensor

    def turn(
        self, x: Tensor, row: Expr, start: Expr, half: int, position: Expr, emit: Callable[[Expr, Expr, int], None]
    ) -> None:
        """Turns the head x[row, start …], 2 · half wide, at `position`: `emit(column, value, valid)` gets the result,
        a vector at a time."""

        def turn(c: Expr, valid: int) -> None:
            a = bind(load(x, row, start + c, valid=valid))
            b = bind(load(x, row, start + half + c, valid=valid))
            cosine = bind(load(self.cos, position, c, valid=valid))
            sine = bind(load(self.sin, position, c, valid=valid))
            emit(c, a * cosine - b * sine, valid)
            emit(c + half, b * cosine + a * sine, valid)

        blocks(half, turn)


def angles_argument(function: KernelFunction, context: int, half: int) -> Angles:
    """Declares the tables."""
    return Angles(function.floats("cos", context, half), function.floats("sin", context, half))


def rotary(*, heads: int, head_dim: int, rows: int, context: int, mode: Mode) -> Kernel:
    """Turns each head's (x[i], x[i + d/2]) by the angle of its position, whose cosine and sine are in tables.

    x float32 [rows, heads · d], cos and sin float32 [context, d/2] → y like x. Positions: see `step_rows`.
    """
    half = head_dim // 2
    function = KernelFunction("rotary", f"{heads}x{head_dim}", mode_name(mode, rows), f"c{context}")
    with function:
        x = function.floats("x", rows, heads * head_dim)
        angles = angles_argument(function, context, half)
        y = function.floats("y", rows, heads * head_dim)
        tokens = step_rows(function, mode, rows, context, sequences=1)
        with parallel(tokens.count, when_worth=rows > 1) as t:
            position = bind(tokens.position(t))
            with loop(0, heads) as head:
                start = head * head_dim

                def emit(column: Expr, value: Expr, valid: int) -> None:
                    store(y, t, start + column, value=value, valid=valid)

                angles.turn(x, t, start, half, position, emit)
    return function.kernel()
