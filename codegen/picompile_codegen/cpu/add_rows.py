"""Rows of a packed matrix, each times a number, added to a vector: a feed-forward block's way down, for a few tokens.

Several rows are added at a time, so that the vector is loaded and stored once for all of them. In f16 the weights are
converted and multiplied in float32. In the other formats the factors are bytes, as activations are in `quantized.py`:
for each group of 32 columns, a row's factor times its scale is rounded to a multiple of the largest such product over
127. The products with the rows' bytes, four for each column, are then added up by one instruction.

For that instruction the bytes of four rows must lie side by side. That takes the fewest instructions where none of them
moves anything from one half of a vector to the other, and leaves the sums in another order than the columns: `SumOrder`
tells which.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, zip_longest

from tvm import tirx

from picompile_codegen.cpu.matrix import HIGH_GROUPS, KernelMatrix, each_group
from picompile_codegen.cpu.quantized import (
    BYTES,
    SCALES_TOGETHER,
    byte_inverse,
    byte_scale,
    dot_signed,
    dot_unsigned,
    pack_bytes,
    split_codes,
)
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, maximum
from picompile_codegen.cpu.vector import LANES, at, fma, load, splat, splat_int, store, to_floats
from picompile_passes.weight_formats import GROUP

_QUAD = 4


def rows_together(matrix: KernelMatrix) -> tuple[int, ...]:
    """Return how many rows can be added at a time, the best number first; the last is 4, which divides all."""
    return (_QUAD,) if matrix.scale is None else (2 * _QUAD, _QUAD)


@dataclass(frozen=True)
class SumOrder:
    """The columns that the sums belong to. Sums come in blocks of `columns`; each block's `vectors` follow one another.

    A vector's eight sums are those of one or two runs of columns, equally long: of each, its first within the block.
    """

    columns: int
    vectors: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, matrix: KernelMatrix) -> "SumOrder":
        """Return the order of sums of rows of `matrix`."""
        if matrix.scale is None:
            return cls(LANES, ((0,),))
        # A vector holds 32 bytes of a row. They are the columns of a group; of nibbles each is a column of a group's
        # first half and one of its second, and there are two groups.
        distance = GROUP if matrix.has_nibbles else BYTES // 2
        starts = [half + i for half in ((0, GROUP // 2) if matrix.has_nibbles else (0,)) for i in range(0, 16, 4)]
        return cls(2 * distance, tuple((start, start + distance) for start in starts))

    def width(self, columns: int) -> int:
        """Return how many sums there are for so many columns."""
        return -(-columns // self.columns) * self.columns

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
    readers = [
        rows.matrix.row(number, factor=factor) for number, factor in zip(rows.numbers, rows.factors[0], strict=True)
    ]
    # Rows of a matrix without scales have one factor, the same for all groups.
    others = [[bind(splat(factor)) for factor in factors] for factors in rows.factors[1:]]
    lines = cycle(range(rows.matrix.groups_per_line))

    def add(group: Expr, lane_counts: tuple[int, ...]) -> None:
        if next(lines) == 0:
            rows.fetch(group // rows.matrix.groups_per_line)
        parts = [reader.group(group) for reader in readers]
        for i, valid in enumerate(lane_counts):
            column = group * GROUP + i * LANES
            for index, scales in zip(rows.indices, [[part.scale for part in parts], *others], strict=True):
                value = load(rows.out, index, column, valid=valid)
                for part, scale in zip(parts, scales, strict=True):
                    value = bind(fma(part.raw[i], scale, value))
                store(rows.out, index, column, value=value, valid=valid)

    each_group(rows.matrix.columns, add, unroll=rows.matrix.groups_per_line)


@dataclass(frozen=True)
class _Factors:
    """The factors of eight groups, a lane each, as `_factor_bytes` rounds them.

    `words` has an int32 vector for every four rows, whose bytes are the rows' factors. `scales` has their scale, and
    `offsets`, int32, the sum of the weights' offsets times the factors.
    """

    words: list[Expr]
    scales: Expr
    offsets: Expr | None


def _add_bytes(rows: SomeRows) -> None:
    """Add all groups, eight at a time, so that factors are computed for eight groups at once."""
    matrix = rows.matrix
    for line in matrix.scale_lines:
        rows.fetch(line)
    # What is not a number or infinite must show: times zero it makes the scale NaN.
    witnesses = [bind(splat(sum(factors[1:], factors[0]))) for factors in rows.factors]
    full, rest = divmod(matrix.groups, SCALES_TOGETHER)
    if full:
        with loop(0, full) as index:
            _add_eight(rows, bind(index * SCALES_TOGETHER), SCALES_TOGETHER, witnesses)
    if rest:
        _add_eight(rows, full * SCALES_TOGETHER, rest, witnesses)


def _add_eight(rows: SomeRows, first: Expr, count: int, witnesses: list[Expr]) -> None:
    """Add `count` groups, at most eight."""
    matrix = rows.matrix
    matrix.fetch_eight(rows.ahead, first, count)
    scales = [matrix.scales_from(number, first) for number in rows.numbers]
    zeros = [matrix.zeros_from(number, first) for number in rows.numbers] if matrix.has_zeros else None
    factors = [
        _factor_bytes(
            matrix, [bind(s * splat(factor)) for s, factor in zip(scales, of_index, strict=True)], zeros, witness
        )
        for of_index, witness in zip(rows.factors, witnesses, strict=True)
    ]
    planes: list[list[Expr]] = []
    for i in range(0, count, BYTES // matrix.group_elements):
        if matrix.form.has_planes and i % HIGH_GROUPS == 0:
            planes = [_interleave([matrix.high_bits(n, first + i) for n in four]) for four in _fours(rows.numbers)]
        _add_block(rows, first + i, i, factors, planes)


def _fours(rows: list[Expr]) -> list[list[Expr]]:
    return [rows[i : i + _QUAD] for i in range(0, len(rows), _QUAD)]


def _factor_bytes(matrix: KernelMatrix, products: list[Expr], zeros: list[Expr] | None, witness: Expr) -> _Factors:
    """Return the factors of eight groups, given the `products` of each row's scales with its factor.

    `zeros` are those of each row's groups where they have their own.
    """
    largest = tirx.abs(products[0])
    for product in products[1:]:
        largest = bind(maximum(largest, tirx.abs(product)))
    inverse = bind(byte_inverse(largest))
    rounded = [bind(tirx.Cast(f"int32x{LANES}", tirx.nearbyint(product * inverse))) for product in products]
    words = [pack_bytes(four) for four in _fours(rounded)]
    scales = bind(byte_scale(largest, witness))
    if zeros is not None:
        return _Factors(words, scales, _offsets_of_zeros(matrix, rounded, zeros))
    if not matrix.offset:
        return _Factors(words, scales, None)
    return _Factors(words, scales, bind(sum(rounded[1:], rounded[0]) * splat_int(int(matrix.offset))))


def _offsets_of_zeros(matrix: KernelMatrix, factors: list[Expr], zeros: list[Expr]) -> Expr:
    """Return Σ offset · factor of each group, int32: rounded, by less than half of what a factor's last bit makes."""
    total = to_floats(factors[0]) * zeros[0]
    for factor, zero in zip(factors[1:], zeros[1:], strict=True):
        total = bind(fma(to_floats(factor), zero, total))
    return bind(tirx.Cast(f"int32x{LANES}", tirx.nearbyint(total * splat(matrix.offset))))


