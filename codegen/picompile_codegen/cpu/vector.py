"""Vectors of float32: how many lanes, how to load, store and combine them, and elementary functions of them."""

from collections.abc import Callable, Sequence
from functools import reduce

from tvm import tirx

from picompile_codegen.cpu.activations import Arithmetic, apply_activation, apply_expression
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, intrinsic, local, loop, maximum, minimum, select

# This and `matrix.py` are where a kernel meets the instruction set. Everything is written for AVX2 (eight lanes,
# sixteen registers); LLVM turns each operation here into one or two instructions.


LANES = 8
FLOATS = f"float32x{LANES}"


def at(start: Expr, lanes: int = LANES) -> Expr:
    """The index of `lanes` consecutive elements."""
    return tirx.Ramp(start, 1, lanes) if lanes > 1 else start


def splat(value: Expr, lanes: int = LANES) -> Expr:
    """`value` in every lane."""
    return tirx.Broadcast(tirx.FloatImm("float32", value) if isinstance(value, int | float) else value, lanes)


def splat_int(value: int, lanes: int = LANES) -> Expr:
    """An int32 in every lane."""
    return tirx.Broadcast(tirx.IntImm("int32", value), lanes)


def repeat(value: Expr, lanes: Sequence[int]) -> Expr:
    """The lanes of `value` with these numbers, in their order."""
    return tirx.Shuffle([value], list(lanes))


def to_floats(value: Expr, lanes: int = LANES) -> Expr:
    """A vector of float16 or integers as float32."""
    return tirx.Cast(f"float32x{lanes}" if lanes > 1 else "float32", value)


def fma(a: Expr, b: Expr, c: Expr, lanes: int = LANES) -> Expr:
    """a · b + c of vectors of float32, with one rounding."""
    return intrinsic(f"float32x{lanes}", "llvm.fma", a, b, c)


def total(value: Expr) -> Expr:
    """The sum of all lanes: halves first, then quarters."""
    lanes = LANES
    while lanes > 1:
        value, lanes = add_halves(value, lanes), lanes // 2
    return bind(value)


def add_halves(value: Expr, lanes: int) -> Expr:
    """The first half of the lanes plus the second."""
    value, half = bind(value), lanes // 2
    return tirx.Shuffle([value], list(range(half))) + tirx.Shuffle([value], list(range(half, lanes)))


def totals(values: Sequence[Expr], lanes: int = LANES) -> list[Expr]:
    """The sum of all lanes of each vector, as `total` makes it, to the same bits, and in fewer steps.

    Halves of two vectors are added up side by side in one, until all are. There may be no more of them than lanes.
    """
    packed, each, count = [bind(value) for value in values], lanes, 1
    packed += packed[-1:] * (2 ** (len(values) - 1).bit_length() - len(values))
    while each > 1:
        sides, half = min(2, len(packed)), each // 2
        starts = [side * lanes + i * each for side in range(sides) for i in range(count)]
        low, high = ([start + first + i for start in starts for i in range(half)] for first in (0, half))
        packed = [
            bind(tirx.Shuffle(packed[i : i + sides], low) + tirx.Shuffle(packed[i : i + sides], high))
            for i in range(0, len(packed), sides)
        ]
        each, count, lanes = half, count * sides, half * count * sides
    return [bind(tirx.Shuffle(packed, [i])) for i in range(len(values))]


def highest(value: Expr) -> Expr:
    """The largest of all lanes."""
    lanes = LANES
    while lanes > 1:
        value, lanes = bind(value), lanes // 2
        value = maximum(tirx.Shuffle([value], list(range(lanes))), tirx.Shuffle([value], list(range(lanes, 2 * lanes))))
    return bind(value)


def zero_vector() -> KernelTensor:
    """A vector of float32 on the stack, all 0: a tensor of eight elements."""
    vector = local(LANES)
    vector[at(0)] = splat(0.0)
    return vector


def zero_vectors(count: int, lanes: int = LANES) -> KernelTensor:
    """`count` vectors of float32 on the stack, all 0: a tensor [count, lanes]."""
    vectors = local(count, lanes)
    for i in range(count):
        vectors[i, at(0, lanes)] = splat(0.0, lanes)
    return vectors


def four_totals(values: list[Expr]) -> Expr:
    """The sums of the lanes of each of four vectors: four lanes."""
    halves = _add_neighbours(_add_neighbours(values[0], values[1]), _add_neighbours(values[2], values[3]))
    return bind(tirx.Shuffle([halves], [0, 1, 2, 3]) + tirx.Shuffle([halves], [4, 5, 6, 7]))


def eight_totals(values: list[Expr]) -> Expr:
    """The sums of the lanes of each of eight vectors: eight lanes."""
    return bind(tirx.Shuffle([four_totals(values[:4]), four_totals(values[4:])], list(range(8))))


def _add_neighbours(a: Expr, b: Expr) -> Expr:
    """Add neighbouring lanes: each half of the result has two sums from a and two from b."""
    a, b = bind(a), bind(b)
    return bind(tirx.Shuffle([a, b], [0, 2, 8, 10, 4, 6, 12, 14]) + tirx.Shuffle([a, b], [1, 3, 9, 11, 5, 7, 13, 15]))


