"""Codes of matrices in panels as numbers, and what groups have of their own, as the threads of a GPU read them.

`formats/panels.py` says where they lie: a word has four codes of a row, or some bits of each. A weight is number ·
scale, plus a shift where its format has minima or zeros of groups.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.panel_matrix import GroupPlace
from picompile_codegen.cpu.tensor import Expr, bind
from picompile_codegen.cpu.vector import at
from picompile_codegen.cuda.matrix import CudaMatrix, look_up_half
from picompile_codegen.cuda.memory import extern
from picompile_passes.formats import BLOCK, E8M0, GROUP, INT8, LOW_BITS, PANEL_ROWS, ZERO_STEPS, Codec, Plane

# Codes in a word.
CODES = 4
# Words of a half of a group, or, where codes are no whole bytes and words have bits of both halves, of a group.
WORDS = 4
# `pi_nibble` returns codes times 2^-22.
_NIBBLE_UNIT = 2.0**22


def planes_of(form: Codec) -> tuple[Plane, ...]:
    """Return the planes of a format's codes: one of whole bytes where a code is one."""
    return (Plane(8, 0),) if form.data_bits == 8 else form.planes


def words_at(matrix: CudaMatrix, panel: Expr, start: Expr, count: int) -> list[Expr]:
    """Load `count` words that lie side by side in a panel, from byte `start` on."""
    vector = bind(matrix.data[panel, at(start, 4 * count)])
    words = bind(tirx.reinterpret("uint32" if count == 1 else f"uint32x{count}", vector))
    return [words] if count == 1 else [bind(tirx.Shuffle([words], [i])) for i in range(count)]


def four_numbers(form: Codec, words: Sequence[tuple[Expr, int]], half: int) -> list[Expr]:
    """Return the numbers of four codes, float32, to be multiplied with `scaled` scales.

    `words` has a word of each plane, and the bit of each byte at which codes of the first half of a group begin there.
    Those of the other half, with `half` 1, follow them. Words of whole bytes have one half.
    """
    low, _ = words[0]
    if form.data_bits == 8:
        return _each("pi_e4m3" if form.has_floats else "pi_byte", low)
    if form.has_floats:
        return _floats_of_table(form, low, half)
    if form.table:
        return _each("pi_byte", look_up_half([int(value) & 255 for value in form.table], low, half))
    zero = 0.0 if form.has_zeros else float(form.zero or 0)
    if _is_nibble(form):
        of_unit = tirx.const(zero / _NIBBLE_UNIT, "float32")
        return [bind(extern("pi_nibble", low, 8 * i + LOW_BITS * half, of_unit)) for i in range(CODES)]
    return _each("pi_code", _joined(form, words, half), tirx.const(zero, "float32"))


def weight_of(number: Expr, scale: Expr, shift: Expr | None) -> Expr:
    """Return the weight that a number of `four_numbers` stands for."""
    return bind(number * scale if shift is None else number * scale + shift)


def _is_nibble(form: Codec) -> bool:
    return form.data_bits == LOW_BITS and not form.table


def _each(name: str, word: Expr, *others: Expr) -> list[Expr]:
    return [bind(extern(name, word, i, *others)) for i in range(CODES)]


def _joined(form: Codec, words: Sequence[tuple[Expr, int]], half: int) -> Expr:
    """Return a word of four codes, a byte each, of the words of all planes."""
    codes = None
    for plane, (word, bit) in zip(form.planes, words, strict=True):
        left = plane.shift - bit - half * plane.bits
        amount = tirx.const(abs(left), "uint32")
        moved = word << amount if left > 0 else word >> amount
        bits = moved & tirx.const((((1 << plane.bits) - 1) << plane.shift) * 0x01010101, "uint32")
        codes = bits if codes is None else codes | bits
    return bind(codes)


def _floats_of_table(form: Codec, word: Expr, half: int) -> list[Expr]:
    """Return entries of a table of 16 float32, which are looked up byte by byte."""
    numbers = [struct.pack("<f", value) for value in form.table]
    parts = [look_up_half([number[i] for number in numbers], word, half) for i in range(4)]
    return [bind(extern("pi_float_of", *parts, i)) for i in range(CODES)]


