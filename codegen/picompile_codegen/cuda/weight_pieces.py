"""Pieces of packed matrices on their way to the memory of a block, as halves for tensor cores.

A piece is half of a group of a row: 16 weights. A thread has one piece of each tile. Those of f16 are copied while the
tile before them is multiplied; others are read into registers meanwhile, and unpacked behind it. The rounding of
code · scale to a half, 2^-11 of a weight, is the only one.
"""

from dataclasses import dataclass
from typing import Protocol

from tvm import tirx

from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind
from picompile_codegen.cpu.vector import at
from picompile_codegen.cuda.matrix import UNIT_BYTES, CudaMatrix, look_up, six_bit_words
from picompile_codegen.cuda.memory import address, place_in, registers, run_extern
from picompile_codegen.cuda.panel_codes import (
    CODES,
    PanelRows,
    four_numbers,
    load_scales,
    planes_of,
    scaled,
    stored_dtypes,
    weight_of,
    words_of_row,
)
from picompile_passes.formats import FLOAT16, GROUP, HIGH_GROUPS, ZERO_STEPS

PIECE = GROUP // 2
# Halves that are stored at once: 16 bytes. A piece is two such runs.
RUN = 8
_WORD_BYTES = 4


@dataclass(frozen=True)
class WeightPiece:
    """Half `half` of group `group` of a row."""

    row: Expr
    group: Expr
    half: Expr


def run_starts(matrix: CudaMatrix, half: Expr) -> tuple[Expr, Expr]:
    """Return at which columns of its group the two runs of a piece begin.

    A byte of four-bit codes has those of columns i and i + 16.
    """
    has_nibbles = matrix.has_nibbles or matrix.form.has_planes
    return (half * RUN, half * RUN + PIECE) if has_nibbles else (half * PIECE, half * PIECE + RUN)


class PieceRegisters(Protocol):
    """Registers for the words and scales that a thread has read of its next piece."""

    def load(self, matrix: CudaMatrix, piece: WeightPiece) -> None:
        """Read a piece of a matrix of the format and layout for which the registers are."""

    def unpacked(self) -> tuple[list[Expr], list[Expr]]:
        """Return the weights of both runs, four words of two halves each."""


def piece_registers(matrix: CudaMatrix) -> PieceRegisters:
    """Return registers for pieces of a matrix that has scales."""
    return _PanelRegisters(matrix) if matrix.panels else _RowRegisters(matrix)


