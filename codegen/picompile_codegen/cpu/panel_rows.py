"""Single rows of a matrix in panels, as float32: what an embedding looks up where the table lies in panels.

A row's bytes lie four by four, a cache line apart, so that this reads as many lines as the row has words. A step looks
up one row a token, which is little beside its products.
"""

from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.byte_tiles import QUADS
from picompile_codegen.cpu.decode import look_up, number_unit, numbers_at
from picompile_codegen.cpu.matrix import Group, KernelMatrix
from picompile_codegen.cpu.panel_matrix import GroupPlace
from picompile_codegen.cpu.tensor import Expr, bind
from picompile_codegen.cpu.vector import FLOATS, LANES, at, splat, splat_int
from picompile_passes.formats import BLOCK, E8M0, GROUP, PANEL_ROWS, Plane

_INTS = f"int32x{LANES}"
_WORD = 4


@dataclass(frozen=True)
class PanelRow:
    """Row `number` of a matrix in panels."""

    matrix: KernelMatrix
    number: Expr

    def group(self, group: Expr) -> Group:
        """Load a group of 32 weights."""
        return Group(tuple(self._weights(group)), None, None)

    def _weights(self, group: Expr) -> list[Expr]:
        form, raw = self.matrix.form, self._raw(group)
        parts, weights = GROUP // form.group, []
        for part in range(parts):
            index = bind(group * parts + part)
            scale = bind(splat(self._scale(group, index)))
            shift = self._shift(group, index)
            for vector in raw[part * len(raw) // parts : (part + 1) * len(raw) // parts]:
                if form.minimum is not None:
                    weights.append(bind(vector * scale + splat(shift)))
                else:
                    weights.append(bind((vector - splat(shift)) * scale))
        return weights

    def _raw(self, group: Expr) -> list[Expr]:
        """Return the codes, or the values of the table that they stand for."""
        form = self.matrix.form
        if form.has_floats:
            return self._floats(group)
        if form.data_bits == 8:
            words = [self._word(group * QUADS + quad) for quad in range(QUADS)]
            eights = [_joined(words[i : i + 2]) for i in range(0, QUADS, 2)]
            return [bind(tirx.Cast(FLOATS, tirx.Cast(_INTS, eight))) for eight in eights]
        planes = [self._plane(group, plane) for plane in form.planes]
        if form.table:
            (words, _), count = planes[0], GROUP // 2
            pairs, low, four = _joined(words), tirx.IntImm("uint8", 15), tirx.IntImm("uint8", 4)
            halves = [pairs & tirx.Broadcast(low, count), pairs >> tirx.Broadcast(four, count)]
            found = [look_up(form.table, bind(codes), count, "int8") for codes in halves]
            eights = [
                tirx.Shuffle([entries], list(range(start, start + LANES))) for entries in found for start in (0, LANES)
            ]
            return [bind(tirx.Cast(FLOATS, tirx.Cast(_INTS, bind(eight)))) for eight in eights]
        return [bind(tirx.Cast(FLOATS, self._codes(planes, half, start))) for half in (0, 1) for start in (0, LANES)]

    def _floats(self, group: Expr) -> list[Expr]:
        """Return the numbers of a group that codes stand for."""
        form, bits = self.matrix.form, self.matrix.form.data_bits
        quads, unit = QUADS * bits // 8, splat(number_unit(form))
        words = [self._word(group * quads + quad) for quad in range(quads)]
        eights = [_joined(words[i : i + 2]) for i in range(0, quads, 2)]
        codes = [bind(tirx.Cast(f"uint32x{LANES}", eight)) for eight in eights]
        return [bind(numbers_at(form, of_bytes, bit, LANES) * unit) for bit in range(0, 8, bits) for of_bytes in codes]

    def _codes(self, planes: list[tuple[list[Expr], Expr]], half: int, start: int) -> Expr:
        """Return eight codes, int32: those of elements `start` … of the first or of the last 16 of a group."""
        total = None
        for plane, (words, bit) in zip(self.matrix.form.planes, planes, strict=True):
            stored = tirx.Cast(_INTS, _joined(words[start // _WORD : start // _WORD + 2]))
            shifted = bind(stored >> tirx.Broadcast(tirx.Cast("int32", bit + half * plane.bits), LANES))
            bits = (shifted & splat_int((1 << plane.bits) - 1)) << splat_int(plane.shift)
            total = bits if total is None else bind(total | bits)
        return total

    def _plane(self, group: Expr, plane: Plane) -> tuple[list[Expr], Expr]:
        """Return four words with a plane's bits of a group, uint8x4 each, and the first of their bits."""
        start, bit = GroupPlace(group).place_in(plane)
        first = (start + self.matrix.form.plane_offset_bytes(plane, self.matrix.columns)) // _WORD
        return [self._word(first + i) for i in range(QUADS // 2)], bit

    def _word(self, index: Expr) -> Expr:
        """Return four bytes of the row, number `index` of those of four."""
        panel, lane = self.number // PANEL_ROWS, self.number % PANEL_ROWS
        return bind(self.matrix.data[panel, at((index * PANEL_ROWS + lane) * _WORD, _WORD)])

    def _scale(self, group: Expr, index: Expr) -> Expr:
        form, columns = self.matrix.form, self.matrix.columns
        assert form.scale is not None
        start = form.scale_offset_bytes(columns)
        if form.scale.in_blocks:
            whole = tirx.Cast("float32", tirx.reinterpret("int8", self._byte(start, index)))
            scale = whole * self._factor(group, 0)
        elif form.scale == E8M0:
            scale = tirx.reinterpret("float32", tirx.Cast("int32", self._byte(start, index)) << 23)
        else:
            scale = self._half(start, index)
        return bind(scale if form.table_step == 1.0 else scale * form.table_step)

    def _shift(self, group: Expr, index: Expr) -> Expr:
        """Return the minimum of a group, or the code of its 0."""
        form, start = self.matrix.form, self.matrix.form.zero_offset_bytes(self.matrix.columns)
        if form.minimum is None:
            own = form.zero is None
            return bind(tirx.Cast("float32", self._byte(start, index)) * -self.matrix.offset) if own else form.zero
        if form.minimum.in_blocks:
            return bind(tirx.Cast("float32", self._byte(start, index)) * self._factor(group, 1))
        return self._half(start, index)

    def _factor(self, group: Expr, number: int) -> Expr:
        form, columns = self.matrix.form, self.matrix.columns
        block = number * form.blocks(columns) + group // (BLOCK // GROUP)
        return self._half(form.factor_offset_bytes(columns), block)

    def _byte(self, start: int, index: Expr) -> Expr:
        """Return byte `index` of a part of the row: of data, whose dtype the bytes of scales may not have."""
        panel, lane = self.number // PANEL_ROWS, self.number % PANEL_ROWS
        return tirx.reinterpret("uint8", self.matrix.data[panel, (start + index) * PANEL_ROWS + lane])

    def _half(self, start: int, index: Expr) -> Expr:
        panel, lane = self.number // PANEL_ROWS, self.number % PANEL_ROWS
        return bind(tirx.Cast("float32", self.matrix.scale[panel, (start // 2 + index) * PANEL_ROWS + lane]))  # type: ignore[index]


def _joined(words: list[Expr]) -> Expr:
    return bind(tirx.Shuffle(words, list(range(_WORD * len(words)))))
