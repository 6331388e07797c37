"""Sums of products of bytes: what q8 and q4 weights meet quantized activations with.

Thirty-two pairs are multiplied and added up in fours, to eight sums of 32 bits, which are exact. The instruction for
that is what most tells instruction sets apart: see `isa.Isa.bytes_dot`.
"""

from tvm import tirx

from picompile_codegen.build import isa
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, intrinsic, select
from picompile_codegen.cpu.vector import LANES, at, splat, splat_int

BYTES = 4 * LANES
SUMS = f"int32x{LANES}"


def dot_unsigned(small: Expr, signed: Expr, start: Expr | None = None) -> Expr:
    """start + Σ of fours of small · signed: uint8x32 up to 128 times int8x32 gives int32x8.

    Two products together must fit 16 bits, hence the limit: 2 · 128 · 127 does.
    """
    match isa.current().bytes_dot:
        case "vnni":
            start = splat_int(0) if start is None else start
            return bind(intrinsic(SUMS, "llvm.x86.avx512.vpdpbusd.256", start, small, signed))
        case "maddubs":
            pairs = bind(intrinsic("int16x16", "llvm.x86.avx2.pmadd.ub.sw", small, signed))
            sums = _add_neighbours(pairs)
            return bind(sums if start is None else sums + start)
        case _:
            return _sdot(tirx.reinterpret(f"int8x{BYTES}", small), signed, start)


def dot_signed(a: Expr, b: Expr, start: Expr | None = None) -> Expr:
    """start + Σ of fours of a · b: two int8x32, neither of which holds -128, give int32x8."""
    if isa.current().bytes_dot == "sdot":
        return _sdot(a, b, start)
    # |a| · (b with the sign of a)
    a, b = bind(a), bind(b)
    magnitude = intrinsic(f"int8x{BYTES}", "llvm.x86.avx2.psign.b", a, a)
    turned = intrinsic(f"int8x{BYTES}", "llvm.x86.avx2.psign.b", b, a)
    return dot_unsigned(bind(tirx.reinterpret(f"uint8x{BYTES}", magnitude)), bind(turned), start)


def _sdot(a: Expr, b: Expr, start: Expr | None = None) -> Expr:
    start = bind(splat_int(0) if start is None else start)
    a, b = bind(a), bind(b)

    def half(index: int) -> Expr:
        lanes = [list(range(index * count, (index + 1) * count)) for count in (LANES // 2, BYTES // 2)]
        values = (tirx.Shuffle([start], lanes[0]), tirx.Shuffle([a], lanes[1]), tirx.Shuffle([b], lanes[1]))
        return bind(intrinsic("int32x4", "llvm.aarch64.neon.sdot.v4i32.v16i8", *values))

    return bind(tirx.Shuffle([half(0), half(1)], list(range(LANES))))


def dot_pair(low: Expr, high: Expr, signed: list[Expr]) -> Expr:
    """Σ of fours of low · signed[0] + high · signed[1], for uint8x32 below 16: int32x8."""
    if isa.current().bytes_dot != "maddubs":
        return dot_unsigned(high, signed[1], dot_unsigned(low, signed[0]))
    pairs = [
        bind(intrinsic("int16x16", "llvm.x86.avx2.pmadd.ub.sw", small, values))
        for small, values in zip((low, high), signed, strict=True)
    ]
    return _add_neighbours(bind(pairs[0] + pairs[1]))


def _add_neighbours(pairs: Expr) -> Expr:
    ones = tirx.Broadcast(tirx.IntImm("int16", 1), 2 * LANES)
    return bind(intrinsic(SUMS, "llvm.x86.avx2.pmadd.wd", pairs, ones))


def split_nibbles(words: Expr) -> tuple[Expr, Expr]:
    """The low and the high four bits of each byte of uint32x8, each as uint8x32."""
    mask, four = (tirx.Broadcast(tirx.IntImm("uint32", value), LANES) for value in (0x0F0F0F0F, 4))
    low, high = bind(words & mask), bind((words >> four) & mask)
    return bind(tirx.reinterpret(f"uint8x{BYTES}", low)), bind(tirx.reinterpret(f"uint8x{BYTES}", high))


def pack_bytes(values: list[Expr]) -> Expr:
    """The low bytes of four int32x8 as the four bytes of an int32x8, the first one lowest."""
    low = [bind(value & splat_int(255)) for value in values[:3]]
    return bind(low[0] | (low[1] << splat_int(8)) | (low[2] << splat_int(16)) | (values[3] << splat_int(24)))


def byte_inverse(largest: Expr) -> Expr:
    """What numbers of at most these magnitudes are multiplied with to become bytes: 127 over each, eight of them."""
    return select(largest > splat(0.0), splat(127.0) / largest, splat(0.0))


def byte_scale(largest: Expr, witness: Expr) -> Expr:
    """What such bytes are multiples of: `largest` over 127, or NaN where `witness` is not a finite number."""
    return largest / 127.0 + witness * 0.0


# Sums of products of 16-bit integers: what a q8 cache meets queries and weights of the softmax with.
#
# Two products are added up to one sum of 32 bits. Against conversion of bytes to float32 this halves the instructions,
# and the other factor keeps 15 bits, where `bytes.py` leaves it seven.


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


def splat_pair(words: KernelTensor, *index: Expr) -> Expr:
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
