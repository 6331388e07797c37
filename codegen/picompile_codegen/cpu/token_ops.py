"""The rows of a step: how many count, and at which position of which sequence each of them is.

A kernel that depends on positions is made for one mode:
`one`    the next token of one sequence: position step[1], slot step[2];
`chunk`  consecutive tokens of one sequence: row t has position step[1] + t, slot step[2];
`batch`  each row is the next token of a sequence of its own: positions int32 [rows] and slots int32 [rows].
A slot is a sequence's place in the caches. Where they have one place only, nobody asks for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Literal

from tvm import tirx

from picompile_codegen.cpu.kernel import Kernel, KernelFunction
from picompile_codegen.cpu.matrix import each_group, matrix_argument
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, local, loop, parallel
from picompile_codegen.cpu.vector import LANES, at, blocks, load, splat, store, total
from picompile_passes.dialect.formats import GROUP

Mode = Literal["one", "chunk", "batch"]


@dataclass(frozen=True)
class StepRows:
    """`count` rows; `position` and `slot` of a row."""

    count: Expr
    position: Callable[[Expr], Expr]
    slot: Callable[[Expr], Expr]


def mode_name(mode: Mode, rows: int) -> str:
    """What tells a kernel of one mode from one of another."""
    return f"b{rows}" if mode == "batch" else f"r{rows}"


def step_rows(function: KernelFunction, mode: Mode, rows: int, context: int, sequences: int) -> StepRows:
    """Declares what `mode` needs and reads what it says of all rows: positions below `context`, slots below
    `sequences`. With 1 of these only positions are asked for.
    """
    count = function.tokens(rows)
    if mode == "batch":
        positions = function.argument("positions", "int32", rows, below=context)
        if sequences == 1:
            return StepRows(count, lambda row: positions[row], lambda _: 0)
        slots = function.argument("slots", "int32", rows, below=sequences)
        return StepRows(count, lambda row: positions[row], lambda row: slots[row])
    first, slot = function.position(context), 0 if sequences == 1 else function.slot(sequences)
    return StepRows(count, lambda row: bind(first + row) if mode == "chunk" else first, lambda _: slot)


# Adding two values, and keeping the last row of one.


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


# Embedding: rows of a table.


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


# Normalization of each token's activations.


# Independent sums, so that an addition need not wait for the one before.
_CHAINS = 4


def rms_norm(*, dim: int, rows: int, eps: float) -> Kernel:
    """y = x / sqrt(mean(x²) + eps) · weight. x float32 [rows, dim], weight float32 [dim] → y like x."""
    function = KernelFunction("rms_norm", dim, f"r{rows}", eps)
    with function:
        x, weight, y = function.floats("x", rows, dim), function.floats("weight", dim), function.floats("y", rows, dim)
        with parallel(function.tokens(rows), when_worth=rows > 1) as t:
            mean_square = _sum(x, t, dim, lambda value: value * value) / float(dim)
            factor = bind(splat(_inverse_root(mean_square, eps)))

            def scale(c: Expr, valid: int) -> None:
                value = load(x, t, c, valid=valid) * factor * load(weight, c, valid=valid)
                store(y, t, c, value=value, valid=valid)

            blocks(dim, scale)
    return function.kernel()


def layer_norm(*, dim: int, rows: int, eps: float, weight: bool, bias: bool) -> Kernel:
    """y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias. x float32 [rows, dim], weight, bias [dim] → y like x."""
    function = KernelFunction("layer_norm", dim, f"r{rows}", eps, "w" * weight + "b" * bias)
    with function:
        x = function.floats("x", rows, dim)
        weights = function.optional_floats("weight", dim, weight)
        biases = function.optional_floats("bias", dim, bias)
        y = function.floats("y", rows, dim)
        with parallel(function.tokens(rows), when_worth=rows > 1) as t:
            center = bind(_sum(x, t, dim, lambda value: value) / float(dim))
            mean = bind(splat(center))
            variance = _sum(x, t, dim, lambda value: (value - mean) * (value - mean), fill=center) / float(dim)
            factor = bind(splat(_inverse_root(variance, eps)))

            def scale(c: Expr, valid: int) -> None:
                value = (load(x, t, c, valid=valid) - mean) * factor
                if weights is not None:
                    value = value * load(weights, c, valid=valid)
                if biases is not None:
                    value = value + load(biases, c, valid=valid)
                store(y, t, c, value=value, valid=valid)

            blocks(dim, scale)
    return function.kernel()


def _inverse_root(value: Expr, eps: float) -> Expr:
    return bind(tirx.FloatImm("float32", 1.0) / tirx.sqrt(value + tirx.FloatImm("float32", eps)))


def _sum(x: KernelTensor, token: Expr, dim: int, term: Callable[[Expr], Expr], fill: Expr = 0.0) -> Expr:
    """Σ term(x[token, c]) over c. Lanes past the end enter as `fill`, whose term must be 0."""
    sums = local(_CHAINS * LANES)
    for chain in range(_CHAINS):
        sums[at(chain * LANES)] = splat(0.0)
    chains = cycle(range(_CHAINS))

    def add(c: Expr, valid: int) -> None:
        index = at(next(chains) * LANES)
        sums[index] = sums[index] + term(bind(load(x, token, c, valid=valid, fill=fill)))

    blocks(dim, add, unroll=_CHAINS)
    first, second, third, fourth = (sums[at(chain * LANES)] for chain in range(_CHAINS))
    return total((first + second) + (third + fourth))


# Rotary position embedding.


@dataclass(frozen=True)
class Angles:
    """Cosines and sines of the angles of each position, float32 [context, d/2]."""

    cos: KernelTensor
    sin: KernelTensor

    def turn(
        self,
        x: KernelTensor,
        row: Expr,
        start: Expr,
        half: int,
        position: Expr,
        emit: Callable[[Expr, Expr, int], None],
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
