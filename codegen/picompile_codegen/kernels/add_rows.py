"""Rows of a packed matrix, each times a number, added to a vector: a feed-forward block's way down, for one token.

Four rows are added at a time, so that the vector is loaded and stored once for four. In f16 the weights are converted
and multiplied in float32. In q8 and q4 the four factors are bytes, as activations are in `quantized.py`: for each group
of 32 columns, a row's factor times its scale is rounded to a multiple of the largest such product of the four over 127.
The products with the rows' bytes, four for each column, are then added up by one instruction.
"""

from dataclasses import dataclass
from itertools import cycle

from tvm import tirx

from picompile_codegen.kernels.bytes import BYTES, SUMS, dot_signed, dot_unsigned, split_nibbles
from picompile_codegen.kernels.matrix import Matrix, each_group
from picompile_codegen.kernels.quantized import SCALES_TOGETHER
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, local, loop, maximum, select
from picompile_codegen.kernels.vector import LANES, at, fma, load, splat, store, to_floats
from picompile_passes.dialect.formats import GROUP

ROWS_TOGETHER = 4
_HALF = GROUP // 2


@dataclass(frozen=True)
class FourRows:
    """Rows `numbers` of `matrix`, times `factors`, to be added to row `index` of `out` float32 [any, columns].

    Rows `ahead` are fetched meanwhile.
    """

    matrix: Matrix
    numbers: list[Expr]
    factors: list[Expr]
    out: Tensor
    index: Expr
    ahead: list[Expr]

    def fetch(self, line: Expr) -> None:
        """Asks for cache line `line` of the rows ahead."""
        for number in self.ahead:
            self.matrix.fetch(number, line)


def add_rows(rows: FourRows) -> None:
    """out[index] += Σ factor · row."""
    if rows.matrix.scale is None:
        _add_floats(rows)
    else:
        _add_bytes(rows)