def stored_dtypes(form: Codec) -> list[str]:
    """Return the dtypes of what `load_scales` loads for a row: of halves, and of words for bytes."""
    sizes = [form.scale_bytes, *([form.zero_bytes] if form.has_zeros else []), *[2] * (form.factor_bytes // 2)]
    return ["float16" if size == 2 else "uint32" for size in sizes]


@dataclass(frozen=True)
class PanelRows:
    """`count` rows of a panel, from row `first` on: one or four, and `first` a multiple of it."""

    panel: Expr
    first: Expr
    count: int

    @classmethod
    def of_row(cls, row: Expr) -> "PanelRows":
        """Return row `row` of a matrix alone."""
        return cls(bind(row // PANEL_ROWS), bind(row % PANEL_ROWS), 1)


def words_of_row(
    matrix: CudaMatrix, row: PanelRows, group: Expr, first: Expr, count: int, half: Expr = 0
) -> Iterator[list[Expr]]:
    """Load words of one row of each plane: `count` of a group of 32, from number `first` on, shifted to bit 0 of bytes.

    Words of whole bytes are those of half `half`.
    """
    for plane in planes_of(matrix.form):
        if plane.bits == 8:
            start, bit = group * GROUP + half * (GROUP // 2), 0
        else:
            start, bit = GroupPlace(group).place_in(plane)
        start = bind(matrix.form.plane_offset_bytes(plane, matrix.columns) + start + first * CODES)
        places = [(start + i * CODES) * PANEL_ROWS + row.first * CODES for i in range(count)]
        yield [bind(words_at(matrix, row.panel, place, 1)[0] >> tirx.Cast("uint32", bit)) for place in places]


def weights_of_row(matrix: CudaMatrix, row: PanelRows, group: Expr, quad: Expr) -> Iterator[list[Expr]]:
    """Yield four weights of each half of a group of one row, those of word `quad`: float32."""
    form = matrix.form
    for half in (0, 1):
        words = [(word, 0) for (word,) in words_of_row(matrix, row, group, quad, 1, half)]
        part = half if form.group < GROUP else 0
        ((scale, shift),) = scaled(form, load_scales(matrix, row, group, part), 1)
        yield [weight_of(number, scale, shift) for number in four_numbers(form, words, half)]


def load_scales(matrix: CudaMatrix, rows: PanelRows, group: Expr, part: Expr) -> list[Expr]:
    """Load what part `part` of a group of 32 columns has: of each of `stored_dtypes`, halves or a word for all rows."""
    form, columns = matrix.form, matrix.columns
    index = group * (GROUP // form.group) + part
    stored = [_load(matrix, rows, form.scale_offset_bytes(columns), index, form.scale_bytes)]
    if form.has_zeros:
        stored.append(_load(matrix, rows, form.zero_offset_bytes(columns), index, form.zero_bytes))
    for number in range(form.factor_bytes // 2):
        block = number * form.blocks(columns) + group // (BLOCK // GROUP)
        stored.append(_load(matrix, rows, form.factor_offset_bytes(columns), block, 2))
    return stored


def _load(matrix: CudaMatrix, rows: PanelRows, start: int, index: Expr, item_bytes: int) -> Expr:
    """Load number `index` of each row, in a part that begins behind `start` bytes of a row."""
    place = (start // item_bytes + index) * PANEL_ROWS + rows.first
    if item_bytes == 2:
        return bind(matrix.scale[rows.panel, at(place, rows.count)])  # type: ignore[index]
    if rows.count == 1:
        return bind(tirx.Cast("uint32", tirx.reinterpret("uint8", matrix.data[rows.panel, place])))
    return words_at(matrix, rows.panel, place, 1)[0]


def scaled(form: Codec, stored: Sequence[Expr], rows: int) -> list[tuple[Expr, Expr | None]]:
    """Return the scale and the shift of each of `rows` rows, of what `load_scales` loaded; None for no shifts."""
    scales, factors = _scales(form, stored[0], rows), stored[1 + form.has_zeros :]
    if factors:
        scales = _products(scales, _halves(factors[0], rows))
    step = form.table_step * (_NIBBLE_UNIT if _is_nibble(form) else 1.0)
    of_numbers = [bind(scale if step == 1.0 else scale * step) for scale in scales]
    if not form.has_zeros:
        return [(scale, None) for scale in of_numbers]
    if form.minimum is None:
        shifts = _products(_bytes(stored[1], rows), [scale * (-1 / ZERO_STEPS) for scale in scales])
    elif form.minimum.in_blocks:
        shifts = _products(_bytes(stored[1], rows), _halves(factors[1], rows))
    else:
        shifts = _halves(stored[1], rows)
    return list(zip(of_numbers, shifts, strict=True))


def _scales(form: Codec, stored: Expr, rows: int) -> list[Expr]:
    """Return scales, or the whole numbers of which they are multiples."""
    if form.scale == E8M0:
        words = [bind(stored >> tirx.const(8 * i, "uint32")) for i in range(rows)]
        return [bind(extern("pi_power", tirx.Cast("uint8", word & tirx.const(255, "uint32")))) for word in words]
    return _bytes(stored, rows, "pi_byte") if form.scale == INT8 else _halves(stored, rows)


def _halves(loaded: Expr, rows: int) -> list[Expr]:
    if rows == 1:
        return [bind(tirx.Cast("float32", loaded))]
    return [bind(tirx.Cast("float32", tirx.Shuffle([loaded], [i]))) for i in range(rows)]


def _bytes(word: Expr, rows: int, name: str = "pi_code") -> list[Expr]:
    zero = () if name == "pi_byte" else (tirx.const(0.0, "float32"),)
    return [bind(extern(name, word, i, *zero)) for i in range(rows)]


def _products(first: Sequence[Expr], second: Sequence[Expr]) -> list[Expr]:
    return [bind(a * b) for a, b in zip(first, second, strict=True)]
