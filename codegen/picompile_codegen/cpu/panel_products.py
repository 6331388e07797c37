"""Products of a matrix in panels with the quantized activations of any number of tokens.

A task takes a panel: sixteen rows, whose codes lie side by side (`weight_panels.py`). A vector has four codes of each
row, a row in each lane. It is multiplied with four bytes of a token, the same in each lane, and added to the sums.
Within a group of 32 columns these are integers; then they are scaled and added up in float32, group after group. So an
output has the same bits whichever tokens are multiplied beside it, one or a chunk of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.build import isa
from picompile_codegen.cpu.byte_tiles import QUADS, ByteInputs, byte_lanes, four_bytes, quads_in_words, raw_offset
from picompile_codegen.cpu.decode import scale_floats
from picompile_codegen.cpu.matrix import CACHE_LINE_BYTES, KernelMatrix
from picompile_codegen.cpu.quantized import (
    QuantizedRows,
    add_neighbours,
    decode_codes,
    dot_signed,
    dot_unsigned,
    multiply_pairs,
)
from picompile_codegen.cpu.tensor import (
    Expr,
    KernelTensor,
    bind,
    loop,
    parallel,
    prefetch,
    when,
    worth_a_region,
)
from picompile_codegen.cpu.token_vectors import each_row
from picompile_codegen.cpu.vector import at, fma, splat, to_floats, zero_vectors
from picompile_codegen.weight_panels import PANEL_ROWS
from picompile_passes.formats import HIGH_GROUPS

# Bytes of four codes of each row of a panel.
_QUAD_BYTES = 4 * PANEL_ROWS


def tile_sizes(rows: int) -> tuple[int, ...]:
    """Return how many tokens are multiplied with a vector of codes at a time: the most at first, then the rest.

    Their sums, one vector each, leave registers for the eight vectors of a group's codes.
    """
    if byte_lanes() == PANEL_ROWS:
        sizes: tuple[int, ...] = (16, 4, 1)
    else:
        sizes = (8, 4, 1) if isa.current().registers >= 32 else (4, 1)
    return tuple(size for size in sizes if size <= rows)


@dataclass(frozen=True)
class _Planes:
    """High bits of codes: words for each vector of low ones, and the first of their bits that counts."""

    words: tuple[Expr | None, ...]
    bit: int


@dataclass(frozen=True)
class PanelMatrix:
    """A packed matrix in panels: an argument of the kernel, whose rows are panels."""

    matrix: KernelMatrix

    @property
    def panels(self) -> int:
        """The number of panels."""
        return self.matrix.rows // PANEL_ROWS

    @property
    def lines(self) -> int:
        """Cache lines of a panel."""
        return PANEL_ROWS * self.matrix.row_bytes // CACHE_LINE_BYTES

    @property
    def is_unsigned(self) -> bool:
        """Whether codes are multiplied as bytes without a sign."""
        return raw_offset(self.matrix) != 0

    def codes(self, panel: Expr, group: Expr, lane: int, planes: "_Planes | None" = None) -> list[Expr]:
        """Return eight vectors of bytes of the rows from `lane` on: columns 0 to 3 of a group, 4 to 7, and so on.

        `planes` are the high bits, where they have been read before.
        """
        lanes = byte_lanes()
        if self.matrix.has_nibbles:
            stored, high = QUADS // 2, planes or self._planes(panel, group, lane)
            words = [self._words(panel, group * stored + quad, lane) for quad in range(stored)]
            offset = raw_offset(self.matrix)
            pairs = [
                decode_codes(self.matrix, words=word, plane=plane, bit=high.bit, lanes=lanes, offset=offset)
                for word, plane in zip(words, high.words, strict=True)
            ]
            return [low for low, _ in pairs] + [high for _, high in pairs]
        words = [self._words(panel, group * QUADS + quad, lane) for quad in range(QUADS)]
        if self.is_unsigned:
            words = [bind(word ^ tirx.Broadcast(tirx.IntImm("uint32", 0x80808080), lanes)) for word in words]
        dtype = "uint8" if self.is_unsigned else "int8"
        return [bind(tirx.reinterpret(f"{dtype}x{4 * lanes}", word)) for word in words]

    def high_bits(self, panel: Expr, block: Expr, lane: int) -> "list[_Planes]":
        """Return the high bits of each of the `HIGH_GROUPS` groups of a block: two groups share words."""
        pairs = [
            tuple(self._words(panel, self._high_quad(block * HIGH_GROUPS + i) + quad, lane) for quad in range(4))
            for i in range(2)
        ]
        return [_Planes(pairs[i % 2], self.matrix.high_place(i)[1]) for i in range(HIGH_GROUPS)]

    def _planes(self, panel: Expr, group: Expr, lane: int) -> "_Planes":
        """Return the high bits of any group, from bit 0 on; nothing in formats that have none."""
        if not self.matrix.form.has_planes:
            return _Planes((None,) * (QUADS // 2), 0)
        shift = tirx.Broadcast(tirx.Cast("uint32", self.matrix.high_place(group)[1]), byte_lanes())
        first = self._high_quad(group)
        return _Planes(tuple(bind(self._words(panel, first + i, lane) >> shift) for i in range(QUADS // 2)), 0)

    def _high_quad(self, group: Expr) -> Expr:
        """Return the number of the first four bytes that have high bits of a group."""
        return self.matrix.high_place(group)[0] // 4

    def _words(self, panel: Expr, quad: Expr, lane: int) -> Expr:
        """Return the four bytes number `quad` of the rows from `lane` on, as uint32."""
        data = self.matrix.data[panel, at(quad * _QUAD_BYTES + 4 * lane, 4 * byte_lanes())]
        return bind(tirx.reinterpret(f"uint32x{byte_lanes()}", bind(data)))

    def scales(self, panel: Expr, group: Expr, lane: int) -> Expr:
        """Return the scales of a group of the rows from `lane` on, float32."""
        form = self.matrix.form
        start = PANEL_ROWS * form.scale_offset_bytes(self.matrix.columns) // form.scale_bytes
        scales = self.matrix.scale[panel, at(start + group * PANEL_ROWS + lane, byte_lanes())]  # type: ignore[index]
        return bind(scale_floats(form, scales, byte_lanes()))

    def zeros(self, panel: Expr, group: Expr, lane: int) -> Expr:
        """Return the bytes of the zeros of a group of the rows from `lane` on, float32."""
        start, lanes = PANEL_ROWS * self.matrix.form.zero_offset_bytes(self.matrix.columns), byte_lanes()
        zeros = self.matrix.data[panel, at(start + group * PANEL_ROWS + lane, lanes)]
        return bind(to_floats(tirx.Cast(f"int32x{lanes}", zeros), lanes))

    def fetch_beside(self, panel: Expr, group: Expr) -> None:
        """Prefetch of the panel behind `panel` its share of lines, one of as many as there are groups."""
        groups, lines = self.matrix.groups, self.lines
        each = -(-lines // groups)
        for i in range(each):
            line = (group * each + i) * CACHE_LINE_BYTES
            prefetch(self.matrix.data, panel + 1, line, into_first_level=True)


# Computes something of outputs `output` … `output` + lanes - 1 of a token, given their products: emit(token, output,
# lanes, products).
Emit = Callable[[Expr, Expr, int, Expr], None]


def quantize_tokens(x: KernelTensor, tokens: Expr, columns: int, inputs: ByteInputs) -> None:
    """Take in the first `tokens` rows of x float32 [rows, columns]."""
    if x.rows == 1:
        inputs.quantize(x, 0, columns)
        return
    each_row(tokens, lambda token: inputs.quantize(x, token, columns))


def multiply_panels_of_bytes(matrix: KernelMatrix, inputs: ByteInputs, tokens: Expr, emit: Emit) -> None:
    """Multiply `tokens` tokens with a matrix in panels; `emit` takes the products, those of a vector at a time."""
    panels = PanelMatrix(matrix)
    with parallel(panels.panels, when_worth=worth_a_region(matrix.bytes)) as panel:

        def multiply(first: Expr, count: int) -> None:
            _multiply_tile(panels, panel, x=inputs.rows, tile=(first, count), emit=emit)

        _each_tile(tokens, inputs.rows.bytes.rows, multiply)


def _each_tile(tokens: Expr, rows: int, body: Callable[[Expr, int], None]) -> None:
    """Run `body(first, count)` for tiles of the tokens."""
    first: Expr = 0
    for size in tile_sizes(rows):
        if rows == size == 1:
            body(0, 1)
            return
        tiles, start = bind((tokens - first) // size), first
        with loop(0, tiles) as tile:
            body(bind(start + tile * size), size)
        first = bind(start + tiles * size)


def _multiply_tile(panels: PanelMatrix, panel: Expr, x: QuantizedRows, tile: tuple[Expr, int], emit: Emit) -> None:
    """Compute the outputs of a panel for `tile`, the first token and how many there are."""
    # One token leaves registers for the sums of all rows. So a panel is read front to back only once.
    together = PANEL_ROWS if tile[1] == 1 else byte_lanes()
    for start in range(0, PANEL_ROWS, together):
        _multiply_rows(panels, panel, parts=range(start, start + together, byte_lanes()), x=x, tile=tile, emit=emit)


def _multiply_rows(
    panels: PanelMatrix, panel: Expr, parts: range, x: QuantizedRows, tile: tuple[Expr, int], emit: Emit
) -> None:
    """Compute the outputs of some rows of a panel for a tile; each of `parts` is the first row of a vector."""
    lanes, (first, count) = byte_lanes(), tile
    sums = zero_vectors(count * len(parts), lanes)

    def add(group: Expr, planes: list[_Planes | None]) -> None:
        if parts[0] == 0:
            # The first tokens to be multiplied with a panel have the next one fetched.
            _fetch(panels, panel, group, first)
        for part, (lane, high) in enumerate(zip(parts, planes, strict=True)):
            codes = panels.codes(panel, group, lane, high)
            _add_group(panels, place=(panel, group, lane), codes=codes, x=x, tile=tile, sums=sums, part=part)

    _each_group(panels, panel, parts, tokens=count, body=add)
    for part, lane in enumerate(parts):
        for t in range(count):
            products = bind(sums[t * len(parts) + part, at(0, lanes)])
            emit(first + t, bind(panel * PANEL_ROWS + lane), lanes, products)


def _fetch(panels: PanelMatrix, panel: Expr, group: Expr, first: Expr) -> None:
    if isinstance(first, int):
        panels.fetch_beside(panel, group)
        return
    with when(first == 0):
        panels.fetch_beside(panel, group)


def _each_group(
    panels: PanelMatrix,
    panel: Expr,
    parts: range,
    tokens: int,
    body: Callable[[Expr, list[_Planes | None]], None],
) -> None:
    """Run `body(group, the high bits of each part)` for all groups, in order.

    High bits of a block of groups are read at once for one token, whose products take less than unpacking them.
    """
    groups = panels.matrix.groups
    blocks = groups // HIGH_GROUPS if panels.matrix.form.has_planes and tokens == 1 else 0
    if blocks:
        with loop(0, blocks) as block:
            planes = [panels.high_bits(panel, block, lane) for lane in parts]
            for i in range(HIGH_GROUPS):
                body(bind(block * HIGH_GROUPS + i), [each[i] for each in planes])
    if blocks * HIGH_GROUPS < groups:
        with loop(blocks * HIGH_GROUPS, groups) as group:
            body(group, [None] * len(parts))


def _add_group(
    panels: PanelMatrix,
    place: tuple[Expr, Expr, int],
    codes: list[Expr],
    x: QuantizedRows,
    tile: tuple[Expr, int],
    sums: KernelTensor,
    part: int,
) -> None:
    """Add the products of a group of columns, `place[1]`, to the sums of all tokens of a tile."""
    (_, group, _), (first, count), lanes = place, tile, byte_lanes()
    scales = panels.scales(*place)
    zeros = bind(panels.zeros(*place) * scales) if panels.matrix.has_zeros else None
    for t in range(count):
        token, index = first + t, (t * (sums.rows // count) + part, at(0, lanes))
        values = [four_bytes(x, token, group, quad, lanes) for quad in range(QUADS)]
        start = None if zeros is not None else tirx.Broadcast(x.offsets[token, group], lanes)
        products = to_floats(_dot(panels, codes, values, start, lanes), lanes)
        scale = bind(scales * splat(x.scales[token, group], lanes))
        sums[index] = fma(products, scale, sums[index], lanes)
        if zeros is not None:
            sums[index] = fma(zeros, splat(x.offsets[token, group], lanes), sums[index], lanes)


def _dot(panels: PanelMatrix, codes: list[Expr], values: list[Expr], start: Expr | None, lanes: int) -> Expr:
    """Return start + Σ of codes · values of a group, int32 of each lane."""
    if isa.current().bytes_dot == "maddubs" and panels.is_unsigned:
        return _dot_in_words(panels, codes, values, start)
    total = None if start is None else bind(start)
    for code, value in zip(codes, values, strict=True):
        total = dot_unsigned(code, value, total, lanes) if panels.is_unsigned else dot_signed(code, value, total, lanes)
    return total


def _dot_in_words(panels: PanelMatrix, codes: list[Expr], values: list[Expr], start: Expr | None) -> Expr:
    """Add up as many products as fit 16 bits before they are added in 32."""
    most = quads_in_words(panels.matrix.largest_raw)
    total = None if start is None else bind(start)
    for first in range(0, QUADS, most):
        words = multiply_pairs(codes[first], values[first])
        for i in range(first + 1, min(first + most, QUADS)):
            words = bind(words + multiply_pairs(codes[i], values[i]))
        summed = add_neighbours(words)
        total = summed if total is None else bind(total + summed)
    return total
