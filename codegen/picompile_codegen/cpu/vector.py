"""Vectors of float32: how many lanes, how to load, store and combine them.

This and `matrix.py` are where a kernel meets the instruction set. Everything is written for AVX2 (eight lanes, sixteen
registers); LLVM turns each operation here into one or two instructions.
"""

from collections.abc import Callable

from tvm import tirx

from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, intrinsic, loop, maximum

LANES = 8
FLOATS = f"float32x{LANES}"


def at(start: Expr, lanes: int = LANES) -> Expr:
    """The index of `lanes` consecutive elements."""
    return tirx.Ramp(start, 1, lanes) if lanes > 1 else start


def splat(value: Expr, lanes: int = LANES) -> Expr:
    """`value` in every lane."""
    return tirx.Broadcast(tirx.FloatImm("float32", value) if isinstance(value, int | float) else value, lanes)


def splat_int(value: int) -> Expr:
    """An int32 in every lane."""
    return tirx.Broadcast(tirx.IntImm("int32", value), LANES)


def lane(value: Expr, index: int) -> Expr:
    """Lane `index` of eight, in every lane."""
    return tirx.Shuffle([value], [index] * LANES)


def to_floats(value: Expr, lanes: int = LANES) -> Expr:
    """A vector of float16 or integers as float32."""
    return tirx.Cast(f"float32x{lanes}" if lanes > 1 else "float32", value)


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    """a · b + c of vectors of float32, with one rounding."""
    return intrinsic(FLOATS, "llvm.fma", a, b, c)


def total(value: Expr) -> Expr:
    """The sum of all lanes: halves first, then quarters."""
    lanes = LANES
    while lanes > 1:
        value, lanes = bind(value), lanes // 2
        value = tirx.Shuffle([value], list(range(lanes))) + tirx.Shuffle([value], list(range(lanes, 2 * lanes)))
    return bind(value)


def highest(value: Expr) -> Expr:
    """The largest of all lanes."""
    lanes = LANES
    while lanes > 1:
        value, lanes = bind(value), lanes // 2
        value = maximum(tirx.Shuffle([value], list(range(lanes))), tirx.Shuffle([value], list(range(lanes, 2 * lanes))))
    return bind(value)


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


def blocks(width: int, body: Callable[[Expr, int], None], unroll: int = 1) -> None:
    """Runs `body(start, valid)` for each vector of a row of `width` elements.

    `valid` is LANES in all but the last, which holds what is left over. The loop is not unrolled but `unroll` times, so
    that a kernel stays small whatever the width.
    """
    step = LANES * unroll
    full = width // step
    if full:
        with loop(0, full) as index:
            for i in range(unroll):
                body(index * step + i * LANES, LANES)
    for start in range(full * step, width, LANES):
        body(start, min(LANES, width - start))


def load(tensor: KernelTensor, *index: Expr, valid: int = LANES, fill: Expr = 0.0) -> Expr:
    """A vector of float32 from `tensor`, of which the first `valid` lanes are read and the others are `fill`."""
    *outer, start = index
    if valid == LANES:
        whole = tensor[(*outer, at(start))]
        return whole if tensor.dtype == "float32" else to_floats(whole)
    rest = tirx.FloatImm("float32", fill) if isinstance(fill, float) else fill
    scalars = [tirx.Cast("float32", tensor[(*outer, start + i)]) if i < valid else rest for i in range(LANES)]
    return tirx.Shuffle(scalars, list(range(LANES)))


def store(tensor: KernelTensor, *index: Expr, value: Expr, valid: int = LANES) -> None:
    """Writes the first `valid` lanes of `value`, a vector of float32, to `tensor` in the tensor's type."""
    *outer, start = index
    if tensor.dtype != "float32":
        value = tirx.Cast(f"{tensor.dtype}x{LANES}", value)
    if valid == LANES:
        tensor[(*outer, at(start))] = value
        return
    value = bind(value)
    for i in range(valid):
        tensor[(*outer, start + i)] = tirx.Shuffle([value], [i])


# Transposition.


_PAIRS = ([0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15])
_FOURS = ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])
_HALVES = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])


def transpose(rows: list[Expr]) -> list[Expr]:
    """Eight vectors of eight: vector i of the result holds element i of each. Three times eight instructions."""
    rows = [bind(row) for row in rows]
    pairs = [_shuffle(rows[i], rows[i + 1], lanes) for i in range(0, LANES, 2) for lanes in _PAIRS]
    fours = [_shuffle(pairs[i + k], pairs[i + 2 + k], lanes) for i in (0, 4) for k in range(2) for lanes in _FOURS]
    return [_shuffle(fours[i], fours[4 + i], lanes) for lanes in _HALVES for i in range(4)]


def _shuffle(a: Expr, b: Expr, lanes: list[int]) -> Expr:
    return bind(tirx.Shuffle([a, b], lanes))
