"""Packed matrices as kernels read them: a row's weights, a group of 32 at a time, as vectors of float32.

The formats are those of `picompile_passes.dialect.formats`. A weight is (raw + offset) · scale: `raw` is what the bits say,
`offset` is -8 in q4 and 0 elsewhere, `scale` belongs to the group and is absent in f16. Kernels that sum over a row
leave offset and scale out of the inner loop; that is why the three come apart here.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.kernels.kernel import KernelFunction
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, loop
from picompile_codegen.kernels.vector import FLOATS, LANES, at, splat, to_floats
from picompile_passes.dialect.formats import FORMATS, GROUP

VECTORS = GROUP // LANES


@dataclass(frozen=True)
class Group:
    """32 consecutive weights of a row: `raw` vectors, and the `scale` (a float32 scalar, or None for 1)."""

    raw: tuple[Expr, ...]
    offset: float
    scale: Expr | None

    def weights(self) -> tuple[Expr, ...]:
        """The weights themselves."""
        values = [raw + splat(self.offset) if self.offset else raw for raw in self.raw]
        if self.scale is not None:
            scale = bind(splat(self.scale))
            values = [value * scale for value in values]
        return tuple(values)


@dataclass(frozen=True)
class Matrix:
    """A packed matrix [rows, columns] that is an argument of the kernel."""

    format: str
    rows: int
    columns: int
    data: Tensor
    scale: Tensor | None

    @property
    def groups(self) -> int:
        """Groups in a row; the last may be partly padding."""
        return -(-self.columns // GROUP)

    @property
    def offset(self) -> float:
        """What is to be added to the raw value of each weight, before scaling."""
        return -8.0 if self.format == "q4" else 0.0

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return self.rows * FORMATS[self.format].row_bytes(self.columns)

    def group(self, row: Expr, group: Expr) -> Group:
        """Loads a group of a row. Columns that are padding have zero weights."""
        raw = _RAW[self.format](self.data, row, group)
        return Group(tuple(bind(vector) for vector in raw), self.offset, self._scale(row, group))

    def _scale(self, row: Expr, group: Expr) -> Expr | None:
        if self.scale is None:
            return None
        first = FORMATS[self.format].scale_offset_bytes(self.columns) // 2
        return bind(to_floats(self.scale[row, group + first], 1))


def _raw_f16(data: Tensor, row: Expr, group: Expr) -> list[Expr]:
    return [to_floats(data[row, at(group * GROUP + i * LANES)]) for i in range(VECTORS)]


def _raw_q8(data: Tensor, row: Expr, group: Expr) -> list[Expr]:
    return _raw_f16(data, row, group)


def _raw_q4(data: Tensor, row: Expr, group: Expr) -> list[Expr]:
    """Byte i of a group holds element i in its low and element i + 16 in its high four bits."""
    half = GROUP // 2
    low, high = [], []
    for start in range(0, half, LANES):
        pairs = bind(tirx.Cast(f"int32x{LANES}", data[row, at(group * half + start)]))
        low.append(tirx.Cast(FLOATS, pairs & tirx.Broadcast(tirx.IntImm("int32", 15), LANES)))
        high.append(tirx.Cast(FLOATS, pairs >> tirx.Broadcast(tirx.IntImm("int32", 4), LANES)))
    return low + high


_RAW = {"f16": _raw_f16, "q8": _raw_q8, "q4": _raw_q4}
_DATA_DTYPES = {"f16": "float16", "q8": "int8", "q4": "uint8"}


def matrix_argument(function: KernelFunction, name: str, format_name: str, rows: int, columns: int) -> Matrix:
    """Declares a packed matrix: `name`.data and, where the format has scales, `name`.scale."""
    form = FORMATS[format_name]
    row_bytes = form.row_bytes(columns)
    dtype = _DATA_DTYPES[format_name]
    data = function.argument(f"{name}.data", dtype, rows, row_bytes // 2 if dtype == "float16" else row_bytes)
    scale = function.argument(f"{name}.scale", "float16", rows, row_bytes // 2) if form.scale_bytes else None
    return Matrix(format_name, rows, columns, data, scale)


def lane_counts(columns: int) -> tuple[int, ...]:
    """How many lanes of each vector of a group count, when `columns` of the 32 do."""
    return tuple(min(LANES, columns - start) for start in range(0, columns, LANES))


def each_group(columns: int, body: Callable[[Expr, tuple[int, ...]], None], unroll: int = 1) -> None:
    """Runs `body(group, lane counts)` for each group of a row of `columns`; only the last can be less than full."""
    full, rest = divmod(columns, GROUP)
    if full >= unroll:
        with loop(0, full // unroll) as index:
            for i in range(unroll):
                body(index * unroll + i, lane_counts(GROUP))
    for group in range(full - full % unroll, full):
        body(group, lane_counts(GROUP))
    if rest:
        body(full, lane_counts(rest))