def whole_vectors(width: int) -> int:
    """Return `width` elements rounded up to whole vectors."""
    return -(-width // LANES) * LANES


def blocks(width: int, body: Callable[[Expr, int], None], unroll: int = 1, lanes: int = LANES) -> None:
    """Run `body(start, valid)` for each vector of a row of `width` elements.

    `valid` is `lanes` in all but the last, which holds what is left over. The loop is not unrolled but `unroll` times,
    so that a kernel stays small whatever the width.
    """
    step = lanes * unroll
    full = width // step
    if full:
        with loop(0, full) as index:
            for i in range(unroll):
                body(index * step + i * lanes, lanes)
    for start in range(full * step, width, lanes):
        body(start, min(lanes, width - start))


def load(tensor: KernelTensor, *index: Expr, valid: int = LANES, fill: Expr = 0.0, lanes: int = LANES) -> Expr:
    """A vector of float32 from `tensor`, of which the first `valid` lanes are read and the others are `fill`."""
    *outer, start = index
    if valid == lanes:
        whole = tensor[(*outer, at(start, lanes))]
        return whole if tensor.dtype == "float32" else to_floats(whole, lanes)
    rest = tirx.FloatImm("float32", fill) if isinstance(fill, float) else fill
    scalars = [tirx.Cast("float32", tensor[(*outer, start + i)]) if i < valid else rest for i in range(lanes)]
    return tirx.Shuffle(scalars, list(range(lanes)))


def store(tensor: KernelTensor, *index: Expr, value: Expr, valid: int = LANES) -> None:
    """Write the first `valid` lanes of `value`, a vector of float32, to `tensor` in the tensor's type."""
    *outer, start = index
    if tensor.dtype != "float32":
        value = tirx.Cast(f"{tensor.dtype}x{LANES}", value)
    if valid == LANES:
        tensor[(*outer, at(start))] = value
        return
    value = bind(value)
    for i in range(valid):
        tensor[(*outer, start + i)] = tirx.Shuffle([value], [i])


def transpose(rows: list[Expr]) -> list[Expr]:
    """Transpose as many vectors of 32-bit elements as they have lanes, 8 or 16: vector i of the result has element i of
    each. It takes 24 or 64 instructions.
    """
    count, rows = len(rows), [bind(row) for row in rows]
    quarters = count // 4
    # Within quarters of vectors: vector 4 · a + j has, in its quarter q, element 4 · q + j of rows 4 · a … 4 · a + 3.
    fours = []
    for first in range(0, count, 4):
        a, b, c, d = rows[first : first + 4]
        low, high = _in_quarters((0, count, 1, count + 1), count), _in_quarters((2, count + 2, 3, count + 3), count)
        pairs = [(_shuffle(a, b, lanes), _shuffle(c, d, lanes)) for lanes in (low, high)]
        low, high = _in_quarters((0, 1, count, count + 1), count), _in_quarters((2, 3, count + 2, count + 3), count)
        fours += [_shuffle(*pair, lanes) for pair in pairs for lanes in (low, high)]
    # For each j the quarters of all vectors with j are transposed.
    if quarters == 2:
        return [_shuffle(fours[j], fours[4 + j], _quarters_of((q, 2 + q))) for q in range(2) for j in range(4)]
    evens, odds = _quarters_of((0, 2, 4, 6)), _quarters_of((1, 3, 5, 7))
    halves = [
        [_shuffle(fours[i + j], fours[i + 4 + j], lanes) for lanes in (evens, odds) for i in (0, 8)] for j in range(4)
    ]
    return [
        _shuffle(halves[j][q % 2 * 2], halves[j][q % 2 * 2 + 1], (evens, odds)[q // 2])
        for q in range(4)
        for j in range(4)
    ]


def _in_quarters(lanes: Sequence[int], count: int) -> list[int]:
    """Return the lanes that a shuffle of four lanes takes in each four of two vectors of `count`."""
    return [start + lane for start in range(0, count, 4) for lane in lanes]


def _quarters_of(numbers: Sequence[int]) -> list[int]:
    """Return the lanes of fours of two vectors, counted through."""
    return [4 * number + lane for number in numbers for lane in range(4)]


def _shuffle(a: Expr, b: Expr, lanes: list[int]) -> Expr:
    return bind(tirx.Shuffle([a, b], lanes))


# Elementary functions are polynomials here: calls of libm would take one lane at a time. Each agrees with the exact
# function to about 1e-7 of its value unless its docstring says otherwise.

# ln 2 in two parts, the first exact in few bits, so that x - n ln 2 loses nothing.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_LOG2_E = 1.44269504088896341

# Beyond these e^x is not a normal float32 number.
_EXP_MIN, _EXP_MAX = -87.33654, 88.72283

# e^r = 1 + r + r² p(r) for |r| <= ln 2 / 2 (Cephes, expf.c), highest power first.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)

# tanh x = x + x³ p(x²) for |x| < 0.625 (Cephes, tanhf.c).
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
_TANH_SMALL = 0.625

# erf x = x p(x²) / q(x²) for |x| <= 4, where it is 1 in float32 (Eigen, MathFunctionsImpl.h).
_ERF_P = (
    -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05, -7.34990630326855e-04,
    -2.95459980854025e-03, -1.60960333262415e-02,
)  # fmt: skip
_ERF_Q = (
    -1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03, -1.42647390514189e-02,
)  # fmt: skip
_ERF_MAX = 4.0

# log(1 + x) = x - x²/2 + x³ p(x) for sqrt(1/2) <= 1 + x <= sqrt 2 (Cephes, logf.c).
_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
_SQRT2, _LN2 = 1.41421356237, 0.69314718056


def _polynomial(x: Expr, coefficients: tuple[float, ...]) -> Expr:
    """Evaluate a polynomial by Horner's rule, highest power first."""
    first, *rest = (splat(coefficient) for coefficient in coefficients)
    return reduce(lambda value, coefficient: bind(fma(value, x, coefficient)), rest, first)


def exp(x: Expr) -> Expr:
    """e^x; where that is below 1e-38 the result is about 1e-38."""
    x = bind(maximum(minimum(x, splat(_EXP_MAX)), splat(_EXP_MIN)))
    n = bind(tirx.floor(fma(x, splat(_LOG2_E), splat(0.5))))
    r = bind(fma(n, splat(-_LN2_LOW), fma(n, splat(-_LN2_HIGH), x)))
    mantissa = bind(fma(_polynomial(r, _EXP), bind(r * r), r + splat(1.0)))
    # 2^n: n goes where a float32 keeps its exponent. 2^128 is not representable, hence in two factors.
    half = bind(tirx.floor(n * splat(0.5)))
    return bind(mantissa * _power_of_two(half) * _power_of_two(n - half))


def exp_of_negative(x: Expr) -> Expr:
    """e^x for x <= 0, in fewer instructions; where that is below 1e-38 the result is about 1e-38."""
    x = bind(maximum(x, splat(_EXP_MIN)))
    n = bind(tirx.floor(fma(x, splat(_LOG2_E), splat(0.5))))
    r = bind(fma(n, splat(-_LN2_LOW), fma(n, splat(-_LN2_HIGH), x)))
    mantissa = bind(fma(_polynomial(r, _EXP), bind(r * r), r + splat(1.0)))
    return bind(mantissa * _power_of_two(n))


def _power_of_two(n: Expr) -> Expr:
    bits = tirx.Cast(f"int32x{LANES}", n) + tirx.Broadcast(tirx.IntImm("int32", 127), LANES)
    return tirx.reinterpret(f"float32x{LANES}", bits << tirx.Broadcast(tirx.IntImm("int32", 23), LANES))


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + e^-x)."""
    return bind(splat(1.0) / (splat(1.0) + exp(splat(0.0) - x)))


def tanh(x: Expr) -> Expr:
    """The hyperbolic tangent."""
    x = bind(x)
    square = bind(x * x)
    small = fma(_polynomial(square, _TANH), bind(square * x), x)
    large = splat(1.0) - splat(2.0) / (exp(x + x) + splat(1.0))
    return bind(select(tirx.abs(x) < splat(_TANH_SMALL), small, large))


def erf(x: Expr) -> Expr:
    """The error function, to about 1e-7 absolutely."""
    x = bind(maximum(minimum(x, splat(_ERF_MAX)), splat(-_ERF_MAX)))
    square = bind(x * x)
    return bind(x * _polynomial(square, _ERF_P) / _polynomial(square, _ERF_Q))


def log_of_one_plus(x: Expr) -> Expr:
    """log(1 + x) for 0 <= x <= 1."""
    x = bind(x)
    is_large = x > splat(_SQRT2 - 1)
    # log(1 + x) = log 2 + log(1 + (x - 1) / 2)
    rest = bind(select(is_large, (x - splat(1.0)) * splat(0.5), x))
    square = bind(rest * rest)
    value = fma(splat(-0.5), square, fma(_polynomial(rest, _LOG), bind(square * rest), rest))
    return bind(value + select(is_large, splat(_LN2), splat(0.0)))


def softplus(x: Expr) -> Expr:
    """log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)."""
    x = bind(x)
    return bind(maximum(x, splat(0.0)) + log_of_one_plus(exp_of_negative(splat(0.0) - tirx.abs(x))))


_ARITHMETIC = Arithmetic(splat, sigmoid, tanh, erf, exp, softplus)


def activate(text: str, x: Expr) -> Expr:
    """Return the activation that `text` names, of each lane of x. Raises `ValueError` for one that is not known."""
    return apply_activation(text, x, _ARITHMETIC)


def compute(expression: str, inputs: list[Expr]) -> Expr:
    """Return the value of an expression of `elementwise` in each lane."""
    return apply_expression(expression, inputs, _ARITHMETIC)
