"""Codes, scales and minima of a matrix in panels, as vectors with a row in each lane."""

from collections.abc import Iterator
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.byte_tiles import QUADS, byte_lanes, raw_offset
from picompile_codegen.cpu.decode import look_up, numbers_at, scale_floats
from picompile_codegen.cpu.matrix import CACHE_LINE_BYTES, KernelMatrix
from picompile_codegen.cpu.tensor import Expr, bind, prefetch
from picompile_codegen.cpu.vector import at, splat, to_floats
from picompile_passes.formats import BLOCK, GROUP, LOW_BITS, PANEL_ROWS, Plane

# Bytes of four codes of each row of a panel.
_QUAD_BYTES = 4 * PANEL_ROWS


@dataclass(frozen=True)
class GroupPlace:
    """A group of 32 columns of a panel: number `index` · `count` + `number`, where `count` groups are computed in turn.

    Where the bits of a code lie depends on the number of its group: with a known `number`, shifts are by constants.
    """

    index: Expr
    count: int = 1
    number: int = 0

    @property
    def group(self) -> Expr:
        """The number of the group."""
        return self.index * self.count + self.number

    def place_in(self, plane: Plane) -> tuple[Expr, Expr]:
        """Return where the bits of a plane are: the first of 16 bytes of the plane, and the bit in each of them."""
        pairs, group = plane.groups // 2, self.group
        if plane.bits == LOW_BITS:
            return group * (GROUP // 2), 0
        if self.count % plane.groups:
            start = group // plane.groups * GROUP + group % 2 * (GROUP // 2)
            return start, group // 2 % pairs * (2 * plane.bits)
        block, number = self.index * (self.count // plane.groups) + self.number // plane.groups, self.number
        return block * GROUP + number % 2 * (GROUP // 2), number // 2 % pairs * (2 * plane.bits)


@dataclass(frozen=True)
class PanelMatrix:
    """A packed matrix in panels: an argument of the kernel, whose rows are panels."""

    matrix: KernelMatrix

    @property
    def panels(self) -> int:
        """The number of panels."""
        return self.matrix.rows // PANEL_ROWS

    @property
    def rows(self) -> int:
        """Rows of a panel."""
        return PANEL_ROWS

    @property
    def lines(self) -> int:
        """Cache lines of a panel."""
        return PANEL_ROWS * self.matrix.row_bytes // CACHE_LINE_BYTES

    @property
    def scale_groups(self) -> int:
        """Groups with a scale of their own among 32 columns."""
        return GROUP // self.matrix.form.group

    @property
    def groups_in_turn(self) -> int:
        """Groups that are computed in turn for one token, so that bits which share bytes are read once."""
        planes = self.matrix.form.planes if self.matrix.has_nibbles else ()
        return max((plane.groups for plane in planes if plane.bits < LOW_BITS), default=1)

    @property
    def is_unsigned(self) -> bool:
        """Whether codes are multiplied as bytes without a sign."""
        return raw_offset(self.matrix) != 0

    def codes(self, panel: Expr, place: GroupPlace, lane: int) -> list[Expr]:
        """Return eight vectors of bytes of the rows from `lane` on: columns 0 to 3 of a group, 4 to 7, and so on."""
        lanes, offset = byte_lanes(), raw_offset(self.matrix)
        if self.matrix.has_nibbles:
            stored = [self._plane(panel, place, plane, lane) for plane in self.matrix.form.planes]
            return [
                self._decode([words[quad] for words in stored], half) for half in (0, 1) for quad in range(QUADS // 2)
            ]
        words = [self._words(panel, place.group * QUADS + quad, lane) for quad in range(QUADS)]
        if offset:
            words = [bind(word ^ tirx.Broadcast(tirx.IntImm("uint32", 0x80808080), lanes)) for word in words]
        dtype = "uint8" if offset else "int8"
        return [bind(tirx.reinterpret(f"{dtype}x{4 * lanes}", word)) for word in words]

    def numbers(self, panel: Expr, place: GroupPlace, lane: int) -> Iterator[Expr]:
        """Yield the numbers of the rows from `lane` on, over `number_unit`, of each column of a group: float32."""
        form, lanes = self.matrix.form, byte_lanes()
        halves = 2 if self.matrix.has_nibbles else 1
        first, quads = bind(place.group * (QUADS // halves)), QUADS // halves
        words = [self._words(panel, first + quad, lane) for quad in range(quads)]
        for half in range(halves):
            for word in words:
                for byte in range(4):
                    yield numbers_at(form, word, 8 * byte + LOW_BITS * half, lanes)

    def _plane(self, panel: Expr, place: GroupPlace, plane: Plane, lane: int) -> list[tuple[Expr, int]]:
        """Return the words with a plane's bits of four columns of a group each, and the first of their bits."""
        start, bit = place.place_in(plane)
        first = (start + self.matrix.form.plane_offset_bytes(plane, self.matrix.columns)) // 4
        words = [self._words(panel, first + i, lane) for i in range(QUADS // 2)]
        if isinstance(bit, int):
            return [(word, bit) for word in words]
        shift = tirx.Broadcast(tirx.Cast("uint32", bit), byte_lanes())
        return [(bind(word >> shift), 0) for word in words]

    def _decode(self, stored: list[tuple[Expr, int]], half: int) -> Expr:
        """Return four codes of each row as bytes, of the words of all planes: the first 16 columns, or the others."""
        lanes, form, codes = byte_lanes(), self.matrix.form, None
        for plane, (words, bit) in zip(form.planes, stored, strict=True):
            bits = _bits_of_bytes(words, bit + half * plane.bits, plane, lanes)
            codes = bits if codes is None else codes | bits
        found = bind(tirx.reinterpret(f"uint8x{4 * lanes}", bind(codes)))
        if not form.table:
            return found
        bias = -int(raw_offset(self.matrix) or self.matrix.offset)
        dtype = "int8" if min(form.table) + bias < 0 else "uint8"
        return look_up([value + bias for value in form.table], found, 4 * lanes, dtype)

    def _words(self, panel: Expr, quad: Expr, lane: int) -> Expr:
        """Return the four bytes number `quad` of the rows from `lane` on, as uint32."""
        data = self.matrix.data[panel, at(quad * _QUAD_BYTES + 4 * lane, 4 * byte_lanes())]
        return bind(tirx.reinterpret(f"uint32x{byte_lanes()}", bind(data)))

    def scales(self, panel: Expr, group: Expr, part: int, lane: int) -> Expr:
        """Return the scales of part `part` of a group of 32, float32, for the rows from `lane` on."""
        form, lanes = self.matrix.form, byte_lanes()
        assert form.scale is not None
        place = (group * self.scale_groups + part) * PANEL_ROWS + lane
        start = form.scale_offset_bytes(self.matrix.columns)
        if form.scale.in_blocks:
            whole = self._integers(panel, start, place, "int8")
            scales = whole * self._factors(panel, group, 0, lane)
            return bind(scales if form.table_step == 1.0 else scales * splat(form.table_step, lanes))
        stored = self.matrix.scale[panel, at(PANEL_ROWS * start // form.scale_bytes + place, lanes)]  # type: ignore[index]
        return bind(scale_floats(form, stored, lanes))

    def shifts(self, panel: Expr, group: Expr, part: int, lane: int, scales: Expr) -> Expr:
        """Return what `ByteInputs.offset` is to be multiplied with and added: minima, or zeros times `scales`."""
        form, lanes = self.matrix.form, byte_lanes()
        place = (group * self.scale_groups + part) * PANEL_ROWS + lane
        start = form.zero_offset_bytes(self.matrix.columns)
        if form.minimum is None:
            return bind(self._integers(panel, start, place, "uint8") * scales)
        if form.minimum.in_blocks:
            return bind(self._integers(panel, start, place, "uint8") * self._factors(panel, group, 1, lane))
        stored = self.matrix.scale[panel, at(PANEL_ROWS * start // form.minimum.item_bytes + place, lanes)]  # type: ignore[index]
        return bind(to_floats(stored, lanes))

    def _integers(self, panel: Expr, start: int, place: Expr, dtype: str) -> Expr:
        """Return bytes of a part of a panel, which is behind `start` bytes of each row, as float32."""
        lanes = byte_lanes()
        stored = bind(self.matrix.data[panel, at(PANEL_ROWS * start + place, lanes)])
        signed = stored if dtype == "uint8" else tirx.reinterpret(f"{dtype}x{lanes}", stored)
        return bind(to_floats(tirx.Cast(f"int32x{lanes}", signed), lanes))

    def _factors(self, panel: Expr, group: Expr, number: int, lane: int) -> Expr:
        """Return float16 of the block that a group is in, as float32: those of scales, or with number 1 of minima."""
        form, columns, lanes = self.matrix.form, self.matrix.columns, byte_lanes()
        first = form.factor_offset_bytes(columns) // 2 + number * form.blocks(columns)
        place = (first + group // (BLOCK // GROUP)) * PANEL_ROWS + lane
        return bind(to_floats(self.matrix.scale[panel, at(place, lanes)], lanes))  # type: ignore[index]

    def fetch(self, panel: Expr, group: Expr, groups: int) -> None:
        """Prefetch of a panel the share of lines of group `group`, one of `groups`."""
        each = -(-self.lines // groups)
        for i in range(each):
            line = (group * each + i) * CACHE_LINE_BYTES
            prefetch(self.matrix.data, panel, line, into_first_level=True)


def _bits_of_bytes(words: Expr, bit: int, plane: Plane, lanes: int) -> Expr:
    """Return the bits of a plane, in each byte those from `bit` on, where they belong in a code, and zeros besides."""
    left = plane.shift - bit
    if left:
        amount = tirx.Broadcast(tirx.IntImm("uint32", abs(left)), lanes)
        words = words << amount if left > 0 else words >> amount
    mask = (((1 << plane.bits) - 1) << plane.shift) * 0x01010101
    return words & tirx.Broadcast(tirx.IntImm("uint32", mask), lanes)
