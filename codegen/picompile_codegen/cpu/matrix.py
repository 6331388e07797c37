"""Packed matrices as kernels read them: a row's weights, a group of 32 at a time, as vectors of float32.

The formats are those of `picompile_passes.dialect.formats`. A weight is (raw + offset) · scale: `raw` is what its bits
say, `offset` is -8 in q4 and 0 elsewhere, `scale` belongs to the group and is 1 in f16. The three come apart here: a
kernel that adds up a row need not spend an instruction on each of them for each weight.

A new format is a function in `_RAW` and an offset in `_OFFSETS`; its data type is in `specs.arguments`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tvm import tirx

from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, local, loop, prefetch
from picompile_codegen.cpu.vector import FLOATS, LANES, at, splat, to_floats
from picompile_codegen.errors import CodegenError
from picompile_passes.weight_formats import FORMATS, GROUP

CACHE_LINE_BYTES = 64

# How far ahead lines are prefetched: as much as a core reads in the 300 ns or so that busy memory takes.
_BYTES_AHEAD = 8 * 1024


@dataclass(frozen=True)
class Group:
    """32 consecutive weights of a row: `raw` vectors, their `offset`, and the `scale` in every lane (None for 1)."""

    raw: tuple[Expr, ...]
    offset: float
    scale: Expr | None

    def unscaled(self) -> tuple[Expr, ...]:
        """raw + offset."""
        return tuple(bind(raw + splat(self.offset)) if self.offset else raw for raw in self.raw)

    def weights(self) -> tuple[Expr, ...]:
        """The weights themselves."""
        return self.unscaled() if self.scale is None else tuple(value * self.scale for value in self.unscaled())


@dataclass(frozen=True)
class MatrixRow:
    """A row of a matrix that is being read, from group `first` on. `scales` float32 belong to its groups in order."""

    matrix: "KernelMatrix"
    number: Expr
    first: Expr
    factor: Expr | None
    scales: KernelTensor | None

    def group(self, group: Expr) -> Group:
        """Load group `first` + `group`. Columns that are padding have zero weights."""
        column = (self.first + group) * self.matrix.group_elements
        raw = tuple(bind(vector) for vector in _RAW[self.matrix.format](self.matrix.data, self.number, column))
        scale = self.factor if self.scales is None else bind(splat(self.scales[group]))
        return Group(raw, self.matrix.offset, scale)


M = TypeVar("M", bound="MatrixTensors")


@dataclass(frozen=True)
class MatrixTensors:
    """The tensors of a packed matrix [rows, columns], an argument of the kernel on the CPU or on a GPU."""

    format: str
    rows: int
    columns: int
    data: KernelTensor
    scale: KernelTensor | None

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
        return cls(declared.format, declared.rows, declared.columns, data, scale)


@dataclass(frozen=True)
class KernelMatrix(MatrixTensors):
    """A packed matrix as the CPU reads it: a row at a time, in groups of 32 weights."""

    @property
    def groups(self) -> int:
        """Groups in a row; the last may be partly padding."""
        return groups_of(self.columns)

    @property
    def group_elements(self) -> int:
        """Elements of `data` in a group."""
        return GROUP // 2 if self.format == "q4" else GROUP

    @property
    def groups_per_line(self) -> int:
        """Groups in a cache line."""
        return CACHE_LINE_BYTES * 8 // (FORMATS[self.format].data_bits * GROUP)

    @property
    def offset(self) -> float:
        """Added to the raw value of each weight, before scaling."""
        return _OFFSETS[self.format]

    @property
    def data_line_elements(self) -> int:
        """Elements of `data` in a cache line."""
        return CACHE_LINE_BYTES // 2 if self.format == "f16" else CACHE_LINE_BYTES

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, a whole number of cache lines."""
        return FORMATS[self.format].row_bytes(self.columns)

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return self.rows * self.row_bytes

    def row(self, number: Expr, *, factor: Expr | None = None) -> MatrixRow:
        """Begin to read a row, times the scalar `factor`."""
        return self._row(number, 0, self.groups, factor)

    def part_of_row(self, number: Expr, first: Expr, groups: int) -> MatrixRow:
        """Begin to read `groups` groups of a row; the first is a multiple of 8, or of 4 if `groups` is 4."""
        return self._row(number, first, groups, None)

    def eight_scales(self, number: Expr, first: Expr) -> Expr:
        """Return the scales of groups `first` … `first` + 7 of a row, as float32; zeros past the last group."""
        start = first + FORMATS[self.format].scale_offset_bytes(self.columns) // 2
        return bind(to_floats(self.scale[number, at(start)]))  # type: ignore[index]

    @property
    def rows_ahead(self) -> int:
        """How many rows ahead of the row being read to prefetch."""
        return -(-_BYTES_AHEAD // self.row_bytes)

    def fetch(self, number: Expr, line: Expr) -> None:
        """Prefetch cache line `line` of a row."""
        prefetch(self.data, number, line * (self.data_line_elements))

    @property
    def scale_lines(self) -> range:
        """The cache lines of a row behind those that begin with data: the scales follow the data."""
        return range(-(-self.groups // self.groups_per_line), self.row_bytes // CACHE_LINE_BYTES)

    def fetch_row(self, number: Expr) -> None:
        """Prefetch a whole row."""
        with loop(0, self.row_bytes // CACHE_LINE_BYTES) as line:
            self.fetch(number, line)

    def _row(self, number: Expr, first: Expr, groups: int, factor: Expr | None) -> MatrixRow:
        scales = self._unpack_scales(number, first, groups, factor)
        in_lanes = None if factor is None or scales is not None else bind(splat(factor))
        return MatrixRow(self, number, first, in_lanes, scales)

    def _unpack_scales(self, number: Expr, first: Expr, groups: int, factor: Expr | None) -> KernelTensor | None:
        """Return the scales as float32, side by side. Converted singly, each would cost as much as a vector of weights.

        A load may pass the last scale, but not the end of the row: both begin at multiples of 16 bytes.
        """
        if self.scale is None:
            return None
        lanes = LANES if groups > LANES // 2 else LANES // 2
        count = -(-groups // lanes)
        scales = local(count * lanes)
        start = first + FORMATS[self.format].scale_offset_bytes(self.columns) // 2
        with loop(0, count) as index:
            value = to_floats(self.scale[number, at(start + index * lanes, lanes)], lanes)
            scales[at(index * lanes, lanes)] = value if factor is None else value * splat(factor, lanes)
        return scales


def _raw_bytes_or_halves(data: KernelTensor, row: Expr, column: Expr) -> list[Expr]:
    return [to_floats(data[row, at(column + start)]) for start in range(0, GROUP, LANES)]


def _raw_nibbles(data: KernelTensor, row: Expr, column: Expr) -> list[Expr]:
    """Byte i of a group holds element i in its low and element i + 16 in its high four bits."""
    low, high = [], []
    for start in range(0, GROUP // 2, LANES):
        pairs = bind(tirx.Cast(f"int32x{LANES}", data[row, at(column + start)]))
        low.append(tirx.Cast(FLOATS, pairs & tirx.Broadcast(tirx.IntImm("int32", 15), LANES)))
        high.append(tirx.Cast(FLOATS, pairs >> tirx.Broadcast(tirx.IntImm("int32", 4), LANES)))
    return low + high


_RAW = {"f16": _raw_bytes_or_halves, "q8": _raw_bytes_or_halves, "q4": _raw_nibbles}
_OFFSETS = {"f16": 0.0, "q8": 0.0, "q4": -8.0}


def groups_of(columns: int) -> int:
    """Return how many groups hold `columns` columns."""
    return -(-columns // GROUP)


def lane_counts(columns: int) -> tuple[int, ...]:
    """Return how many lanes of each vector of a group count, when `columns` of the 32 do."""
    return tuple(min(LANES, columns - start) for start in range(0, columns, LANES))


def each_group(columns: int, body: Callable[[Expr, tuple[int, ...]], None], unroll: int = 1) -> None:
    """Run `body(group, lane counts)` for each group of a row of `columns`; only the last can be less than full."""
    full, rest = divmod(columns, GROUP)
    if full >= unroll:
        with loop(0, full // unroll) as index:
            for i in range(unroll):
                body(index * unroll + i, lane_counts(GROUP))
    for group in range(full - full % unroll, full):
        body(group, lane_counts(GROUP))
    if rest:
        body(full, lane_counts(rest))
