"""Products of rows of a packed matrix with one vector, or a few: what decoding is made of.

A matrix is read once, front to back; all else stays in the first-level cache. So these are bound by memory, as long as
a group of weights costs no more cycles than its bytes take to arrive. In f16 a group takes four conversions and four
multiply-adds. In the other formats, where the vector is bytes too, 32 bytes of weights take some eight instructions.

Several vectors share the work on the weights: reading them, converting them or splitting their bits. Each vector has
sums of its own, added up in the same order as for one vector: its product has the same bits, whoever shares the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from tvm import tirx

from picompile_codegen.cpu.matrix import HIGH_GROUPS, KernelMatrix, each_group
from picompile_codegen.cpu.quantized import (
    BYTES,
    SCALES_TOGETHER,
    QuantizedVector,
    dot_pair,
    dot_signed,
    quantize_vector,
    split_codes,
)
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop
from picompile_codegen.cpu.vector import LANES, at, fma, lane, load, to_floats, total, zero_vectors
from picompile_passes.weight_formats import GROUP

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
    sums = zero_vectors(_CHAINS * len(vectors))
    quantized = [vector.quantized for vector in vectors if vector.quantized is not None]
    if quantized:
        _ByteProducts(sums, matrix, number, quantized).add(ahead)
    else:
        _add_floats(sums, matrix, number, vectors, ahead)
    return [_total(sums, _CHAINS * i) for i in range(len(vectors))]


def _total(sums: KernelTensor, first: int) -> Expr:
    a, b, c, d = (sums[first + chain, at(0)] for chain in range(_CHAINS))
    return total((a + b) + (c + d))


def biased(product: Expr, bias: KernelTensor | None, row: Expr) -> Expr:
    """Return `product` of row `row` plus its bias where there is one."""
    return product if bias is None else bind(product + bias[row])


def _add_floats(
    sums: KernelTensor, matrix: KernelMatrix, number: Expr, vectors: Sequence[Vector], ahead: Sequence[Expr]
) -> None:
    row, chains, lines = matrix.row(number), cycle(range(_CHAINS)), cycle(range(matrix.groups_per_line))

    def add_group(group: Expr, lane_counts: tuple[int, ...]) -> None:
        if next(lines) == 0:
            for other in ahead:
                matrix.fetch(other, group // matrix.groups_per_line)
        for i, (raw, valid) in enumerate(zip(row.group(group).raw, lane_counts, strict=False)):
            chain = next(chains)
            for place, vector in enumerate(vectors):
                value = bind(load(vector.x, vector.row, group * GROUP + i * LANES, valid=valid))
                _add(sums, place * _CHAINS + chain, raw, value)

    each_group(matrix.columns, add_group, unroll=matrix.groups_per_line)


def _add(sums: KernelTensor, chain: int, a: Expr, b: Expr) -> None:
    sums[chain, at(0)] = fma(a, b, sums[chain, at(0)])


@dataclass(frozen=True)
class _ByteProducts:
    """The products of row `number` of `matrix` with `vectors` in bytes, which are added to `sums`, _CHAINS for each."""

    sums: KernelTensor
    matrix: KernelMatrix
    number: Expr
    vectors: Sequence[QuantizedVector]

    def add(self, ahead: Sequence[Expr]) -> None:
        """Add the whole row, eight groups at a time, so that eight scales are converted and multiplied at once."""
        matrix = self.matrix
        full, rest = divmod(matrix.groups, SCALES_TOGETHER)
        if full:
            with loop(0, full) as index:
                self._add_eight(bind(index * SCALES_TOGETHER), SCALES_TOGETHER, ahead)
        if rest:
            self._add_eight(full * SCALES_TOGETHER, rest, ahead)
        for line in matrix.scale_lines:
            for other in ahead:
                matrix.fetch(other, line)

    def _add_eight(self, first: Expr, count: int, ahead: Sequence[Expr]) -> None:
        matrix = self.matrix
        of_row = matrix.eight_scales(self.number, first)
        of_offsets = bind(of_row * matrix.eight_zeros(self.number, first)) if matrix.has_zeros else of_row
        scales = []
        for place, vector in enumerate(self.vectors):
            if vector.offsets is not None:
                _add(self.sums, place * _CHAINS, of_offsets, vector.offsets[vector.row, at(first)])
            scales.append(bind(of_row * vector.scales[vector.row, at(first)]))
        matrix.fetch_eight(ahead, first, count)
        add = self._add_pairs if matrix.has_nibbles else self._add_groups
        add(first, count, scales)

    def _add_groups(self, first: Expr, count: int, scales: list[Expr]) -> None:
        """Add `count` groups of bytes, given each vector's scales."""
        for i in range(count):
            columns = at((first + i) * GROUP, GROUP)
            weights = bind(self.matrix.data[self.number, columns])
            for place, vector in enumerate(self.vectors):
                products = dot_signed(weights, bind(vector.bytes[vector.row, columns]))
                _add(self.sums, place * _CHAINS + i % _CHAINS, to_floats(products), lane(scales[place], i))

    def _add_pairs(self, first: Expr, count: int, scales: list[Expr]) -> None:
        """Add `count` groups of halves of bytes, two at a time: one of each pair in each half of a vector.

        Where the second does not exist, what follows in the row is in its place, and zeros in that of the activations.
        """
        matrix, plane = self.matrix, None
        for i in range(0, count, 2):
            start = (first + i) * GROUP
            raw = matrix.data[self.number, at((first + i) * matrix.group_elements, BYTES)]
            if matrix.form.has_planes and i % HIGH_GROUPS == 0:
                plane = _words(matrix.high_bits(self.number, first + i))
            low, high = split_codes(_words(raw), plane, i % HIGH_GROUPS * 2)
            lanes = [i + lane // (LANES // 2) for lane in range(LANES)]
            for place, vector in enumerate(self.vectors):
                values = [bind(vector.bytes[vector.row, at(start + half, BYTES)]) for half in (0, BYTES)]
                both = bind(tirx.Shuffle([scales[place]], lanes))
                _add(self.sums, place * _CHAINS + i // 2 % _CHAINS, to_floats(dot_pair(low, high, values)), both)


def _words(values: Expr) -> Expr:
    """uint8x32 as uint32x8."""
    return bind(tirx.reinterpret(f"uint32x{LANES}", bind(values)))
