"""Products of rows of a matrix of bytes, or parts of bytes, with the quantized activations of many tokens.

A task takes a block of rows and lays their bytes out anew, once for all tokens: four consecutive columns of each row
side by side. A vector of these, times four bytes of a token in every lane, adds four columns to as many outputs as it
has lanes with one instruction. The sums of a group of 32 columns are integers; then they are scaled and added up in
float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.build import isa
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.matrix import CACHE_LINE_BYTES, KernelMatrix
from picompile_codegen.cpu.panels import ChunkSums, RegisterTile, wide
from picompile_codegen.cpu.quantized import (
    SCALES_TOGETHER,
    QuantizedRows,
    add_neighbours,
    decode_codes,
    dot_signed,
    dot_unsigned,
    multiply_pairs,
    padded_groups,
    quantize_row,
)
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, local, local_vectors, loop, minimum, parallel
from picompile_codegen.cpu.vector import LANES, at, fma, splat, to_floats, transpose
from picompile_passes.formats import GROUP

# Four columns of a group in each of its vectors.
QUADS = GROUP // 4


def byte_lanes() -> int:
    """Return the lanes of vectors of sums of bytes."""
    return isa.current().wide_lanes if isa.current().bytes_dot == "vnni" else LANES


def byte_tile() -> RegisterTile:
    """Return the tile of products of bytes: the sums of a group, and those in float32, are in registers."""
    return RegisterTile(4, 3 if isa.current().bytes_dot == "vnni" else 2, byte_lanes())


def raw_offset(matrix: KernelMatrix) -> float:
    """Return the offset that makes a byte of a block the weight over its scale; times the byte of its group's zero
    where groups have zeros."""
    return signed_offset() if matrix.least_raw < 0 else matrix.offset


def quads_in_words(largest: int) -> int:
    """Return how many products of quads of bytes up to `largest` with signed bytes can be added up in 16 bits."""
    return min(QUADS, 32767 // (2 * 127 * largest))


def signed_offset() -> int:
    """Return the offset of signed bytes: VNNI needs one unsigned operand, so they are biased by 128 at no extra
    cost."""
    return -128 if isa.current().bytes_dot == "vnni" else 0


@dataclass(frozen=True)
class ByteInputs:
    """Inputs of a chunk as bytes, for products with weights that `offset` is added to."""

    rows: QuantizedRows
    offset: float

    @classmethod
    def declare(
        cls,
        function: KernelFunction,
        name: str,
        rows: int,
        columns: int,
        matrix: KernelMatrix | None = None,
        parts: int = 1,
    ) -> "ByteInputs":
        """Declare memory for `rows` tokens, for products with `matrix`, any like it, or a block of int8.

        Each input has `parts` bytes: two are for matrices in panels alone.
        """
        groups = -(-columns // GROUP)
        has_zeros, padded = matrix is not None and matrix.has_zeros, padded_groups(groups)
        sums = GROUP // matrix.form.group if matrix is not None else 1
        quantized = QuantizedRows(
            function.scratch(f"{name}_bytes", "int8", rows, _row_bytes(rows, groups * GROUP * parts)),
            function.scratch(f"{name}_scales", "float32", rows, padded),
            function.scratch(f"{name}_offsets", "float32" if has_zeros else "int32", rows, padded * sums),
            parts,
            sums,
        )
        return cls(quantized, signed_offset() if matrix is None else raw_offset(matrix))

    @property
    def capacity(self) -> int:
        """Tokens that there is memory for."""
        return self.rows.bytes.rows

    def pack(self, x: KernelTensor, tokens: Expr, columns: int) -> None:
        """Quantize `tokens` rows of x float32 [rows, columns]."""
        with parallel(tokens) as token:
            self.quantize(x, token, columns)

    def quantize(self, x: KernelTensor, token: Expr, columns: int) -> None:
        """Quantize one row."""
        quantize_row(x, row=token, columns=columns, out=self.rows, offset=self.offset)


def _row_bytes(rows: int, size_bytes: int) -> int:
    """Return the distance between rows: an odd number of cache lines where there are several rows.

    The tokens of a tile are read side by side. At a distance of 2048 bytes, 32 of them share two sets of a first-level
    cache, which is too few.
    """
    lines = -(-size_bytes // CACHE_LINE_BYTES)
    return size_bytes if rows == 1 else (lines + (lines + 1) % 2) * CACHE_LINE_BYTES


@dataclass(frozen=True)
class ByteBlock:
    """Rows laid out for products: vectors of bytes `weights` [groups · 8, vectors], and `scales` [groups, vectors].

    Row group · 8 + i of `weights` has columns 4 · i … of a group. Bytes are `dtype`, uint8 where an offset makes up for
    that (`ByteInputs.offset`), else int8, and `largest` is the largest magnitude of one. `zeros`, like `scales`, are
    those of groups that have their own, times the scales.
    """

    weights: KernelTensor
    scales: KernelTensor
    zeros: KernelTensor | None
    vectors: int
    dtype: str
    largest: int

    @classmethod
    def declare(
        cls, vectors: int, groups: int, is_unsigned: bool, largest: int, has_zeros: bool = False
    ) -> "ByteBlock":
        """Memory for a block, on the stack."""
        lanes, dtype = byte_lanes(), "uint8" if is_unsigned else "int8"
        weights = local_vectors(groups * QUADS, vectors, lanes=4 * lanes, dtype=dtype)
        scales = local_vectors(groups, vectors, lanes=lanes)
        zeros = local_vectors(groups, vectors, lanes=lanes) if has_zeros else None
        return cls(weights, scales, zeros, vectors, dtype, largest)

    @property
    def is_unsigned(self) -> bool:
        """Whether the bytes have no sign."""
        return self.dtype == "uint8"

    @property
    def quads_in_words(self) -> int:
        """The number of quads whose products add up in 16 bits, where pairs multiply to 16 bits; 0 for none."""
        if isa.current().bytes_dot != "maddubs" or not self.is_unsigned:
            return 0
        return quads_in_words(self.largest)


def multiply_rows_of_bytes(
    matrix: KernelMatrix, row: Callable[[Expr], Expr], x: ByteInputs, tokens: Expr, sums: ChunkSums
) -> None:
    """Add to `sums` the products of the rows `row(0)`, `row(1)`, … of a block with all tokens.

    As many rows behind them, those of the next block, are fetched meanwhile.
    """
    tile, is_unsigned = byte_tile(), raw_offset(matrix) != 0
    block = ByteBlock.declare(
        tile.vectors, padded_groups(matrix.groups), is_unsigned, matrix.largest_raw, matrix.has_zeros
    )
    with loop(0, tile.vectors) as vector:
        _lay_out(matrix, [bind(row(vector * tile.lanes + i)) for i in range(tile.lanes)], block, vector)
    tiles = bind(tile.count(tokens))
    with loop(0, tiles) as number:
        with loop(tile.outputs * number // tiles, tile.outputs * (number + 1) // tiles) as i:
            matrix.fetch_row(bind(row(tile.outputs + i)))
        multiply_tile(
            block,
            first_vector=0,
            groups=(0, matrix.groups),
            x=x.rows,
            tokens=tokens,
            number=number,
            sums=sums,
            first_output=0,
        )


def _lay_out(matrix: KernelMatrix, numbers: list[Expr], block: ByteBlock, vector: Expr) -> None:
    """Lay out the rows of a vector: their bytes, four columns at a time, and the scales and zeros of each group."""
    lanes = len(numbers)
    together = 4 * lanes // matrix.group_elements
    with loop(0, -(-matrix.groups // together)) as index:
        first = bind(index * together)
        for number, quads in enumerate(_quads(matrix, numbers, first)):
            for i, value in enumerate(quads):
                block.weights[(first + number) * QUADS + i, vector] = value
    with loop(0, padded_groups(matrix.groups) // SCALES_TOGETHER) as eight:
        first = bind(eight * SCALES_TOGETHER)
        scales = _by_group(lambda number: matrix.scales_from(number, first), numbers)
        for i, scale in enumerate(scales):
            block.scales[first + i, vector] = scale
        if block.zeros is not None:
            zeros = _by_group(lambda number: matrix.zeros_from(number, first), numbers)
            for i, (zero, scale) in enumerate(zip(zeros, scales, strict=True)):
                block.zeros[first + i, vector] = zero * scale


def _by_group(eight: Callable[[Expr], Expr], numbers: list[Expr]) -> list[Expr]:
    """Turn eight numbers of each row, one for each of eight groups, into vectors of all rows, one for each group."""
    turned = [
        transpose([eight(number) for number in numbers[start : start + LANES]])
        for start in range(0, len(numbers), LANES)
    ]
    return [wide(list(parts), len(numbers))[0] for parts in zip(*turned, strict=True)]


def _quads(matrix: KernelMatrix, numbers: list[Expr], first: Expr) -> list[list[Expr]]:
    """Return, for each of the groups from `first` on that fill a vector, eight vectors of four columns of all rows.

    Groups past the last one are whatever lies behind the data; nothing reads them.
    """
    lanes = len(numbers)
    size = 4 * lanes
    words = _words([matrix.data[number, at(first * matrix.group_elements, size)] for number in numbers])
    if not matrix.has_nibbles:
        if raw_offset(matrix):
            words = [bind(word ^ tirx.Broadcast(tirx.IntImm("uint32", 0x80808080), lanes)) for word in words]
        dtype = "uint8" if raw_offset(matrix) else "int8"
        quads = [bind(tirx.reinterpret(f"{dtype}x{size}", word)) for word in words]
        return [quads[i : i + QUADS] for i in range(0, len(quads), QUADS)]
    groups = []
    for i in range(0, len(words), QUADS // 2):
        planes: list[Expr | None] = [None] * (QUADS // 2)
        if matrix.form.has_planes:
            planes = _planes(matrix, numbers, first, i // (QUADS // 2))
        pairs = [
            decode_codes(matrix, words=word, plane=plane, bit=0, lanes=lanes, offset=raw_offset(matrix))
            for word, plane in zip(words[i:], planes, strict=False)
        ]
        groups.append([low for low, _ in pairs] + [high for _, high in pairs])
    return groups


def _planes(matrix: KernelMatrix, numbers: list[Expr], first: Expr, number: int) -> list[Expr | None]:
    """Return the high bits of group `first` + `number` of all rows, from bit 0 on: a vector for each four columns."""
    place, bit = matrix.high_place(first + number)
    # 16 bytes of each row are four words: nothing is made of the other words.
    size = 4 * len(numbers)
    rows = [tirx.Shuffle([bind(matrix.data[n, at(place, 16)])] * (size // 16), list(range(size))) for n in numbers]
    shift = tirx.Broadcast(tirx.Cast("uint32", bit), len(numbers))
    return [bind(word >> shift) for word in _words(rows)[: QUADS // 2]]


def _words(rows: list[Expr]) -> list[Expr]:
    """Transpose vectors of bytes, as many as they have words of four: vector i has word i of each row."""
    lanes = len(rows)
    return transpose([bind(tirx.reinterpret(f"uint32x{lanes}", bind(row))) for row in rows])


def multiply_tile(
    block: ByteBlock,
    first_vector: Expr,
    groups: tuple[Expr, Expr],
    x: QuantizedRows,
    tokens: Expr,
    number: Expr,
    sums: ChunkSums,
    first_output: Expr,
) -> None:
    """Add products of a tile to `sums`, from `first_output` on: those of some vectors of a block's rows.

    Args:
        block: the weights.
        first_vector: the first of the tile's vectors in `block`.
        groups: the first group of the inputs, and how many there are; those of `block` begin with 0.
        x: the inputs of `tokens` tokens; the last one stands in for those past the end.
        number: which tile of tokens.
        sums: what the products are added to.
        first_output: the first vector in `sums`.
    """
    shape, (start, count) = byte_tile(), groups
    lanes = shape.lanes
    token = bind(number * shape.tokens)
    chosen = [bind(minimum(token + t, tokens - 1)) for t in range(shape.tokens)]
    places = [(t, v, t * shape.vectors + v) for t in range(shape.tokens) for v in range(shape.vectors)]
    registers = local(len(places), lanes)
    for t, v, i in places:
        registers[i, at(0, lanes)] = sums.values[token + t, first_output + v]
    with loop(0, count) as group:
        of_x = bind(start + group)
        products = _multiply_group(block, number=group, first_vector=first_vector, x=x, tokens=chosen, group=of_x)
        scales = [bind(block.scales[group, first_vector + v]) for v in range(shape.vectors)]
        for t, v, i in places:
            scale = bind(scales[v] * splat(x.scales[chosen[t], of_x], lanes))
            registers[i, at(0, lanes)] = fma(to_floats(products[i], lanes), scale, registers[i, at(0, lanes)], lanes)
            if block.zeros is not None:
                zeros, offset = block.zeros[group, first_vector + v], splat(x.offsets[chosen[t], of_x], lanes)
                registers[i, at(0, lanes)] = fma(zeros, offset, registers[i, at(0, lanes)], lanes)
    for t, v, i in places:
        sums.values[token + t, first_output + v] = registers[i, at(0, lanes)]


def _multiply_group(
    block: ByteBlock, number: Expr, first_vector: Expr, x: QuantizedRows, tokens: list[Expr], group: Expr
) -> list[Expr]:
    """Return the products of group `number` of some vectors of a block with group `group` of the tokens' inputs.

    They are int32, by token and vector, with their offsets where these are integers.
    """
    shape = byte_tile()
    products: list[Expr | None] = [None] * (shape.tokens * shape.vectors)
    if block.zeros is None:
        starts = [bind(tirx.Broadcast(x.offsets[token, group], shape.lanes)) for token in tokens]
        products = [start for start in starts for _ in range(shape.vectors)]
    words: list[Expr | None] = [None] * len(products)
    for quad in range(QUADS):
        weights = [bind(block.weights[number * QUADS + quad, first_vector + v]) for v in range(shape.vectors)]
        is_end = block.quads_in_words and (quad + 1 == QUADS or (quad + 1) % block.quads_in_words == 0)
        for t, token in enumerate(tokens):
            value = four_bytes(x, token, group, quad, shape.lanes)
            for v, weight in enumerate(weights):
                i = t * shape.vectors + v
                if not block.quads_in_words:
                    products[i] = _dot(block, weights=weight, values=value, start=products[i], lanes=shape.lanes)
                    continue
                pairs = multiply_pairs(weight, value)
                words[i] = pairs if words[i] is None else bind(words[i] + pairs)
                if is_end:
                    summed = add_neighbours(words[i])
                    products[i] = summed if products[i] is None else bind(products[i] + summed)
                    words[i] = None
    return products


def four_bytes(x: QuantizedRows, token: Expr, group: Expr, quad: int, lanes: int, part: int = 0) -> Expr:
    """Return bytes 4 · `quad` … of a group, again and again: the first ones of its activations, or others."""
    four = bind(tirx.reinterpret("int32", x.bytes[token, at((group * x.parts + part) * GROUP + 4 * quad, 4)]))
    return bind(tirx.reinterpret(f"int8x{4 * lanes}", bind(tirx.Broadcast(four, lanes))))


def _dot(block: ByteBlock, weights: Expr, values: Expr, start: Expr | None, lanes: int) -> Expr:
    return dot_unsigned(weights, values, start, lanes) if block.is_unsigned else dot_signed(weights, values, start)
