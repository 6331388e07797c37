"""Readers of packed matrices: a row's weights, a group of 32 at a time, as vectors of float32.

The formats are those of `picompile_passes.formats.packing`. A weight is (raw + offset) · scale: `raw` is its code,
`offset` the zero of the codes, negated, and `scale` that of the group, 1 in f16. The three are returned separately: a
kernel that adds up a row need not spend an instruction on each of them for each weight.

`picompile_passes.formats` has the `Codec` of each format.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tvm import tirx

from picompile_codegen.cpu.decode import look_up, scale_floats, table_bias
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, local, loop, prefetch
from picompile_codegen.cpu.vector import FLOATS, LANES, at, splat, splat_int, to_floats
from picompile_codegen.errors import CodegenError
from picompile_codegen.specs.arguments import ITEM_BYTES
from picompile_passes.formats import FORMATS, GROUP, HIGH_BLOCK, HIGH_GROUPS, ZERO_STEPS, Codec

CACHE_LINE_BYTES = 64
# How far ahead rows are prefetched where they follow one another, or leave out few: as much as a core reads in the
# 300 ns or so that busy memory takes.
_ROW_BYTES_AHEAD = 8 * 1024
# The distance in the masked block of one token, whose rows the processor does not prefetch by itself. 16 KiB take
# 7 to 15 % less time in q4 than with 8, on a Zen 5 with memory at 45 GB/s.
_SCATTERED_BYTES_AHEAD = 16 * 1024

# Bytes of the high bits of a block, where codes lie in two planes.
_HIGH_BYTES = HIGH_BLOCK // 4


@dataclass(frozen=True)
class Group:
    """32 consecutive weights of a row: vectors `raw`, and, in every lane, `offset` and `scale`, None for 0 and 1."""

    raw: tuple[Expr, ...]
    offset: Expr | None
    scale: Expr | None

    def unscaled(self) -> tuple[Expr, ...]:
        """raw + offset."""
        return self.raw if self.offset is None else tuple(bind(raw + self.offset) for raw in self.raw)

    def weights(self) -> tuple[Expr, ...]:
        """The weights themselves."""
        return self.unscaled() if self.scale is None else tuple(value * self.scale for value in self.unscaled())


@dataclass(frozen=True)
class MatrixRow:
    """A row of a matrix that is being read, from group `first` on.

    `scales` and `offsets` float32 belong to its groups in order; `offsets` is None where all groups have the same one.
    """

    matrix: "KernelMatrix"
    number: Expr
    first: Expr
    scales: KernelTensor | None
    offsets: KernelTensor | None

    def group(self, group: Expr) -> Group:
        """Load group `first` + `group`. Columns that are padding have zero weights."""
        unpack = _raw_nibbles if self.matrix.has_nibbles else _raw_bytes_or_halves
        unpack = _raw_of_table if self.matrix.form.table else unpack
        raw = tuple(bind(vector) for vector in unpack(self.matrix, self.number, self.first + group))
        scale = None if self.scales is None else bind(splat(self.scales[group]))
        if self.offsets is not None:
            return Group(raw, bind(splat(self.offsets[group])), scale)
        return Group(raw, splat(self.matrix.offset) if self.matrix.offset else None, scale)


M = TypeVar("M", bound="MatrixTensors")


@dataclass(frozen=True)
class MatrixTensors:
    """The tensors of a packed matrix [rows, columns], an argument of the kernel on the CPU or on a GPU."""

    format: str
    rows: int
    columns: int
    data: KernelTensor
    scale: KernelTensor | None
    panels: bool = False

    @classmethod
    def argument(cls: type[M], function: KernelFunction, name: str) -> M:
        """Return the packed matrix that the kernel's spec declares under that name.

        Raises:
            CodegenError: If it declares none.
        """
        matrix = cls.optional(function, name)
        if matrix is None:
            raise CodegenError(f"kernel {function.name} has no packed matrix {name}")
        return matrix

    @classmethod
    def optional(cls: type[M], function: KernelFunction, name: str) -> M | None:
        """Return the packed matrix of that name, or None in a variant of the kernel that has none."""
        declared = function.declared_matrix(name)
        if declared is None:
            return None
        data, scale = function[f"{name}.data"], function.get(f"{name}.scale")
        return cls(declared.format, declared.rows, declared.columns, data, scale, declared.panels)


@dataclass(frozen=True)
class KernelMatrix(MatrixTensors):
    """A packed matrix as the CPU reads it: a row at a time, in groups of 32 weights."""

    @property
    def form(self) -> Codec:
        """The weight format."""
        return FORMATS[self.format]

    @property
    def has_nibbles(self) -> bool:
        """Whether a byte of `data` has the low four bits of two weights: elements i and i + 16 of a group."""
        return self.form.data_bits < 8

    @property
    def has_zeros(self) -> bool:
        """Whether each group has a zero or a minimum of its own."""
        return self.form.has_zeros

    @property
    def groups(self) -> int:
        """Groups in a row; the last may be partly padding."""
        return groups_of(self.columns)

    @property
    def group_elements(self) -> int:
        """Elements of `data` in a group, of those in the first plane if there are two."""
        return GROUP // 2 if self.has_nibbles else GROUP

    @property
    def groups_per_line(self) -> int:
        """Whole groups in a cache line."""
        return CACHE_LINE_BYTES * 8 // (self.form.data_bits * GROUP)

    @property
    def offset(self) -> float:
        """Added to the raw value of each weight, before scaling; times the byte of its group's zero if it has one.

        1 in formats with minima, which are added as they are, after scaling.
        """
        if self.form.minimum is not None:
            return 1.0
        if self.form.table:
            return 0.0 - table_bias(self.form)
        return -1.0 / ZERO_STEPS if self.form.zero is None else 0.0 - self.form.zero

    @property
    def least_raw(self) -> int:
        """The least raw value."""
        return int(min(self.form.table)) + table_bias(self.form) if self.form.table else self.form.lowest

    @property
    def largest_raw(self) -> int:
        """The largest magnitude of raw values."""
        if not self.form.table:
            return self.form.highest
        return max(int(max(self.form.table)) + table_bias(self.form), -self.least_raw)

    @property
    def data_line_elements(self) -> int:
        """Elements of `data` in a cache line."""
        return CACHE_LINE_BYTES // ITEM_BYTES[self.form.data_dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: a whole number of cache lines, but in panels, which are whole ones themselves."""
        return self.form.panel_row_bytes(self.columns) if self.panels else self.form.row_bytes(self.columns)

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return self.rows * self.row_bytes

    def row(self, number: Expr) -> MatrixRow:
        """Begin to read a row."""
        return self._row(number, 0, self.groups)

    def part_of_row(self, number: Expr, first: Expr, groups: int) -> MatrixRow:
        """Begin to read `groups` groups of a row; the first is a multiple of 8, or of 4 if `groups` is 4."""
        return self._row(number, first, groups)

    def scales_from(self, number: Expr, first: Expr, lanes: int = LANES) -> Expr:
        """Return the scales of `lanes` groups of a row from `first` on, as float32.

        Of eight, a few may be past the last group: zeros.
        """
        start = first + self.form.scale_offset_bytes(self.columns) // self.form.scale_bytes
        return bind(scale_floats(self.form, self.scale[number, at(start, lanes)], lanes))  # type: ignore[index]

    def zeros_from(self, number: Expr, first: Expr, lanes: int = LANES) -> Expr:
        """Return the bytes of the zeros of `lanes` groups of a row from `first` on, as float32."""
        return bind(self._zeros(number, first, lanes))

    def high_bits(self, number: Expr, group: Expr) -> Expr:
        """Return the high bits of group `group`, a multiple of HIGH_GROUPS, and of those behind it: uint8x32."""
        start = group * (_HIGH_BYTES // HIGH_GROUPS) + self.form.high_offset_bytes(self.columns)
        return self.data[number, at(start, _HIGH_BYTES)]

    def high_place(self, group: Expr) -> tuple[Expr, Expr]:
        """Return where any group's high bits are: the first of 16 bytes of `data`, and the bit in each of them."""
        start = group // HIGH_GROUPS * _HIGH_BYTES + group % 2 * (_HIGH_BYTES // 2)
        return start + self.form.high_offset_bytes(self.columns), group // 2 % 2 * 4

    @property
    def rows_ahead(self) -> int:
        """The distance, in rows, of a prefetch from the row being read."""
        return -(-_ROW_BYTES_AHEAD // self.row_bytes)

    @property
    def scattered_rows_ahead(self) -> int:
        """The distance, in rows, of a prefetch where the rows that are read do not follow one another."""
        return -(-_SCATTERED_BYTES_AHEAD // self.row_bytes)

    def fetch(self, number: Expr, line: Expr) -> None:
        """Prefetch cache line `line` of a row."""
        prefetch(self.data, number, line * self.data_line_elements)

    def fetch_part(self, numbers: Sequence[Expr], first: Expr, count: int, part: range) -> None:
        """Prefetch of each row its share of the lines that begin in the data of `count` groups from `first` on.

        `first` is a multiple of 8, and the share that of the groups `part` of these. Of data in two planes the lines
        are not those of these groups, but all are fetched in their order. A few at a time leave room for other reads.
        """
        lines = self._lines_of(count)
        start, stop = (-(-lines * place // count) for place in (part.start, min(part.stop, count)))
        for line in range(start, stop):
            for number in numbers:
                self.fetch(number, first * self._lines_of(LANES) // LANES + line)

    @property
    def scale_lines(self) -> range:
        """The cache lines of a row behind those that begin with data: zeros and scales follow the data."""
        return range(self._lines_of(self.groups), self.row_bytes // CACHE_LINE_BYTES)

    def _lines_of(self, groups: int) -> int:
        """Return how many lines begin in the data of so many groups."""
        return -(-groups * self.form.data_bits * GROUP // (8 * CACHE_LINE_BYTES))

    def fetch_row(self, number: Expr) -> None:
        """Prefetch a whole row."""
        with loop(0, self.row_bytes // CACHE_LINE_BYTES) as line:
            self.fetch(number, line)

    def _row(self, number: Expr, first: Expr, groups: int) -> MatrixRow:
        scales = self._unpack_scales(number, first, groups)
        return MatrixRow(self, number, first, scales, offsets=self._unpack_offsets(number, first, groups))

    def _unpack_scales(self, number: Expr, first: Expr, groups: int) -> KernelTensor | None:
        """Return the scales as float32, side by side. Converted singly, each would cost as much as a vector of weights.

        A load may pass the last scale, but not the end of the row: both begin at multiples of 16 bytes.
        """
        if self.scale is None:
            return None
        scale, start = self.scale, first + self.form.scale_offset_bytes(self.columns) // self.form.scale_bytes
        return _side_by_side(
            groups, lambda index, lanes: scale_floats(self.form, scale[number, at(start + index, lanes)], lanes)
        )

    def _unpack_offsets(self, number: Expr, first: Expr, groups: int) -> KernelTensor | None:
        """Return the offsets of groups as float32, side by side, or None where all have the same one.

        A load may pass the last zero, but not the scales: zeros are padded to 16 bytes.
        """
        if not self.has_zeros:
            return None
        return _side_by_side(
            groups, lambda index, lanes: self._zeros(number, first + index, lanes) * splat(self.offset, lanes)
        )

    def _zeros(self, number: Expr, first: Expr, lanes: int) -> Expr:
        zeros = self.data[number, at(first + self.form.zero_offset_bytes(self.columns), lanes)]
        return to_floats(tirx.Cast(f"int32x{lanes}", zeros), lanes)


def _side_by_side(groups: int, read: Callable[[Expr, int], Expr]) -> KernelTensor:
    """Return float32 numbers of `groups` groups; `read(index, lanes)` reads several, from number `index` on."""
    lanes = LANES if groups > LANES // 2 else LANES // 2
    count = -(-groups // lanes)
    values = local(count * lanes)
    with loop(0, count) as index:
        values[at(index * lanes, lanes)] = read(index * lanes, lanes)
    return values


def _raw_bytes_or_halves(matrix: KernelMatrix, row: Expr, group: Expr) -> list[Expr]:
    return [to_floats(matrix.data[row, at(group * matrix.group_elements + i)]) for i in range(0, GROUP, LANES)]


def _raw_nibbles(matrix: KernelMatrix, row: Expr, group: Expr) -> list[Expr]:
    """Byte i of a group holds the low bits of element i in its low and of element i + 16 in its high four bits."""
    low, high = [], []
    for start in range(0, GROUP // 2, LANES):
        pairs = bind(tirx.Cast(f"int32x{LANES}", matrix.data[row, at(group * matrix.group_elements + start)]))
        first, second = pairs & splat_int(15), pairs >> splat_int(4)
        if matrix.form.has_planes:
            place, bit = matrix.high_place(group)
            four = tirx.Cast(f"int32x{LANES}", matrix.data[row, at(place + start)])
            four = bind(four >> tirx.Broadcast(bit, LANES))
            first |= (four & splat_int(3)) << splat_int(4)
            second |= ((four >> splat_int(2)) & splat_int(3)) << splat_int(4)
        low.append(tirx.Cast(FLOATS, first))
        high.append(tirx.Cast(FLOATS, second))
    return low + high


def _raw_of_table(matrix: KernelMatrix, row: Expr, group: Expr) -> list[Expr]:
    """Look up the codes of a group, which lie as in `_raw_nibbles`."""
    count, bias = GROUP // 2, table_bias(matrix.form)
    pairs = bind(matrix.data[row, at(group * matrix.group_elements, count)])
    four, low = (tirx.Broadcast(tirx.IntImm("uint8", value), count) for value in (4, 15))
    values = [value + bias for value in matrix.form.table]
    found = []
    for codes in (bind(pairs & low), bind(pairs >> four)):
        entries = look_up(values, codes, count, "int8" if matrix.least_raw < 0 else "uint8")
        for start in range(0, count, LANES):
            eight = bind(tirx.Shuffle([entries], list(range(start, start + LANES))))
            found.append(tirx.Cast(FLOATS, tirx.Cast(f"int32x{LANES}", eight)))
    return found


def groups_of(columns: int) -> int:
    """Return how many groups hold `columns` columns."""
    return -(-columns // GROUP)


def lane_counts(columns: int) -> tuple[int, ...]:
    """Return how many lanes of each vector of a group count, when `columns` of the 32 do."""
    return tuple(min(LANES, columns - start) for start in range(0, columns, LANES))


def each_group(columns: int, body: Callable[[Expr, tuple[int, ...]], None], unroll: int = 1, first: int = 0) -> None:
    """Run `body(group, lane counts)` for each group of a row of `columns`, from `first` on, a multiple of `unroll`.

    Only the last can be less than full.
    """
    full, rest = divmod(columns, GROUP)
    if full - first >= unroll:
        with loop(first // unroll, full // unroll) as index:
            for i in range(unroll):
                body(index * unroll + i, lane_counts(GROUP))
    for group in range(max(first, full - full % unroll), full):
        body(group, lane_counts(GROUP))
    if rest:
        body(full, lane_counts(rest))
