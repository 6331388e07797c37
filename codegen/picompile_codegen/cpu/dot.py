"""Products of a packed matrix's rows with one vector, or a few: most of the work of decoding.

A matrix is read once, front to back; all else stays in the first-level cache. So these are bound by memory, as long as
a group of weights costs no more cycles than its bytes take to arrive. In f16 a group takes four conversions and four
multiply-adds. In the other formats, where the vector is bytes too, 32 bytes of weights take some eight instructions.

Several vectors share the work on the weights: reading them, converting them or splitting their bits. Each vector has
sums of its own, added up in the same order as for one vector: its product has the same bits, whoever shares the row.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

from tvm import tirx

from picompile_codegen.build import isa
from picompile_codegen.cpu.matrix import KernelMatrix, each_group
from picompile_codegen.cpu.quantized import (
    BYTES_OF_LANE,
    QuantizedVector,
    decode_codes,
    dot_pair,
    dot_signed,
    dot_signed_pair,
    each_step,
    high_words,
    quantize_vector,
    row_lanes,
    wide_groups,
)
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind
from picompile_codegen.cpu.vector import LANES, add_halves, at, fma, load, repeat, to_floats, totals, zero_vectors
from picompile_passes.formats import GROUP, HIGH_GROUPS

# A multiply-add takes four cycles and two can start in each; four chains are enough while memory is what is waited for.
_CHAINS = 4


@dataclass(frozen=True)
class Vector:
    """The vector that rows are multiplied with: row `row` of x, and its bytes, where the matrix has bytes as well."""

    x: KernelTensor
    row: Expr
    quantized: QuantizedVector | None


def prepare_vector(x: KernelTensor, matrix: KernelMatrix) -> Vector:
    """Prepare the first row of x float32 [rows, columns] for products with rows of `matrix`, or of any like it."""
    return Vector(x, 0, None if matrix.scale is None else quantize_vector(x, 0, matrix))


def dot(matrix: KernelMatrix, number: Expr, vector: Vector, ahead: Sequence[Expr] = ()) -> Expr:
    """Return the product of row `number` of `matrix` with `vector`, a scalar. Rows `ahead` are fetched meanwhile."""
    return dots(matrix, number, [vector], ahead)[0]


def dots(matrix: KernelMatrix, number: Expr, vectors: Sequence[Vector], ahead: Sequence[Expr] = ()) -> list[Expr]:
    """Return the product of row `number` of `matrix` with each of `vectors`, as `dot` does, to the same bits."""
    sums = _Sums.zeros(matrix.groups, len(vectors))
    quantized = [vector.quantized for vector in vectors if vector.quantized is not None]
    if quantized:
        _ByteProducts(sums, matrix, number, quantized).add(ahead)
    else:
        _add_floats(sums, matrix, number, vectors, ahead)
    return sums.totals(len(vectors))


@dataclass(frozen=True)
class _Sums:
    """Sums of products with some vectors, `_CHAINS` for each, in vectors of so many lanes: float32 [sums, lanes].

    A row's first groups are added up in the widest vectors, if these have more than eight lanes, and the rest in eight.
    """

    by_lanes: dict[int, KernelTensor]

    @classmethod
    def zeros(cls, groups: int, vectors: int) -> "_Sums":
        """Return sums of 0 for a row of so many groups."""
        return cls({lanes: zero_vectors(_CHAINS * vectors, lanes) for lanes in row_lanes(groups)})

    def add(self, vector: int, chain: int, a: Expr, b: Expr, lanes: int) -> None:
        """Add a · b, lane by lane, to a chain of sums of a vector."""
        sums, index = self.by_lanes[lanes], vector * _CHAINS + chain % _CHAINS
        sums[index, at(0, lanes)] = fma(a, b, sums[index, at(0, lanes)], lanes)

    def totals(self, vectors: int) -> list[Expr]:
        """Add up the sums of each vector."""
        values, lanes = self._added(0, vectors)
        for number, wide in enumerate(list(self.by_lanes)[1:], start=1):
            while lanes > wide:
                values, lanes = [add_halves(value, lanes) for value in values], lanes // 2
            rest, _ = self._added(number, vectors)
            values = [value + part for value, part in zip(values, rest, strict=True)]
        return totals(values, lanes)

    def _added(self, number: int, vectors: int) -> tuple[list[Expr], int]:
        """Add up the chains of each vector in the widest lanes, or the next ones; return the lanes too."""
        lanes, sums = list(self.by_lanes.items())[number]
        chains = [[sums[i * _CHAINS + chain, at(0, lanes)] for chain in range(_CHAINS)] for i in range(vectors)]
        return [(a + b) + (c + d) for a, b, c, d in chains], lanes


def biased(product: Expr, bias: KernelTensor | None, row: Expr) -> Expr:
    """Return `product` of row `row` plus its bias where there is one."""
    return product if bias is None else bind(product + bias[row])


def _add_floats(
    sums: _Sums, matrix: KernelMatrix, number: Expr, vectors: Sequence[Vector], ahead: Sequence[Expr]
) -> None:
    chains, lines = cycle(range(_CHAINS)), cycle(range(matrix.groups_per_line))

    def add_vector(start: Expr, valid: int, lanes: int) -> None:
        raw, chain = bind(to_floats(matrix.data[number, at(start, lanes)], lanes)), next(chains)
        for place, vector in enumerate(vectors):
            whole = valid == lanes
            columns = at(start, lanes)
            value = vector.x[vector.row, columns] if whole else load(vector.x, vector.row, start, valid=valid)
            sums.add(place, chain, raw, bind(value), lanes)

    def add_group(group: Expr, lane_counts: tuple[int, ...], lanes: int) -> None:
        if next(lines) == 0:
            for other in ahead:
                matrix.fetch(other, group // matrix.groups_per_line)
        valid = (min(lanes, sum(lane_counts) - i) for i in range(0, sum(lane_counts), lanes))
        for i, count in enumerate(valid):
            add_vector(group * GROUP + i * lanes, count, lanes)

    wide = wide_groups(matrix.groups)
    # So many groups give each chain something, and begin with a line.
    unroll = max(matrix.groups_per_line, _CHAINS * isa.current().wide_lanes // GROUP)
    if wide:
        each_group(wide * GROUP, lambda group, counts: add_group(group, counts, isa.current().wide_lanes), unroll)
    each_group(matrix.columns, lambda group, counts: add_group(group, counts, LANES), matrix.groups_per_line, wide)


@dataclass(frozen=True)
class _ByteProducts:
    """The products of row `number` of `matrix` with `vectors` in bytes, which are added to `sums`."""

    sums: _Sums
    matrix: KernelMatrix
    number: Expr
    vectors: Sequence[QuantizedVector]

    def add(self, ahead: Sequence[Expr]) -> None:
        """Add the whole row, as many groups at a time as a vector has lanes: their scales are multiplied at once."""
        matrix = self.matrix
        each_step(matrix.groups, lambda first, count, lanes: self._add_groups(first, count, lanes, ahead))
        for line in matrix.scale_lines:
            for other in ahead:
                matrix.fetch(other, line)

    def _add_groups(self, first: Expr, count: int, lanes: int, ahead: Sequence[Expr]) -> None:
        """Add `count` groups from `first` on, at most `lanes`."""
        matrix = self.matrix
        of_row = matrix.scales_from(self.number, first, lanes)
        of_offsets = bind(of_row * matrix.zeros_from(self.number, first, lanes)) if matrix.has_zeros else of_row
        scales = []
        for place, vector in enumerate(self.vectors):
            if vector.offsets is not None:
                self.sums.add(place, 0, of_offsets, vector.offsets[vector.row, at(first, lanes)], lanes)
            scales.append(bind(of_row * vector.scales[vector.row, at(first, lanes)]))
        together = BYTES_OF_LANE * lanes // matrix.group_elements
        multiply = self._multiply_nibbles(first, lanes) if matrix.has_nibbles else self._multiply_bytes(first, lanes)
        for chain, i in enumerate(range(0, count, together)):
            matrix.fetch_part(ahead, first, count, range(i, i + together))
            for place, products in enumerate(multiply(i)):
                numbers = [i + lane * together // lanes for lane in range(lanes)]
                self.sums.add(place, chain, to_floats(products, lanes), bind(repeat(scales[place], numbers)), lanes)

    def _multiply_bytes(self, first: Expr, lanes: int) -> Callable[[int], Iterator[Expr]]:
        """Return what gives, for group `first` + i and those beside it, each vector's products with their bytes."""

        def multiply(i: int) -> Iterator[Expr]:
            columns = at((first + i) * GROUP, BYTES_OF_LANE * lanes)
            weights = bind(self.matrix.data[self.number, columns])
            for vector in self.vectors:
                yield dot_signed(weights, bind(vector.bytes[vector.row, columns]), lanes=lanes)

        return multiply

    def _multiply_nibbles(self, first: Expr, lanes: int) -> Callable[[int], Iterator[Expr]]:
        """Return the same for halves of bytes, two or four groups side by side.

        Where the last does not exist, what follows in the row is in its place, and zeros in that of the activations.
        """
        matrix, width = self.matrix, BYTES_OF_LANE * lanes
        plane: Expr | None = None

        def multiply(i: int) -> Iterator[Expr]:
            nonlocal plane
            raw = matrix.data[self.number, at((first + i) * matrix.group_elements, width)]
            if matrix.form.has_planes and i % HIGH_GROUPS == 0:
                plane = high_words(matrix, self.number, first + i, lanes)
            low, high = decode_codes(
                matrix, words=_words(raw, lanes), plane=plane, bit=i % HIGH_GROUPS * 2, lanes=lanes
            )
            multiply_pair = dot_signed_pair if matrix.least_raw < 0 else dot_pair
            for vector in self.vectors:
                starts = ((first + i) * GROUP + half for half in (0, width))
                yield multiply_pair(
                    low, high, [bind(vector.bytes[vector.row, at(at_half, width)]) for at_half in starts], lanes
                )

        return multiply


def _words(values: Expr, lanes: int) -> Expr:
    """Bytes, four for each lane, as uint32."""
    return bind(tirx.reinterpret(f"uint32x{lanes}", bind(values)))
