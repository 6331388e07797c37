"""Rows of activations and packed matrices, as the threads of a GPU read and write them.

The weight formats are those of `picompile_passes.dialect.formats`. Weights are read 16 bytes at a time, a unit: 8
weights in f16, 16 in q8, and a group of 32 in q4, in the order of the columns. Rows begin at multiples of 64 bytes and
are padded with zeros, so that every unit is aligned, and units past the last column may be read.
"""

from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.matrix import MatrixTensors
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, when
from picompile_codegen.cpu.vector import at, splat
from picompile_codegen.cuda.function import WARP, blocks_for
from picompile_codegen.cuda.memory import extern
from picompile_passes.weight_formats import FORMATS, GROUP

_MOST_LANES = 4
_MOST_THREADS = 1024


def lanes_for(width: int) -> int:
    """Return how many columns a thread takes at once of rows `width` wide, all of which begin at a multiple of them."""
    return _MOST_LANES if width % _MOST_LANES == 0 else 1


def load_lanes(x: KernelTensor, index: tuple[Expr, ...], lanes: int, inside: Expr) -> list[Expr]:
    """Load `lanes` elements of x from `index` on, a multiple of `lanes`; zeros unless `inside`."""
    *row, start = index
    zero = tirx.const(0, x.dtype)
    zeros = zero if lanes == 1 else splat(zero, lanes)
    value = bind(tirx.if_then_else(inside, x[(*row, at(start, lanes))], zeros))
    return [value] if lanes == 1 else [bind(tirx.Shuffle([value], [i])) for i in range(lanes)]


def store_lanes(y: KernelTensor, index: tuple[Expr, ...], values: list[Expr], inside: Expr) -> None:
    """Write `values` to y from `index` on, a multiple of their number, if `inside`."""
    *row, start = index
    lanes = len(values)
    with when(inside):
        y[(*row, at(start, lanes))] = values[0] if lanes == 1 else tirx.Shuffle(values, list(range(lanes)))


def block_threads(width: int) -> int:
    """Return how many threads a block needs for a row: one for every `lanes_for` columns, up to a block's limit."""
    return min(_MOST_THREADS, blocks_for(width // lanes_for(width), WARP) * WARP)


@dataclass(frozen=True)
class ColumnLanes:
    """The columns of a row that are one thread's, `lanes` side by side: where they begin, and whether they exist."""

    lanes: int
    runs: tuple[tuple[Expr, Expr], ...]

    @classmethod
    def of(cls, width: int, thread: Expr) -> "ColumnLanes":
        """Return the columns of `thread`, where a block of `block_threads(width)` shares a row."""
        lanes, threads = lanes_for(width), block_threads(width)
        numbers = [bind(turn * threads + thread) for turn in range(blocks_for(width // lanes, threads))]
        return cls(lanes, tuple((number * lanes, number < width // lanes) for number in numbers))

    def load(self, x: KernelTensor, *row: Expr, first: Expr = 0) -> list[Expr]:
        """Return the thread's elements of a row of x from column `first` on, zeros for those that do not exist."""
        return [
            value for start, inside in self.runs for value in load_lanes(x, (*row, first + start), self.lanes, inside)
        ]

    def store(self, y: KernelTensor, row: Expr, values: list[Expr], first: Expr = 0) -> None:
        """Write the thread's elements to a row of y, from column `first` on."""
        for number, (start, inside) in enumerate(self.runs):
            store_lanes(y, (row, first + start), values[number * self.lanes : (number + 1) * self.lanes], inside)

    def or_zeros(self, values: list[Expr]) -> list[Expr]:
        """Return `values`, with zeros for those that do not exist."""
        return [bind(tirx.Select(self.runs[i // self.lanes][1], value, 0.0)) for i, value in enumerate(values)]


# Packed matrices are read in units of 16 bytes.


UNIT_BYTES = 16
# `pi_nibble` returns weights times 2^-22; their scale makes up for it. Powers of two multiply without rounding.
_NIBBLE_SCALE = 2.0**22


@dataclass(frozen=True)
class Unit:
    """Weights of one unit: `values` float32, times `scale` (None for 1). `first` is the column of the first."""

    first: Expr
    values: tuple[Expr, ...]
    scale: Expr | None

    def weight(self, index: int) -> Expr:
        """One weight, scaled."""
        return self.values[index] if self.scale is None else self.values[index] * self.scale


@dataclass(frozen=True)
class CudaMatrix(MatrixTensors):
    """A packed matrix as a GPU reads it: 16 bytes at a time."""

    @property
    def unit_weights(self) -> int:
        """Weights in a unit."""
        return UNIT_BYTES * 8 // FORMATS[self.format].data_bits

    @property
    def units(self) -> int:
        """Units in a row; the last may be partly padding."""
        return FORMATS[self.format].padded_columns(self.columns) // self.unit_weights

    def unit(self, row: Expr, number: Expr) -> Unit:
        """Load unit `number` of a row."""
        first = number * self.unit_weights
        if self.format == "f16":
            return Unit(first, _halves(self.data, row, number), None)
        words = _words(self.data, row, number)
        group = number if self.format == "q4" else number // 2
        start = FORMATS[self.format].scale_offset_bytes(self.columns) // 2
        scale = bind(tirx.Cast("float32", self.scale[row, start + group]))  # type: ignore[index]
        if self.format == "q4":
            return Unit(first, _nibbles(words), bind(scale * _NIBBLE_SCALE))
        return Unit(first, _bytes(words), scale)


def _halves(data: KernelTensor, row: Expr, number: Expr) -> tuple[Expr, ...]:
    vector = bind(data[row, tirx.Ramp(number * 8, 1, 8)])
    return tuple(bind(tirx.Cast("float32", tirx.Shuffle([vector], [i]))) for i in range(8))


def _words(data: KernelTensor, row: Expr, number: Expr) -> tuple[Expr, ...]:
    vector = bind(data[row, tirx.Ramp(number * UNIT_BYTES, 1, UNIT_BYTES)])
    words = bind(tirx.reinterpret("uint32x4", vector))
    return tuple(bind(tirx.Shuffle([words], [i])) for i in range(4))


def _nibbles(words: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Return 32 weights / _NIBBLE_SCALE. Byte i holds weight i in its low and weight i + 16 in its high four bits."""
    half = GROUP // 2
    low = [extern("pi_nibble", words[i // 4], 8 * (i % 4)) for i in range(half)]
    high = [extern("pi_nibble", words[i // 4], 8 * (i % 4) + 4) for i in range(half)]
    return tuple(bind(value) for value in low + high)


def _bytes(words: tuple[Expr, ...]) -> tuple[Expr, ...]:
    return tuple(bind(extern("pi_byte", words[i // 4], i % 4)) for i in range(UNIT_BYTES))
