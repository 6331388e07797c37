"""Products of rows of a matrix of bytes, or parts of bytes, with the quantized activations of many tokens.

A task takes a block of rows and lays their bytes out anew, once for all tokens: four consecutive columns of eight rows
side by side. A vector of these, times four bytes of a token in every lane, adds four columns to eight outputs with one
instruction. The sums of a group of 32 columns are integers; then they are scaled and added up in float32, which is two
more instructions for eight of those that multiply.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest

from tvm import tirx

from picompile_codegen.build import isa
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.matrix import KernelMatrix
from picompile_codegen.cpu.quantized import (
    BYTES,
    SCALES_TOGETHER,
    QuantizedRows,
    dot_signed,
    dot_unsigned,
    padded_groups,
    quantize_row,
    split_codes,
)
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, local, loop, parallel, token_tiles
from picompile_codegen.cpu.vector import LANES, at, fma, splat, to_floats, transpose, zero_vectors
from picompile_passes.weight_formats import GROUP

BYTE_TILE_TOKENS = 4
# Four columns of a group in each of its vectors.
QUADS = GROUP // 4


def block_rows() -> int:
    """Return the rows of a block: as many as there are registers for, with BYTE_TILE_TOKENS tokens."""
    return 2 * LANES if isa.current().registers >= 32 else LANES


def raw_offset(matrix: KernelMatrix) -> float:
    """Return the offset that makes a byte of a block the weight over its scale; times the byte of its group's zero
    where groups have zeros."""
    return signed_offset() if matrix.form.lowest < 0 else matrix.offset


def signed_offset() -> int:
    """Return the offset of signed bytes: VNNI needs one unsigned operand, so they are biased by 128 at no extra
    cost."""
    return -128 if isa.current().bytes_dot == "vnni" else 0


def declare_rows(
    function: KernelFunction, name: str, rows: int, columns: int, matrix: KernelMatrix | None = None
) -> QuantizedRows:
    """Declare memory for the activations of a chunk of `rows` tokens, for products with `matrix` or a block of int8."""
    has_zeros = matrix is not None and matrix.has_zeros
    groups = -(-columns // GROUP)
    padded = padded_groups(groups)
    return QuantizedRows(
        function.scratch(f"{name}_bytes", "int8", rows, groups * GROUP),
        function.scratch(f"{name}_scales", "float32", rows, padded),
        function.scratch(f"{name}_offsets", "float32" if has_zeros else "int32", rows, padded),
    )


def quantize_rows(x: KernelTensor, tokens: Expr, columns: int, offset: float, out: QuantizedRows) -> None:
    """Quantize `tokens` rows of x for products with bytes that `offset` is added to."""
    with parallel(tokens) as token:
        quantize_row(x, token, columns, out, offset)


@dataclass(frozen=True)
class ByteBlock:
    """Rows laid out for products: `weights` [groups · 8 · parts, 32] bytes and `scales` float32 [groups · parts, 8].

    A part is eight rows. Vector (group · 8 + i) · parts + p of `weights` has columns 4 · i … of a group of part p.
    Bytes are uint8 where an offset makes up for that (`QuantizedRows.offsets`), else int8. `zeros`, like `scales`, are
    those of groups that have their own, times the scales.
    """

    weights: KernelTensor
    scales: KernelTensor
    zeros: KernelTensor | None
    parts: int
    groups: int

    @classmethod
    def declare(cls, parts: int, groups: int, is_unsigned: bool, has_zeros: bool = False) -> "ByteBlock":
        """Memory for a block, on the stack."""
        weights = local(groups * QUADS * parts, BYTES, dtype="uint8" if is_unsigned else "int8")
        scales = local(groups * parts, LANES)
        return cls(weights, scales, local(groups * parts, LANES) if has_zeros else None, parts, groups)

    @property
    def is_unsigned(self) -> bool:
        """Whether the bytes have no sign."""
        return self.weights.dtype == "uint8"


def multiply_block(
    matrix: KernelMatrix,
    row_of: Callable[[Expr], Expr],
    x: QuantizedRows,
    tokens: Expr,
    emit: Callable[[Expr, int, Expr], None],
) -> None:
    """Multiply the `block_rows()` rows `row_of(0)`, `row_of(1)`, … with all tokens.

    As many rows behind them, those of the next block, are fetched meanwhile.

    `emit(token, i, sums)` is written for each: `sums` are those of rows 8 · i … 8 · i + 7, a lane each.
    """
    parts = block_rows() // LANES
    block = ByteBlock.declare(parts, padded_groups(matrix.groups), raw_offset(matrix) != 0, matrix.has_zeros)
    with loop(0, parts) as part:
        _lay_out(matrix, [bind(row_of(part * LANES + i)) for i in range(LANES)], block, part)
    with loop(block_rows(), 2 * block_rows()) as i:
        matrix.fetch_row(bind(row_of(i)))
    with token_tiles(tokens, BYTE_TILE_TOKENS) as tile:
        for token, number, sums in multiply_tile(block, 0, parts, matrix.groups, 0, x, tile):
            emit(token, number, sums)


def _lay_out(matrix: KernelMatrix, numbers: list[Expr], block: ByteBlock, part: Expr) -> None:
    """Lay out part `part` of a block: eight rows' bytes, four columns a vector, and their scales and zeros, a group a
    vector."""
    with loop(0, matrix.groups) as group:
        for quad, value in enumerate(_quads(matrix, numbers, group)):
            block.weights[(group * QUADS + quad) * block.parts + part, at(0, BYTES)] = value
    with loop(0, padded_groups(matrix.groups) // SCALES_TOGETHER) as eight:
        columns = transpose([matrix.eight_scales(number, eight * SCALES_TOGETHER) for number in numbers])
        for i, value in enumerate(columns):
            block.scales[(eight * SCALES_TOGETHER + i) * block.parts + part, at(0)] = value
        if block.zeros is not None:
            zeros = transpose([matrix.eight_zeros(number, eight * SCALES_TOGETHER) for number in numbers])
            for i, (value, scale) in enumerate(zip(zeros, columns, strict=True)):
                block.zeros[(eight * SCALES_TOGETHER + i) * block.parts + part, at(0)] = value * scale


def _quads(matrix: KernelMatrix, numbers: list[Expr], group: Expr) -> list[Expr]:
    """Return the bytes of a group of eight rows: eight vectors of four columns."""
    start = group * matrix.group_elements
    halves = [
        _words([matrix.data[number, at(start + offset, 16)] for number in numbers])
        for offset in range(0, matrix.group_elements, 16)
    ]
    if matrix.has_nibbles:
        planes: list[Expr] = []
        if matrix.form.has_planes:
            place, bit = matrix.high_place(group)
            words = _words([matrix.data[number, at(place, 16)] for number in numbers])
            planes = [bind(word >> tirx.Broadcast(tirx.Cast("uint32", bit), LANES)) for word in words]
        low, high = zip(*(split_codes(words, plane) for words, plane in zip_longest(halves[0], planes)), strict=True)
        return [*low, *high]
    if raw_offset(matrix):
        flipped = tirx.Broadcast(tirx.IntImm("uint32", 0x80808080), LANES)
        return [bind(tirx.reinterpret(f"uint8x{BYTES}", bind(words ^ flipped))) for half in halves for words in half]
    return [bind(tirx.reinterpret(f"int8x{BYTES}", words)) for half in halves for words in half]


def _words(rows: list[Expr]) -> list[Expr]:
    """Transpose eight vectors of 16 bytes to four of eight words: vector i has word i of each row."""
    rows = [bind(row) for row in rows]
    pairs = [bind(tirx.Shuffle([rows[i], rows[i + 4]], list(range(32)))) for i in range(4)]
    a, b, c, d = (bind(tirx.reinterpret(f"uint32x{LANES}", pair)) for pair in pairs)
    low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
    firsts, lasts = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    halves = [(bind(tirx.Shuffle([a, b], half)), bind(tirx.Shuffle([c, d], half))) for half in (low, high)]
    return [bind(tirx.Shuffle(list(half), part)) for half in halves for part in (firsts, lasts)]


def multiply_tile(
    block: ByteBlock,
    first_part: Expr,
    parts: int,
    groups: Expr,
    first_group: Expr,
    x: QuantizedRows,
    tokens: list[Expr],
) -> list[tuple[Expr, int, Expr]]:
    """Multiply `groups` groups of some parts of a block with the groups of the tokens from `first_group` on.

    Returns:
        For each token and part: the token, the number of the part among these, and the sums of its eight rows, a lane
        each.
    """
    places = [(token, part) for token in range(len(tokens)) for part in range(parts)]
    sums = zero_vectors(len(places))
    with loop(0, groups) as group:
        of_x = bind(first_group + group)
        # What begins the integer sums or, where groups have zeros, is multiplied with these.
        offsets = [bind(tirx.Broadcast(x.offsets[token, of_x], LANES)) for token in tokens]
        products: list[Expr | None] = [offsets[token] if block.zeros is None else None for token, _ in places]
        for quad in range(QUADS):
            first = bind((group * QUADS + quad) * block.parts + first_part)
            rows = [bind(block.weights[first + part, at(0, BYTES)]) for part in range(parts)]
            for token in range(len(tokens)):
                value = _four_bytes(x, tokens[token], of_x, quad)
                for part in range(parts):
                    place = token * parts + part
                    products[place] = _dot(block, rows[part], value, products[place])
        in_group = [bind(block.scales[group * block.parts + first_part + part, at(0)]) for part in range(parts)]
        for place, (token, part) in enumerate(places):
            scale = bind(in_group[part] * splat(x.scales[tokens[token], of_x]))
            sums[place, at(0)] = fma(to_floats(products[place]), scale, sums[place, at(0)])
            if block.zeros is not None:
                zeros = block.zeros[group * block.parts + first_part + part, at(0)]
                sums[place, at(0)] = fma(zeros, offsets[token], sums[place, at(0)])
    return [(tokens[token], part, bind(sums[place, at(0)])) for place, (token, part) in enumerate(places)]


def _four_bytes(x: QuantizedRows, token: Expr, group: Expr, quad: int) -> Expr:
    """Bytes 4 · `quad` … of a group, in every four lanes of an int8x32."""
    four = bind(tirx.reinterpret("int32", x.bytes[token, at(group * GROUP + 4 * quad, 4)]))
    return bind(tirx.reinterpret(f"int8x{BYTES}", bind(tirx.Broadcast(four, LANES))))


def _dot(block: ByteBlock, weights: Expr, values: Expr, start: Expr | None) -> Expr:
    return (dot_unsigned if block.is_unsigned else dot_signed)(weights, values, start)
