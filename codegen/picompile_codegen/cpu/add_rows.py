"""Rows of a packed matrix, each times a number, added to a vector: a feed-forward block's way down, for a few tokens.

Several rows are added at a time, so that the vector is loaded and stored once for all of them. In f16 the weights are
converted and multiplied in float32. In the other formats the factors are bytes, as activations are in `quantized.py`:
for each group of 32 columns, a row's factor times its scale is rounded to a multiple of the largest such product over
127. The products with the rows' bytes, four for each column, are then added up by one instruction.

For that instruction the bytes of four rows must lie side by side. That takes the fewest instructions where none of them
moves anything from one half of a vector to the other, and leaves the sums in another order than the columns: `SumOrder`
tells which.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, zip_longest

from tvm import tirx

from picompile_codegen.build import isa
from picompile_codegen.cpu.matrix import KernelMatrix, each_group
from picompile_codegen.cpu.quantized import (
    BYTES_OF_LANE,
    byte_inverse,
    byte_scale,
    decode_codes,
    dot_signed,
    dot_unsigned,
    each_step,
    high_words,
    pack_bytes,
    row_lanes,
    wide_groups,
)
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, maximum
from picompile_codegen.cpu.vector import LANES, at, fma, load, repeat, splat, splat_int, store, to_floats
from picompile_passes.formats import GROUP, HIGH_GROUPS

_QUAD = 4


def rows_together(matrix: KernelMatrix) -> tuple[int, ...]:
    """Return how many rows can be added at a time, the best number first; the last is 4, which divides all."""
    return (_QUAD,) if matrix.scale is None else (2 * _QUAD, _QUAD)


@dataclass(frozen=True)
class BlockOrder:
    """The columns that sums belong to. Sums come in blocks of `columns`; each block's `vectors` follow one another.

    A vector's eight sums are those of one or two runs of columns, equally long: of each, its first within the block.
    """

    columns: int
    vectors: tuple[tuple[int, ...], ...]

    @classmethod
    def of_bytes(cls, matrix: KernelMatrix, lanes: int) -> "BlockOrder":
        """Return the order of sums of rows of bytes that are read in vectors of four bytes for each of `lanes` lanes.

        A quarter of 32 bytes or an eighth of 64 holds 16 columns side by side; of nibbles it holds a group: a column of
        its first half and one of its second in each byte.
        """
        distance = GROUP if matrix.has_nibbles else 16
        starts = [half + i for half in ((0, GROUP // 2) if matrix.has_nibbles else (0,)) for i in range(0, 16, 4)]
        parts = range(0, lanes // 4, 2)
        vectors = tuple((start + distance * i, start + distance * (i + 1)) for start in starts for i in parts)
        return cls(distance * lanes // 4, vectors)

    def each(self, columns: int, body: Callable[[Expr, list[tuple[Expr, int, int]]], None]) -> None:
        """Run `body(position, runs)` for every vector of sums: a run is a column, a lane and a number of columns."""
        full, rest = divmod(columns, self.columns)
        if full:
            with loop(0, full) as block:
                self._each_of_block(bind(block * self.columns), self.columns, body)
        if rest:
            self._each_of_block(full * self.columns, rest, body)

    def _each_of_block(
        self, first: Expr, columns: int, body: Callable[[Expr, list[tuple[Expr, int, int]]], None]
    ) -> None:
        for number, vector in enumerate(self.vectors):
            count = LANES // len(vector)
            runs = [
                (first + start, i * count, min(count, columns - start))
                for i, start in enumerate(vector)
                if start < columns
            ]
            if runs:
                body(first + number * LANES, runs)


@dataclass(frozen=True)
class SumOrder:
    """The orders of the sums of rows: from each of these columns on, up to the next, one of them."""

    parts: tuple[tuple[int, BlockOrder], ...]

    @classmethod
    def of(cls, matrix: KernelMatrix) -> "SumOrder":
        """Return the order of sums of rows of `matrix`: of the first ones in the instruction set's widest vectors."""
        if matrix.scale is None:
            return cls(((0, BlockOrder(LANES, ((0,),))),))
        wide = wide_groups(matrix.groups)
        parts = ((0, isa.current().wide_lanes if wide else LANES), (wide * GROUP, LANES))
        used = [(first, lanes) for first, lanes in dict(parts).items() if first < matrix.groups * GROUP]
        return cls(tuple((first, BlockOrder.of_bytes(matrix, lanes)) for first, lanes in used))

    def width(self, columns: int) -> int:
        """Return how many sums there are for so many columns."""
        last = self.parts[-1][1].columns
        return -(-columns // last) * last

    def each_part(self, columns: int) -> Iterator[tuple[int, int, BlockOrder]]:
        """Yield the parts of so many columns: the first column, the end, and the order."""
        ends = [first for first, _ in self.parts[1:]] + [columns]
        for (first, order), end in zip(self.parts, ends, strict=True):
            yield first, end, order


@dataclass(frozen=True)
class SomeRows:
    """Rows `numbers` of `matrix`, to be added to rows `indices` of `out` float32 [any, sums].

    `factors` has a list for each of `indices`: what each row is multiplied with there. Rows `ahead` are fetched
    meanwhile.
    """

    matrix: KernelMatrix
    numbers: list[Expr]
    factors: list[list[Expr]]
    out: KernelTensor
    indices: list[Expr]
    ahead: list[Expr]

    def fetch(self, line: Expr) -> None:
        """Prefetch cache line `line` of the rows ahead."""
        for number in self.ahead:
            self.matrix.fetch(number, line)


def add_rows(rows: SomeRows) -> None:
    """out[index] += Σ factor · row for each index and its factors, in the order of the matrix's sums."""
    if rows.matrix.scale is None:
        _add_floats(rows)
    else:
        _add_bytes(rows)


def _add_floats(rows: SomeRows) -> None:
    matrix, lines = rows.matrix, cycle(range(rows.matrix.groups_per_line))

    def add(group: Expr, lane_counts: tuple[int, ...], lanes: int) -> None:
        if next(lines) == 0:
            rows.fetch(group // matrix.groups_per_line)
        columns = sum(lane_counts)
        for i in range(0, columns, lanes):
            start, valid = group * GROUP + i, min(lanes, columns - i)
            parts = [bind(to_floats(matrix.data[number, at(start, lanes)], lanes)) for number in rows.numbers]
            for index, own in zip(rows.indices, factors[lanes], strict=True):
                place = (index, at(start, lanes))
                value = rows.out[place] if valid == lanes else load(rows.out, index, start, valid=valid)
                for part, factor in zip(parts, own, strict=True):
                    value = bind(fma(part, factor, value, lanes))
                if valid == lanes:
                    rows.out[place] = value
                else:
                    store(rows.out, index, start, value=value, valid=valid)

    wide, widest = wide_groups(matrix.groups), isa.current().wide_lanes
    factors = {
        lanes: [[bind(splat(factor, lanes)) for factor in of_index] for of_index in rows.factors]
        for lanes in row_lanes(matrix.groups)
    }
    unroll = matrix.groups_per_line
    if wide:
        each_group(wide * GROUP, lambda group, counts: add(group, counts, widest), unroll)
    each_group(matrix.columns, lambda group, counts: add(group, counts, LANES), unroll, wide)


@dataclass(frozen=True)
class _Factors:
    """The factors of a step's groups, a lane each, as `_factor_bytes` rounds them.

    `words` has an int32 vector for every four rows, whose bytes are the rows' factors. `scales` has their scale, and
    `offsets`, int32, the sum of the weights' offsets times the factors.
    """

    words: list[Expr]
    scales: Expr
    offsets: Expr | None


def _add_bytes(rows: SomeRows) -> None:
    """Add all groups, as many at a time as a vector has lanes: factors are computed for all of these at once."""
    matrix = rows.matrix
    for line in matrix.scale_lines:
        rows.fetch(line)
    # What is not a number or infinite must show: times zero it makes the scale NaN.
    witnesses = [sum(factors[1:], factors[0]) for factors in rows.factors]
    each_step(matrix.groups, lambda first, count, lanes: _add_step(rows, first, count, lanes, witnesses))


def _add_step(rows: SomeRows, first: Expr, count: int, lanes: int, witnesses: list[Expr]) -> None:
    """Add `count` groups, at most as many as there are lanes."""
    matrix = rows.matrix
    scales = [matrix.scales_from(number, first, lanes) for number in rows.numbers]
    zeros = [matrix.zeros_from(number, first, lanes) for number in rows.numbers] if matrix.has_zeros else None
    factors = []
    for of_index, witness in zip(rows.factors, witnesses, strict=True):
        products = [bind(s * splat(factor, lanes)) for s, factor in zip(scales, of_index, strict=True)]
        factors.append(_factor_bytes(matrix, products, zeros, witness=bind(splat(witness, lanes)), lanes=lanes))
    planes: list[list[Expr]] = []
    together = BYTES_OF_LANE * lanes // matrix.group_elements
    for i in range(0, count, together):
        matrix.fetch_part(rows.ahead, first, count, range(i, i + together))
        if matrix.form.has_planes and i % HIGH_GROUPS == 0:
            planes = [
                _interleave([_high_bits(matrix, n, first + i, lanes) for n in four], lanes)
                for four in _fours(rows.numbers)
            ]
        _add_block(rows, group=first + i, number=i, lanes=lanes, factors=factors, planes=planes)


def _high_bits(matrix: KernelMatrix, number: Expr, group: Expr, lanes: int) -> Expr:
    """Return the high bits of groups from `group` on beside the nibbles of as many as a vector holds, uint8."""
    return bind(tirx.reinterpret(f"uint8x{BYTES_OF_LANE * lanes}", high_words(matrix, number, group, lanes)))


def _fours(rows: list[Expr]) -> list[list[Expr]]:
    return [rows[i : i + _QUAD] for i in range(0, len(rows), _QUAD)]


def _factor_bytes(
    matrix: KernelMatrix, products: list[Expr], zeros: list[Expr] | None, witness: Expr, lanes: int
) -> _Factors:
    """Return the factors of a step's groups, given the `products` of each row's scales with its factor.

    `zeros` are those of each row's groups where they have their own.
    """
    largest = tirx.abs(products[0])
    for product in products[1:]:
        largest = bind(maximum(largest, tirx.abs(product)))
    inverse = bind(byte_inverse(largest, lanes))
    rounded = [bind(tirx.Cast(f"int32x{lanes}", tirx.nearbyint(product * inverse))) for product in products]
    words = [pack_bytes(four, lanes) for four in _fours(rounded)]
    scales = bind(byte_scale(largest, witness, lanes))
    if zeros is not None:
        return _Factors(words, scales, _offsets_of_zeros(matrix, rounded, zeros, lanes))
    if not matrix.offset:
        return _Factors(words, scales, None)
    return _Factors(words, scales, bind(sum(rounded[1:], rounded[0]) * splat_int(int(matrix.offset), lanes)))


def _offsets_of_zeros(matrix: KernelMatrix, factors: list[Expr], zeros: list[Expr], lanes: int) -> Expr:
    """Return Σ offset · factor of each group, int32: rounded, by less than half of what a factor's last bit makes."""
    total = to_floats(factors[0], lanes) * zeros[0]
    for factor, zero in zip(factors[1:], zeros[1:], strict=True):
        total = bind(fma(to_floats(factor, lanes), zero, total, lanes))
    return bind(tirx.Cast(f"int32x{lanes}", tirx.nearbyint(total * splat(matrix.offset, lanes))))


def _add_block(
    rows: SomeRows, group: Expr, number: int, lanes: int, factors: list[_Factors], planes: list[list[Expr]]
) -> None:
    """Add a vector of each row from group `group` on, which is number `number` of the step's.

    `planes` has the high bits of each four rows, interleaved, where they are in a plane of their own.
    """
    matrix, count = rows.matrix, BYTES_OF_LANE * lanes
    groups = count // matrix.group_elements
    numbers = [number + i * groups // lanes for i in range(lanes)]
    columns, bit = at(group * matrix.group_elements, count), number % HIGH_GROUPS * 2
    bytes_of_fours = [
        _bytes_of_four(matrix, rows=[matrix.data[n, columns] for n in four], plane=plane, bit=bit, lanes=lanes)
        for four, plane in zip_longest(_fours(rows.numbers), planes)
    ]
    dot = dot_signed if matrix.least_raw < 0 else dot_unsigned
    for index, own in zip(rows.indices, factors, strict=True):
        scale = bind(repeat(own.scales, numbers))
        offset = None if own.offsets is None else bind(repeat(own.offsets, numbers))
        sums: list[Expr | None] = [offset] * len(bytes_of_fours[0])
        for values, word in zip(bytes_of_fours, own.words, strict=True):
            of_four = bind(tirx.reinterpret(f"int8x{count}", bind(repeat(word, numbers))))
            sums = [dot(value, of_four, start, lanes) for value, start in zip(values, sums, strict=True)]
        for i, value in enumerate(sums):
            place = (index, at(group * GROUP + i * lanes, lanes))
            rows.out[place] = fma(to_floats(value, lanes), scale, rows.out[place], lanes)


def _bytes_of_four(
    matrix: KernelMatrix, rows: list[Expr], plane: list[Expr] | None, bit: int, lanes: int
) -> list[Expr]:
    """Return a vector of each of four rows as vectors of bytes side by side, one for each vector of sums.

    Bits of `plane`, interleaved like them, are put above nibbles as `split_codes` does.
    """
    quads = _interleave(rows, lanes)
    if not matrix.has_nibbles:
        return [bind(tirx.reinterpret(f"int8x{BYTES_OF_LANE * lanes}", quad)) for quad in quads]
    pairs = [
        decode_codes(matrix, words=quad, plane=above, bit=bit, lanes=lanes)
        for quad, above in zip_longest(quads, plane or ())
    ]
    low, high = zip(*pairs, strict=True)
    return [*low, *high]


def _interleave(rows: list[Expr], lanes: int) -> list[Expr]:
    """Interleave four vectors of bytes, four for each lane, to four of uint32, whose elements are a byte of each row.

    Vector i has bytes 4 · i … 4 · i + 3 of each 16.
    """

    def of_halves(a: Expr, b: Expr, bits: int, upper: int) -> Expr:
        """Elements of a and b in turn, from the lower or upper half of each 16 bytes."""
        width, total = 128 // bits, 32 * lanes // bits
        starts = range(upper * width // 2, total, width)
        indices = [start + i // 2 + i % 2 * total for start in starts for i in range(width)]
        return bind(tirx.Shuffle([a, b], indices))

    a, b, c, d = (bind(row) for row in rows)
    pairs = [(of_halves(a, b, 8, upper), of_halves(c, d, 8, upper)) for upper in (0, 1)]
    words = f"uint16x{2 * lanes}"
    halves = [(bind(tirx.reinterpret(words, x)), bind(tirx.reinterpret(words, y))) for x, y in pairs]
    quads = [of_halves(*pair, 16, upper) for pair in halves for upper in (0, 1)]
    return [bind(tirx.reinterpret(f"uint32x{lanes}", quad)) for quad in quads]