def _add_floats(rows: FourRows) -> None:
    readers = [
        rows.matrix.row(number, factor=factor) for number, factor in zip(rows.numbers, rows.factors, strict=True)
    ]

    lines = cycle(range(rows.matrix.groups_per_line))

    def add(group: Expr, lane_counts: tuple[int, ...]) -> None:
        if next(lines) == 0:
            rows.fetch(group // rows.matrix.groups_per_line)
        parts = [reader.group(group) for reader in readers]
        for i, valid in enumerate(lane_counts):
            column = group * GROUP + i * LANES
            value = load(rows.out, rows.index, column, valid=valid)
            for part in parts:
                value = bind(fma(part.raw[i], part.scale, value))
            store(rows.out, rows.index, column, value=value, valid=valid)

    each_group(rows.matrix.columns, add, unroll=rows.matrix.groups_per_line)


def _add_bytes(rows: FourRows) -> None:
    """Eight groups at a time, so that factors are made for eight groups at once."""
    matrix = rows.matrix
    for line in matrix.scale_lines:
        rows.fetch(line)
    full, rest = divmod(matrix.columns, GROUP)
    eights, last = divmod(full, SCALES_TOGETHER)
    if eights:
        with loop(0, eights) as index:
            _add_eight(rows, bind(index * SCALES_TOGETHER), SCALES_TOGETHER, 0)
    if last or rest:
        _add_eight(rows, eights * SCALES_TOGETHER, last, rest)


def _add_eight(rows: FourRows, first: Expr, count: int, columns: int) -> None:
    """Adds `count` groups, at most eight, and `columns` columns of one more."""
    for i in range(0, count + (columns > 0), rows.matrix.groups_per_line):
        rows.fetch((first + i) // rows.matrix.groups_per_line)
    words, scales, offsets = _factor_bytes(rows, first)

    def add(i: Expr, width: int) -> None:
        offset = None if offsets is None else tirx.Broadcast(offsets[i], LANES)
        _add_group(rows, first + i, width, tirx.Broadcast(words[i], LANES), splat(scales[i]), offset)

    if count:
        with loop(0, count) as i:
            add(i, GROUP)
    if columns:
        add(count, columns)


def _factor_bytes(rows: FourRows, first: Expr) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of eight groups: the factors of the four rows as four bytes of an int32, their scale, and Σ offset · factor."""
    matrix = rows.matrix
    products = [
        bind(matrix.eight_scales(number, first) * splat(factor))
        for number, factor in zip(rows.numbers, rows.factors, strict=True)
    ]
    a, b, c, d = (bind(tirx.abs(product)) for product in products)
    largest = bind(maximum(maximum(a, b), maximum(c, d)))
    # What is not a number or infinite must show: times zero it makes the scale NaN.
    visible = (a + b + c + d) * splat(0.0)
    inverse = bind(select(largest > splat(0.0), splat(127.0) / largest, splat(0.0)))
    rounded = [bind(tirx.Cast(SUMS, tirx.nearbyint(product * inverse))) for product in products]
    word = rounded[0] & _every(255)
    for i, value in enumerate(rounded[1:], start=1):
        word = bind(word | ((value & _every(255)) << _every(8 * i)))
    words, scales = local(LANES, dtype="int32"), local(LANES)
    words[at(0)], scales[at(0)] = word, fma(largest, splat(1.0 / 127.0), visible)
    if not matrix.offset:
        return words, scales, None
    offsets = local(LANES, dtype="int32")
    offsets[at(0)] = (rounded[0] + rounded[1] + rounded[2] + rounded[3]) * _every(int(matrix.offset))
    return words, scales, offsets


def _add_group(rows: FourRows, group: Expr, columns: int, word: Expr, scale: Expr, offset: Expr | None) -> None:
    """Adds `columns` columns of one group."""
    factors, scale = bind(tirx.reinterpret(f"int8x{BYTES}", bind(word))), bind(scale)
    offset = None if offset is None else bind(offset)
    for i, quads in enumerate(_quads(rows, group)):
        valid = min(LANES, columns - i * LANES)
        if valid <= 0:
            return
        sums = dot_signed(quads, factors) if offset is None else dot_unsigned(quads, factors, offset)
        column = group * GROUP + i * LANES
        value = fma(to_floats(sums), scale, load(rows.out, rows.index, column, valid=valid))
        store(rows.out, rows.index, column, value=value, valid=valid)


def _quads(rows: FourRows, group: Expr) -> list[Expr]:
    """The bytes of a group's columns, eight columns a vector, the four rows of a column side by side."""
    matrix = rows.matrix
    start = group * matrix.group_elements
    if matrix.format == "q8":
        halves = [_interleave([matrix.data[n, at(start + half, _HALF)] for n in rows.numbers]) for half in (0, _HALF)]
        return [bind(tirx.reinterpret(f"int8x{BYTES}", quads)) for quads in halves[0] + halves[1]]
    pairs = _interleave([matrix.data[n, at(start, _HALF)] for n in rows.numbers])
    low, high = zip(*(split_nibbles(bind(tirx.reinterpret(f"uint32x{LANES}", pair))) for pair in pairs), strict=True)
    return [*low, *high]


def _interleave(rows: list[Expr]) -> list[Expr]:
    """Of four vectors of 16 bytes: two uint16x16, with bytes 0 … 7 and 8 … 15 of each, four rows' side by side."""
    a, b, c, d = (bind(row) for row in rows)
    pairs = [i // 2 + 16 * (i % 2) for i in range(32)]
    first, second = bind(tirx.Shuffle([a, b], pairs)), bind(tirx.Shuffle([c, d], pairs))
    first, second = (bind(tirx.reinterpret("uint16x16", value)) for value in (first, second))
    halves = [[i // 2 + 16 * (i % 2) + 8 * half for i in range(16)] for half in (0, 1)]
    return [bind(tirx.Shuffle([first, second], half)) for half in halves]


def _every(value: int) -> Expr:
    return tirx.Broadcast(tirx.IntImm("int32", value), LANES)