def _add_block(rows: SomeRows, group: Expr, number: int, factors: list[_Factors], planes: list[list[Expr]]) -> None:
    """Add 32 bytes of each row from group `group` on, which is number `number` of the factors' eight.

    `planes` has the high bits of each four rows, interleaved, where they are in a plane of their own.
    """
    matrix = rows.matrix
    groups = BYTES // matrix.group_elements
    lanes = [number + i * groups // LANES for i in range(LANES)]
    columns, bit = at(group * matrix.group_elements, BYTES), number % HIGH_GROUPS * 2
    bytes_of_fours = [
        _bytes_of_four(matrix, [matrix.data[n, columns] for n in four], plane, bit)
        for four, plane in zip_longest(_fours(rows.numbers), planes)
    ]
    dot = dot_unsigned if matrix.has_nibbles else dot_signed
    for index, own in zip(rows.indices, factors, strict=True):
        scale = bind(tirx.Shuffle([own.scales], lanes))
        offset = None if own.offsets is None else bind(tirx.Shuffle([own.offsets], lanes))
        sums: list[Expr | None] = [offset] * len(SumOrder.of(matrix).vectors)
        for values, word in zip(bytes_of_fours, own.words, strict=True):
            of_four = bind(tirx.reinterpret(f"int8x{BYTES}", bind(tirx.Shuffle([word], lanes))))
            sums = [dot(value, of_four, start) for value, start in zip(values, sums, strict=True)]
        for i, value in enumerate(sums):
            place = (index, at(group * GROUP + i * LANES))
            rows.out[place] = fma(to_floats(value), scale, rows.out[place])


def _bytes_of_four(matrix: KernelMatrix, rows: list[Expr], plane: list[Expr] | None, bit: int) -> list[Expr]:
    """Return 32 bytes of each of four rows as vectors of bytes side by side, one for each vector of sums.

    Bits of `plane`, interleaved like them, are put above nibbles as `split_codes` does.
    """
    quads = _interleave(rows)
    if not matrix.has_nibbles:
        return [bind(tirx.reinterpret(f"int8x{BYTES}", quad)) for quad in quads]
    low, high = zip(*(split_codes(quad, above, bit) for quad, above in zip_longest(quads, plane or ())), strict=True)
    return [*low, *high]


def _interleave(rows: list[Expr]) -> list[Expr]:
    """Interleave four vectors of 32 bytes to four uint32x8, whose elements are a byte of each row.

    Vector i has bytes 4 · i … 4 · i + 3 of both halves.
    """

    def of_halves(a: Expr, b: Expr, bits: int, upper: int) -> Expr:
        """Elements of a and b in turn, from the lower or upper half of each half."""
        half = BYTES * 8 // bits // 2
        indices = [h * half + upper * half // 2 + i // 2 + i % 2 * 2 * half for h in (0, 1) for i in range(half)]
        return bind(tirx.Shuffle([a, b], indices))

    a, b, c, d = (bind(row) for row in rows)
    pairs = [(of_halves(a, b, 8, upper), of_halves(c, d, 8, upper)) for upper in (0, 1)]
    words = [(bind(tirx.reinterpret("uint16x16", x)), bind(tirx.reinterpret("uint16x16", y))) for x, y in pairs]
    quads = [of_halves(*pair, 16, upper) for pair in words for upper in (0, 1)]
    return [bind(tirx.reinterpret(f"uint32x{LANES}", quad)) for quad in quads]
