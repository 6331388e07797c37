"""Sums of products of 16-bit integers: what a q8 cache meets queries and weights of the softmax with.

Two products are added up to one sum of 32 bits. Against conversion of bytes to float32 this halves the instructions,
and the other factor keeps 15 bits, where `bytes.py` leaves it seven.
"""

from tvm import tirx

from picompile_codegen import isa
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, intrinsic
from picompile_codegen.kernels.vector import LANES, at

WORDS = 2 * LANES
LARGEST_WORD = 32767.0
_SUMS = f"int32x{LANES}"


def dot_pairs(a: Expr, b: Expr) -> Expr:
    """a[2i] · b[2i] + a[2i + 1] · b[2i + 1]: two int16x16 give int32x8."""
    if isa.current().machine == "x86_64":
        return intrinsic(_SUMS, "llvm.x86.avx2.pmadd.wd", a, b)
    a, b = bind(a), bind(b)
    return _products(a, b, 0) + _products(a, b, 1)


def _products(a: Expr, b: Expr, first: int) -> Expr:
    lanes = list(range(first, WORDS, 2))
    return tirx.Cast(_SUMS, tirx.Shuffle([a], lanes)) * tirx.Cast(_SUMS, tirx.Shuffle([b], lanes))


def to_words(value: Expr) -> Expr:
    """float32x8 of whole numbers as int16x8."""
    return tirx.Cast(f"int16x{LANES}", tirx.Cast(_SUMS, value))


def zeros() -> Expr:
    """int32x8 of zeros."""
    return tirx.Broadcast(tirx.IntImm("int32", 0), LANES)


def splat_pair(words: Tensor, *index: Expr) -> Expr:
    """words[index] and the next, again and again: int16x16."""
    *outer, start = index
    pair = tirx.reinterpret("int32", words[(*outer, at(start, 2))])
    return bind(tirx.reinterpret(f"int16x{WORDS}", tirx.Broadcast(pair, LANES)))


def interleave(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """a[0], b[0], a[1], b[1] … of int16x16: elements 0-3 and 8-11, and the others, as one instruction each gives."""
    low = [lane for i in (0, 1, 2, 3, 8, 9, 10, 11) for lane in (i, WORDS + i)]
    return bind(tirx.Shuffle([a, b], low)), bind(tirx.Shuffle([a, b], [lane + 4 for lane in low]))


def in_order(low: Expr, high: Expr) -> tuple[Expr, Expr]:
    """Two float32x8 whose elements are in the order of `interleave`: the first eight, and the last."""
    return (
        tirx.Shuffle([low, high], [0, 1, 2, 3, 8, 9, 10, 11]),
        tirx.Shuffle([low, high], [4, 5, 6, 7, 12, 13, 14, 15]),
    )