class _RowRegisters:
    """Registers for pieces of rows."""

    def __init__(self, matrix: CudaMatrix) -> None:
        self._matrix = matrix
        form = matrix.form
        # Codes of four bits take two words, and so do the high bits of six; bytes take four.
        self._words: KernelTensor = registers(4 if form.has_planes or not matrix.has_nibbles else 2, dtype="uint32")
        self._scale: KernelTensor = registers(1, dtype="float16")
        self._zero: KernelTensor = registers(1, dtype="float16")

    def load(self, matrix: CudaMatrix, piece: WeightPiece) -> None:
        """See `PieceRegisters`."""
        form = matrix.form
        if form.scale == FLOAT16 and form.table_step == 1.0:
            start = form.scale_offset_bytes(matrix.columns) // form.scale_bytes
            self._scale[0] = matrix.scale[piece.row, start + piece.group]  # type: ignore[index]
        else:
            # Infinity times a code of 0 would be no number.
            scale = tirx.Min(matrix.group_scale(piece.row, piece.group), tirx.const(65504.0, "float32"))
            self._scale[0] = tirx.Cast("float16", scale)
        if not (matrix.has_nibbles or form.has_planes):
            self._read(matrix, piece.row, piece.group * GROUP + piece.half * PIECE, 0, 4)
            return
        self._read(matrix, piece.row, piece.group * UNIT_BYTES + piece.half * RUN, 0, 2)
        if form.has_planes:
            block = piece.group // HIGH_GROUPS * (2 * UNIT_BYTES) + piece.group % 2 * UNIT_BYTES
            self._read(matrix, piece.row, form.high_offset_bytes(matrix.columns) + block + piece.half * RUN, 2, 2)
            # Groups 0 and 1 of four have their high bits four bits lower than groups 2 and 3.
            shift = bind(tirx.Cast("uint32", (1 - piece.group // 2 % 2) * 4))
            for i in (2, 3):
                self._words[i] = self._words[i] << shift
        elif matrix.has_zeros:
            byte = matrix.data[piece.row, form.zero_offset_bytes(matrix.columns) + piece.group]
            self._zero[0] = tirx.Cast("float16", tirx.Cast("float32", byte) * (1 / ZERO_STEPS))

    def _read(self, matrix: CudaMatrix, row: Expr, start: Expr, first: int, count: int) -> None:
        vector = bind(matrix.data[row, at(start, count * _WORD_BYTES)])
        words = bind(tirx.reinterpret(f"uint32x{count}", vector))
        for i in range(count):
            self._words[first + i] = tirx.Shuffle([words], [i])

    def unpacked(self) -> tuple[list[Expr], list[Expr]]:
        """See `PieceRegisters`."""
        scale = _word("pi_both", self._scale[0])
        first, second = self._codes()
        return [_word("pi_times", pair, scale) for pair in first], [_word("pi_times", pair, scale) for pair in second]

    def _codes(self) -> tuple[list[Expr], list[Expr]]:
        matrix, words = self._matrix, self._words
        if matrix.form.has_planes:
            return self._six_bits()
        if not matrix.has_nibbles:
            pairs = [_word("pi_byte_codes", words[i // 2], i % 2) for i in range(RUN)]
            return pairs[: RUN // 2], pairs[RUN // 2 :]
        if matrix.form.table:
            return self._table_codes()
        zero = 0.0 if matrix.has_zeros else matrix.form.zero
        low, high = (
            [_word(name, words[i // 2], i % 2, tirx.const(zero, "float32")) for i in range(RUN // 2)]
            for name in ("pi_low_codes", "pi_high_codes")
        )
        if not matrix.has_zeros:
            return low, high
        own = _word("pi_both", self._zero[0])
        return [_word("pi_less", pair, own) for pair in low], [_word("pi_less", pair, own) for pair in high]

    def _table_codes(self) -> tuple[list[Expr], list[Expr]]:
        first, second = (
            [_word("pi_byte_codes", found[i // 2], i % 2) for i in range(RUN // 2)]
            for found in look_up(self._matrix.form, [self._words[i] for i in range(2)])
        )
        return first, second

    def _six_bits(self) -> tuple[list[Expr], list[Expr]]:
        words = [self._words[i] for i in range(4)]
        zero = tirx.const(self._matrix.form.zero, "float32")
        first, second = (
            [_word("pi_six_bit_codes", of[i // 2], i % 2, zero) for i in range(RUN // 2)]
            for of in six_bit_words(words[:2], words[2:])
        )
        return first, second


class _PanelRegisters:
    """Registers for pieces of panels, whose weights are computed in float32 before they are rounded."""

    def __init__(self, matrix: CudaMatrix) -> None:
        self._form = matrix.form
        self._words: KernelTensor = registers(self._words_of_plane * len(planes_of(self._form)), dtype="uint32")
        self._stored: list[list[KernelTensor]] = [
            [registers(1, dtype=dtype) for dtype in stored_dtypes(self._form)] for _ in range(self._scale_groups)
        ]

    @property
    def _is_bytes(self) -> bool:
        return self._form.data_bits == 8

    @property
    def _words_of_plane(self) -> int:
        """Words of a piece: two, where each has bits of both runs."""
        return PIECE // CODES if self._is_bytes else RUN // CODES

    @property
    def _scale_groups(self) -> int:
        """Scales of a piece: two, where the runs are in different ones of the format's groups."""
        return 1 if self._is_bytes else GROUP // self._form.group

    def load(self, matrix: CudaMatrix, piece: WeightPiece) -> None:
        """See `PieceRegisters`."""
        count = self._words_of_plane
        # Runs of bytes lie one behind the other.
        first, half = (0, piece.half) if self._is_bytes else (piece.half * count, 0)
        row = PanelRows.of_row(piece.row)
        for number, words in enumerate(words_of_row(matrix, row, piece.group, first, count, half)):
            for i, word in enumerate(words):
                self._words[number * count + i] = word
        for part, of_part in enumerate(self._stored):
            loaded = load_scales(matrix, row, piece.group, part)
            for register, value in zip(of_part, loaded, strict=True):
                register[0] = value

    def unpacked(self) -> tuple[list[Expr], list[Expr]]:
        """See `PieceRegisters`."""
        first, second = (self._run(run) for run in range(2))
        return first, second

    def _run(self, run: int) -> list[Expr]:
        count, planes = self._words_of_plane, len(planes_of(self._form))
        stored = [register[0] for register in self._stored[min(run, self._scale_groups - 1)]]
        ((scale, shift),) = scaled(self._form, stored, 1)
        pairs = []
        for i in range(RUN // CODES):
            word = run * (RUN // CODES) + i if self._is_bytes else i
            words = [(self._words[plane * count + word], 0) for plane in range(planes)]
            numbers = four_numbers(self._form, words, run)
            weights = [weight_of(number, scale, shift) for number in numbers]
            pairs += [_word("pi_pair_of", weights[j], weights[j + 1]) for j in range(0, CODES, 2)]
        return pairs


def copy_run(to: KernelTensor, at_word: Expr, matrix: CudaMatrix, piece: WeightPiece, run: int) -> None:
    """Start the copy of run `run` of a piece of f16 to `to` uint32, from word `at_word` on."""
    column = piece.group * GROUP + piece.half * PIECE + run * RUN
    run_extern("pi_copy_16", place_in(to, at_word), address(matrix.data, piece.row, column), 1)


def _word(name: str, *arguments: Expr) -> Expr:
    return bind(tirx.call_pure_extern("uint32", name, *arguments))
