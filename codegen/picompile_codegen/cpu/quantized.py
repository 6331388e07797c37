"""Activations as bytes, and exact products of integers.

Each 32 consecutive activations share a scale, the largest magnitude over 127; each becomes the nearest multiple of it,
the even one of two. llama.cpp does so as well (Q8_0), with a float16 scale where this has a float32 one.

With two bytes the scale is the largest magnitude over 16319, and a multiple of it is 128 · high + low: neither of these
bytes is ever -128, which some instructions cannot negate, and a shift and an addition join their sums. Errors are then
128 times smaller.

Σ (raw + offset) · scale_w · bytes · scale_x is an integer sum times both scales, plus offset · scale_w · scale_x ·
Σ bytes. In the second term all but scale_w is the same for every row: `offsets` holds it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.build import isa
from picompile_codegen.cpu.decode import look_up
from picompile_codegen.cpu.matrix import KernelMatrix, each_group
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, intrinsic, local, loop, maximum, select
from picompile_codegen.cpu.vector import LANES, at, highest, load, splat, splat_int, store, total
from picompile_passes.formats import GROUP

# Products of bytes, for weights of 8 bits or fewer: thirty-two pairs are multiplied and added up in fours, to eight
# exact sums of 32 bits. Instruction sets differ most in the instruction for that, see `isa.Isa.bytes_dot`.


BYTES_OF_LANE = 4
BYTES = BYTES_OF_LANE * LANES
SUMS = f"int32x{LANES}"


def dot_unsigned(small: Expr, signed: Expr, start: Expr | None = None, lanes: int = LANES) -> Expr:
    """start + Σ of fours of small · signed: uint8 up to 128 times int8, four for each lane, give int32 of each lane.

    Two products together must fit 16 bits, hence the limit: 2 · 128 · 127 does.
    """
    match isa.current().bytes_dot:
        case "vnni":
            start = splat_int(0, lanes) if start is None else start
            return bind(intrinsic(f"int32x{lanes}", f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", start, small, signed))
        case "maddubs":
            sums = add_neighbours(multiply_pairs(small, signed, lanes), lanes)
            return bind(sums if start is None else sums + start)
        case _:
            return _sdot(tirx.reinterpret(f"int8x{BYTES}", small), signed, start)


def multiply_pairs(small: Expr, signed: Expr, lanes: int = LANES) -> Expr:
    """Σ of pairs of small · signed, as AVX2 multiplies: four uint8 times four int8 a lane give two int16."""
    name = "llvm.x86.avx2.pmadd.ub.sw" if lanes == LANES else "llvm.x86.avx512.pmaddubs.w.512"
    return bind(intrinsic(f"int16x{2 * lanes}", name, small, signed))


def add_neighbours(pairs: Expr, lanes: int = LANES) -> Expr:
    """Σ of pairs: two int16 give an int32 in each lane."""
    ones = tirx.Broadcast(tirx.IntImm("int16", 1), 2 * lanes)
    name = "llvm.x86.avx2.pmadd.wd" if lanes == LANES else "llvm.x86.avx512.pmaddw.d.512"
    return bind(intrinsic(f"int32x{lanes}", name, pairs, ones))


def dot_signed(a: Expr, b: Expr, start: Expr | None = None, lanes: int = LANES) -> Expr:
    """start + Σ of fours of a · b, int32 of each lane: of int8, four for each lane, none of which is -128."""
    if isa.current().bytes_dot == "sdot":
        return _sdot(a, b, start)
    if lanes > LANES:
        # AVX-512 has no instruction that gives a number the sign of another.
        a, b, zeros = bind(a), bind(b), tirx.Broadcast(tirx.IntImm("int8", 0), 4 * lanes)
        is_negative = a < zeros
        magnitude = tirx.reinterpret(f"uint8x{4 * lanes}", bind(select(is_negative, zeros - a, a)))
        return dot_unsigned(bind(magnitude), bind(select(is_negative, zeros - b, b)), start, lanes)
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


def dot_pair(low: Expr, high: Expr, signed: list[Expr], lanes: int = LANES) -> Expr:
    """Σ of fours of low · signed[0] + high · signed[1], int32 of each lane, for uint8 below 64, four for each lane.

    Four products together must fit 16 bits, hence the limit: 4 · 63 · 127 does.
    """
    if isa.current().bytes_dot != "maddubs":
        return dot_unsigned(high, signed[1], dot_unsigned(low, signed[0], lanes=lanes), lanes)
    pairs = [multiply_pairs(small, values, lanes) for small, values in zip((low, high), signed, strict=True)]
    return add_neighbours(bind(pairs[0] + pairs[1]), lanes)


def dot_signed_pair(low: Expr, high: Expr, signed: list[Expr], lanes: int = LANES) -> Expr:
    """Return the sums that `dot_pair` does, for int8."""
    return dot_signed(high, signed[1], dot_signed(low, signed[0], lanes=lanes), lanes)


def split_codes(words: Expr, plane: Expr | None = None, bit: int = 0, lanes: int = LANES) -> tuple[Expr, Expr]:
    """The low and the high four bits of each byte of uint32 words, each as four uint8 a word.

    Above them come two bits each of `plane`, words as well, if there is one: in each byte those from `bit` on belong to
    the low four, the two behind to the high four.
    """
    mask, four = _words(0x0F0F0F0F, lanes), _words(4, lanes)
    low, high = bind(words & mask), bind((words >> four) & mask)
    if plane is not None:
        low = bind(low | _fifth_and_sixth(plane, bit, lanes))
        high = bind(high | _fifth_and_sixth(plane, bit + 2, lanes))
    return bind(tirx.reinterpret(f"uint8x{4 * lanes}", low)), bind(tirx.reinterpret(f"uint8x{4 * lanes}", high))


def decode_codes(
    matrix: KernelMatrix, words: Expr, plane: Expr | None = None, bit: int = 0, lanes: int = LANES, offset: float = 0.0
) -> tuple[Expr, Expr]:
    """Return the raw values of the codes that `split_codes` gives, as bytes.

    Those in a table are such that `offset`, or else `matrix.offset`, is to be added to them.
    """
    low, high = split_codes(words, plane, bit, lanes)
    table, bias = matrix.form.table, -int(offset or matrix.offset)
    if not table:
        return low, high
    values, dtype = [value + bias for value in table], "int8" if min(table) + bias < 0 else "uint8"
    return look_up(values, low, 4 * lanes, dtype), look_up(values, high, 4 * lanes, dtype)


def high_words(matrix: KernelMatrix, number: Expr, group: Expr, lanes: int) -> Expr:
    """Return the high bits of group `group` of a row and of those beside it, uint32 of each lane, for `split_codes`.

    Sixteen lanes have those of four groups at once: behind the words of the first two come the same with the upper half
    of each byte in its lower half.
    """
    words = bind(tirx.reinterpret(f"uint32x{LANES}", bind(matrix.high_bits(number, group))))
    if lanes == LANES:
        return words
    shifted = bind(words >> _words(4, LANES))
    return bind(tirx.Shuffle([words, shifted], list(range(lanes))))


def _fifth_and_sixth(words: Expr, bit: int, lanes: int) -> Expr:
    """Two bits of each byte of words, from `bit` on, as the fifth and the sixth bit of each, and zeros besides."""
    left = 4 - bit
    if left:
        words = words << _words(left, lanes) if left > 0 else words >> _words(-left, lanes)
    return words & _words(0x30303030, lanes)


def _words(value: int, lanes: int) -> Expr:
    return tirx.Broadcast(tirx.IntImm("uint32", value), lanes)


def pack_bytes(values: list[Expr], lanes: int = LANES) -> Expr:
    """The low bytes of four vectors of int32 as the four bytes of each int32 of one, the first one lowest."""
    low = [bind(value & splat_int(255, lanes)) for value in values[:3]]
    high = values[3] << splat_int(24, lanes)
    return bind(low[0] | (low[1] << splat_int(8, lanes)) | (low[2] << splat_int(16, lanes)) | high)


# The largest magnitude of an activation over its scale, by its bytes.
LARGEST_BYTES = {1: 127.0, 2: 128.0 * 127.0 + 63.0}


def joined_sums(high: Expr, low: Expr, lanes: int) -> Expr:
    """Return the sums, int32, of products with both bytes of activations: 128 · high + low."""
    return bind((high << splat_int(7, lanes)) + low)


def byte_inverse(largest: Expr, lanes: int = LANES, most: float = LARGEST_BYTES[1]) -> Expr:
    """Return the factors that make numbers of at most these magnitudes whole ones up to `most`, which is 127."""
    return select(largest > splat(0.0, lanes), splat(most, lanes) / largest, splat(0.0, lanes))


def byte_scale(largest: Expr, witness: Expr, lanes: int = 1, most: float = LARGEST_BYTES[1]) -> Expr:
    """Return the scale of such bytes: `largest` over 127, or NaN where `witness` is not a finite number.

    As one of LLVM's functions: TVM makes 0 of a product with 0.
    """
    dtype = "float32" if lanes == 1 else f"float32x{lanes}"
    zero = tirx.FloatImm("float32", 0.0) if lanes == 1 else splat(0.0, lanes)
    return intrinsic(dtype, "llvm.fma", witness, zero, largest / most)


# Products of 16-bit integers, for a q8 cache: two products are added up to one sum of 32 bits. This takes half the
# instructions of converting bytes to float32, and the other factor keeps 15 bits, where bytes would leave it seven.


LARGEST_WORD = 32767.0


def dot_pairs(a: Expr, b: Expr, lanes: int = LANES) -> Expr:
    """a[2i] · b[2i] + a[2i + 1] · b[2i + 1] of int16, two for each lane: int32 of each lane."""
    if isa.current().machine == "x86_64":
        name = "llvm.x86.avx2.pmadd.wd" if lanes == LANES else "llvm.x86.avx512.pmaddw.d.512"
        return intrinsic(f"int32x{lanes}", name, a, b)
    a, b = bind(a), bind(b)
    return _products(a, b, 0, lanes) + _products(a, b, 1, lanes)


def _products(a: Expr, b: Expr, first: int, lanes: int) -> Expr:
    of_lanes, sums = list(range(first, 2 * lanes, 2)), f"int32x{lanes}"
    return tirx.Cast(sums, tirx.Shuffle([a], of_lanes)) * tirx.Cast(sums, tirx.Shuffle([b], of_lanes))


def to_words(value: Expr) -> Expr:
    """float32x8 of whole numbers as int16x8."""
    return tirx.Cast(f"int16x{LANES}", tirx.Cast(f"int32x{LANES}", value))


def zeros(lanes: int = LANES) -> Expr:
    """int32 zeros."""
    return tirx.Broadcast(tirx.IntImm("int32", 0), lanes)


def splat_pair(words: KernelTensor, *index: Expr, lanes: int) -> Expr:
    """words[index] and the next, again and again: int16, two for each lane."""
    *outer, start = index
    pair = tirx.reinterpret("int32", words[(*outer, at(start, 2))])
    return bind(tirx.reinterpret(f"int16x{2 * lanes}", tirx.Broadcast(pair, lanes)))


def interleave(a: Expr, b: Expr, lanes: int = LANES) -> tuple[Expr, Expr]:
    """a[0], b[0], a[1], b[1] … of int16, two for each lane: the first four elements of each eight, and the others, as
    one instruction each gives."""
    words = 2 * lanes
    low = [lane for start in range(0, words, 8) for i in range(start, start + 4) for lane in (i, words + i)]
    return bind(tirx.Shuffle([a, b], low)), bind(tirx.Shuffle([a, b], [lane + 4 for lane in low]))


def in_order(low: Expr, high: Expr, lanes: int = LANES) -> tuple[Expr, Expr]:
    """Two float32 vectors whose elements are in the order of `interleave`: the first half, and the last."""
    both = [start + i + of_high for start in range(0, lanes, 4) for of_high in (0, lanes) for i in range(4)]
    return tirx.Shuffle([low, high], both[:lanes]), tirx.Shuffle([low, high], both[lanes:])


# Quantization turns activations into bytes with a scale for every 32.


# Scales are read eight at a time, so there are zeros for groups that do not exist.
SCALES_TOGETHER = LANES


@dataclass(frozen=True)
class QuantizedRows:
    """Activations of a chunk: `bytes` int8 [rows, groups · 32], `scales` float32 and `offsets` [rows, padded].

    Offsets are int32, multiples of the scales; or float32, where they are to be multiplied with zeros of weights. An
    activation has `parts` bytes: with two, the 32 high ones of a group lie before the low ones. A group has `sums`
    offsets, one for each group of weights.
    """

    bytes: KernelTensor
    scales: KernelTensor
    offsets: KernelTensor
    parts: int = 1
    sums: int = 1


@dataclass(frozen=True)
class QuantizedVector:
    """Row `row` of `bytes` int8 [rows, groups · 32] and of `scales` and `offsets` float32 [rows, groups].

    Of scales and offsets there is one a group, and zeros up to a multiple of 8.

    For matrices of nibbles, two groups share 64 bytes, since two groups' low halves lie in the same 32 bytes of a row:
    columns 0 to 15 of the first and of the second, then 16 to 31 of both. After an odd number of groups there is one of
    zeros. Of the first `wide_groups` four share 128 bytes in the same way.
    """

    bytes: KernelTensor
    scales: KernelTensor
    offsets: KernelTensor | None
    row: Expr


def padded_groups(groups: int) -> int:
    """Return `groups` rounded up to a multiple of the scales that are read at a time."""
    return -(-groups // SCALES_TOGETHER) * SCALES_TOGETHER


def wide_groups(groups: int) -> int:
    """Return how many of a row's groups, its first ones, are multiplied in the instruction set's widest vectors."""
    lanes = isa.current().wide_lanes
    return groups // lanes * lanes if lanes > LANES else 0


def row_lanes(groups: int) -> tuple[int, ...]:
    """Return the lanes of the vectors that a row of so many groups is read in: the widest, then eight for the rest."""
    wide = wide_groups(groups)
    return ((isa.current().wide_lanes,) if wide else ()) + ((LANES,) if wide < groups else ())


def each_step(groups: int, body: Callable[[Expr, int, int], None]) -> None:
    """Run `body(first, count, lanes)` for as many groups of a row at a time as a vector has lanes."""
    first = 0
    for lanes in row_lanes(groups):
        full = (groups - first) // lanes
        if full:
            with loop(first // lanes, first // lanes + full) as index:
                body(bind(index * lanes), lanes, lanes)
        first += full * lanes
    if first < groups:
        body(first, groups - first, LANES)


def vector_sizes(matrix: KernelMatrix) -> tuple[int, int]:
    """Return how many bytes and scales a vector needs for products with rows of `matrix`."""
    in_pairs = matrix.has_nibbles
    return (matrix.groups + in_pairs * matrix.groups % 2) * GROUP, padded_groups(matrix.groups)


def quantize_vector(x: KernelTensor, row: Expr, matrix: KernelMatrix) -> QuantizedVector:
    """Quantize row `row` of x float32 [rows, columns] for products with rows of `matrix`, or of any like it."""
    count, padded = vector_sizes(matrix)
    offsets = local(1, padded) if matrix.offset else None
    vector = QuantizedVector(local(1, count, dtype="int8"), local(1, padded), offsets, 0)
    quantize_to(x, row, matrix, vector)
    return vector


def quantize_to(x: KernelTensor, row: Expr, matrix: KernelMatrix, vector: QuantizedVector) -> None:
    """Quantize row `row` of x as `quantize_vector` does, into memory of `vector_sizes`."""
    wide, padded = wide_groups(matrix.groups), padded_groups(matrix.groups)
    for start in range(matrix.groups // LANES * LANES, padded, LANES):
        for tensor in (vector.scales, vector.offsets):
            if tensor is not None:
                store(tensor, vector.row, start, value=splat(0.0))

    def quantize(group: Expr, inputs: list[Expr], together: int) -> None:
        def put(i: int, value: Expr) -> None:
            place = _place_of_nibble(group, i, together) if matrix.has_nibbles else group * GROUP + i
            vector.bytes[vector.row, at(place)] = value

        scale, (summed,) = quantize_group(inputs, put)
        vector.scales[vector.row, group] = scale
        if vector.offsets is not None:
            vector.offsets[vector.row, group] = summed * scale * matrix.offset

    if wide:
        _each_group(x, row, wide * GROUP, lambda group, inputs: quantize(group, inputs, _QUAD))
    _each_group(x, row, matrix.columns, body=lambda group, inputs: quantize(group, inputs, _PAIR), first=wide)
    # Last: LLVM 22 makes invalid code where a local array is filled by stores of which the first ones are constant.
    if matrix.has_nibbles and matrix.groups % 2:
        for half in (0, 16):
            start = _place_of_nibble(matrix.groups, half, _PAIR)
            vector.bytes[vector.row, at(start, 16)] = tirx.Broadcast(tirx.IntImm("int8", 0), 16)


def quantize_row(x: KernelTensor, row: Expr, columns: int, out: QuantizedRows, offset: float) -> None:
    """Quantize row `row` of x float32 [rows, columns] to the same row of `out`, with offset · Σ bytes by group."""

    def quantize(group: Expr, inputs: list[Expr]) -> None:
        def put(i: int, value: Expr) -> None:
            out.bytes[row, at(group * (GROUP * out.parts) + i)] = value

        scale, sums = quantize_group(inputs, put, out.parts, out.sums)
        out.scales[row, group] = scale
        is_whole = out.offsets.dtype == "int32"
        for i, summed in enumerate(sums):
            value = tirx.Cast("int32", summed) * int(offset) if is_whole else summed * scale * offset
            out.offsets[row, group * out.sums + i] = value

    _each_group(x, row, columns, quantize)


def quantize_group(
    inputs: list[Expr], put: Callable[[int, Expr], None], parts: int = 1, sums: int = 1
) -> tuple[Expr, list[Expr]]:
    """Return the scale of 32 activations, and the sums of each of `sums` parts of them over that scale, float32.

    `put(i, v)` takes bytes i … i + 7 of the group.
    """
    largest, most = highest(_largest(inputs)), LARGEST_BYTES[parts]
    inverse = bind(byte_inverse(bind(splat(largest)), most=most))
    rounded = [bind(tirx.nearbyint(value * inverse)) for value in inputs]
    high = rounded if parts == 1 else [bind(tirx.nearbyint(value * splat(1.0 / 128.0))) for value in rounded]
    for i, value in enumerate(high):
        put(i * LANES, _to_bytes(value))
    if parts == 2:
        for i, (value, above) in enumerate(zip(rounded, high, strict=True)):
            put(GROUP + i * LANES, _to_bytes(value - above * splat(128.0)))
    each = len(rounded) // sums
    totals = [bind(total(_added(rounded[i : i + each]))) for i in range(0, len(rounded), each)]
    witness = totals[0] if sums == 1 else bind(totals[0] + totals[1])
    # What is not a number or infinite must show: times zero it makes the scale NaN.
    return bind(byte_scale(largest, witness, most=most)), totals


def _added(vectors: list[Expr]) -> Expr:
    return vectors[0] + vectors[1] if len(vectors) == 2 else (vectors[0] + vectors[1]) + (vectors[2] + vectors[3])


def _to_bytes(whole: Expr) -> Expr:
    return tirx.Cast(f"int8x{LANES}", tirx.Cast(f"int32x{LANES}", whole))


def _each_group(
    x: KernelTensor, row: Expr, columns: int, body: Callable[[Expr, list[Expr]], None], first: int = 0
) -> None:
    """Run `body(group, its four vectors)` for each group from `first` on; elements past the end are zero."""

    def load_group(group: Expr, lane_counts: tuple[int, ...]) -> None:
        inputs = [bind(load(x, row, group * GROUP + i * LANES, valid=n)) for i, n in enumerate(lane_counts)]
        body(group, inputs + [splat(0.0)] * (GROUP // LANES - len(inputs)))

    each_group(columns, load_group, first=first)


# Groups of nibbles whose halves fill a vector of eight and of sixteen lanes.
_PAIR, _QUAD = 2, 4


def _place_of_nibble(group: Expr, column: int, together: int) -> Expr:
    half = together * GROUP // 2
    return group // together * (2 * half) + column // 16 * half + group % together * 16 + column % 16


def _largest(inputs: list[Expr]) -> Expr:
    magnitudes = [bind(tirx.abs(value)) for value in inputs]
    return maximum(maximum(magnitudes[0], magnitudes[1]), maximum(magnitudes[2], magnitudes[3]))
