"""Reading and writing rows of activations and packed matrices by the threads of a GPU.

The weight formats are those of `picompile_passes.formats.packing`. Weights are read 16 bytes at a time, a unit: 8
weights in f16, 16 in q8, and a group of 32 in q4 and q4m, in the order of the columns. In q6 a unit is a group as well:
16 bytes of low bits, and the 16 bytes that have its high ones. Rows begin at multiples of 64 bytes and are padded with
zeros, so that every unit is aligned, and units past the last column may be read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.matrix import MatrixTensors
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, when
from picompile_codegen.cpu.vector import at, splat
from picompile_codegen.cuda.function import WARP, blocks_for
from picompile_codegen.cuda.memory import extern
from picompile_passes.formats import E8M0, FORMATS, GROUP, HIGH_GROUPS, LOW_BITS, ZERO_STEPS, Codec

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


def block_threads(width: int, lanes: int = 0) -> int:
    """Return how many threads a block needs for a row: one for every `lanes` columns, up to a block's limit.

    Without `lanes` there are as many as `lanes_for` returns.
    """
    return min(_MOST_THREADS, blocks_for(width // (lanes or lanes_for(width)), WARP) * WARP)


@dataclass(frozen=True)
class ColumnLanes:
    """The columns of a row that are one thread's of `threads`: runs of `lanes` side by side.

    `runs` has of each where it begins, and whether it exists.
    """

    lanes: int
    threads: int
    runs: tuple[tuple[Expr, Expr], ...]

    @classmethod
    def of(cls, width: int, thread: Expr, threads: int = 0, lanes: int = 0) -> "ColumnLanes":
        """Return the columns of `thread`, where a block shares a row: one of `block_threads`, unless given."""
        lanes = lanes or lanes_for(width)
        threads = threads or block_threads(width, lanes)
        numbers = [bind(turn * threads + thread) for turn in range(blocks_for(width // lanes, threads))]
        return cls(lanes, threads, tuple((number * lanes, number < width // lanes) for number in numbers))

    def load_run(self, number: int, x: KernelTensor, *row: Expr, first: Expr = 0) -> list[Expr]:
        """Return elements of a row of x that begins at column `first`, zeros for those that do not exist."""
        start, inside = self.runs[number]
        return load_lanes(x, (*row, first + start), self.lanes, inside)

    def store_run(self, number: int, y: KernelTensor, row: Expr, values: list[Expr], first: Expr = 0) -> None:
        """Write elements of a row of y that begins at column `first`."""
        start, inside = self.runs[number]
        store_lanes(y, (row, first + start), values, inside)

    def or_zeros(self, number: int, values: list[Expr]) -> list[Expr]:
        """Return `values` of a run, with zeros for those that do not exist."""
        return [bind(tirx.Select(self.runs[number][1], value, 0.0)) for value in values]


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
    def form(self) -> Codec:
        """The sizes of its format."""
        return FORMATS[self.format]

    @property
    def has_nibbles(self) -> bool:
        """Whether its data is nibbles alone."""
        return self.form.data_bits == LOW_BITS

    @property
    def has_zeros(self) -> bool:
        """Whether each group has a zero of its own."""
        return self.form.zero is None

    @property
    def unit_weights(self) -> int:
        """Weights in a unit."""
        return UNIT_BYTES * 8 // (LOW_BITS if self.form.has_planes else self.form.data_bits)

    @property
    def units(self) -> int:
        """Units in a row; the last may be partly padding."""
        return self.form.padded_columns(self.columns) // self.unit_weights

    def unit(self, row: Expr, number: Expr) -> Unit:
        """Load unit `number` of a row."""
        form, first = self.form, number * self.unit_weights
        if not form.scale_bytes:
            return Unit(first, _halves(self.data, row, number), None)
        words = _words(self.data, row, number)
        units_a_group = GROUP // self.unit_weights
        group = number if units_a_group == 1 else number // units_a_group
        scale = bind(self.group_scale(row, group))
        if form.has_planes:
            return Unit(first, _six_bits(words, self._high_bits(row, group)), scale)
        if form.table:
            looked_up = look_up(form, words)
            return Unit(first, tuple(value for found in looked_up for value in _bytes(found)), scale)
        if self.has_nibbles:
            zero = (self._zero(row, group),) if self.has_zeros else ()
            return Unit(first, _nibbles(words, *zero), bind(scale * _NIBBLE_SCALE))
        return Unit(first, _bytes(words), scale)

    def group_scale(self, row: Expr, group: Expr) -> Expr:
        """Load the scale of a group, float32: the value of a code of 1, or of a 1 in the format's table."""
        form = self.form
        start = form.scale_offset_bytes(self.columns) // form.scale_bytes
        stored = self.scale[row, start + group]  # type: ignore[index]
        scale = extern("pi_power", stored) if form.scale == E8M0 else tirx.Cast("float32", stored)
        return scale if form.table_step == 1.0 else scale * form.table_step

    def _zero(self, row: Expr, group: Expr) -> Expr:
        """Load the zero of a group, of a matrix that has one for each, as `pi_nibble` takes it."""
        byte = self.data[row, self.form.zero_offset_bytes(self.columns) + group]
        return bind(tirx.Cast("float32", byte) * (1 / (ZERO_STEPS * _NIBBLE_SCALE)))

    def _high_bits(self, row: Expr, group: Expr) -> tuple[Expr, ...]:
        """Load the high bits of a group: four words, each byte of which has those of element i from bit 4 on and those
        of element i + 16 from bit 6 on.
        """
        first = self.form.high_offset_bytes(self.columns) // UNIT_BYTES
        words = _words(self.data, row, first + group // HIGH_GROUPS * 2 + group % 2)
        # Groups 0 and 1 of four have them four bits lower, groups 2 and 3 not. TVM folds a difference into negative
        # numbers, which unsigned ones are not.
        one, four = tirx.const(1, "uint32"), tirx.const(4, "uint32")
        shift = bind(((tirx.Cast("uint32", group) << one) & four) ^ four)
        return tuple(bind(word << shift) for word in words)


def _halves(data: KernelTensor, row: Expr, number: Expr) -> tuple[Expr, ...]:
    vector = bind(data[row, tirx.Ramp(number * 8, 1, 8)])
    return tuple(bind(tirx.Cast("float32", tirx.Shuffle([vector], [i]))) for i in range(8))


def _words(data: KernelTensor, row: Expr, number: Expr) -> tuple[Expr, ...]:
    vector = bind(data[row, tirx.Ramp(number * UNIT_BYTES, 1, UNIT_BYTES)])
    words = bind(tirx.reinterpret("uint32x4", vector))
    return tuple(bind(tirx.Shuffle([words], [i])) for i in range(4))


def _nibbles(words: tuple[Expr, ...], *zero: Expr) -> tuple[Expr, ...]:
    """Return 32 weights / _NIBBLE_SCALE. Byte i holds weight i in its low and weight i + 16 in its high four bits."""
    half = GROUP // 2
    low = [extern("pi_nibble", words[i // 4], 8 * (i % 4), *zero) for i in range(half)]
    high = [extern("pi_nibble", words[i // 4], 8 * (i % 4) + 4, *zero) for i in range(half)]
    return tuple(bind(value) for value in low + high)


def _six_bits(low: tuple[Expr, ...], high: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Return 32 weights of codes whose low bits are as in `_nibbles`, and the high ones as `_high_bits` has them."""
    half = GROUP // 2
    both = six_bit_words(low, high)
    return tuple(bind(extern("pi_six_bits", of[i // 4], i % 4)) for of in both for i in range(half))


def six_bit_words(low: Sequence[Expr], high: Sequence[Expr]) -> tuple[list[Expr], list[Expr]]:
    """Return words that have a code in the low six bits of each byte: elements i of a group, and elements i + 16.

    Bits that belong to neither code come along: one instruction takes from two words what a mask says.
    """
    two, four, mask, rest = (tirx.const(value, "uint32") for value in (2, 4, 0x0F0F0F0F, 0xF0F0F0F0))
    first = [bind((a & mask) | (b & rest)) for a, b in zip(low, high, strict=True)]
    second = [bind(((a >> four) & mask) | ((b >> two) & rest)) for a, b in zip(low, high, strict=True)]
    return first, second


def look_up(form: Codec, words: Sequence[Expr]) -> tuple[list[Expr], list[Expr]]:
    """Return words of four signed bytes each: what the format's table has for low and for high halves of bytes."""
    table = [int(value) & 255 for value in form.table]
    low, high = ([look_up_half(table, word, half) for word in words] for half in (0, 1))
    return low, high


def look_up_half(table: Sequence[int], word: Expr, half: int) -> Expr:
    """Return a word of four bytes: what a table of 16 bytes has for the low, or the high, halves of a word's bytes."""
    entries = bytes(table)
    words = [tirx.const(int.from_bytes(entries[i : i + 4], "little"), "uint32") for i in (0, 4, 8, 12)]
    return bind(tirx.call_pure_extern("uint32", "pi_look_up", word, half, *words))


def _bytes(words: Sequence[Expr]) -> tuple[Expr, ...]:
    return tuple(bind(extern("pi_byte", words[i // 4], i % 4)) for i in range(UNIT_BYTES))
