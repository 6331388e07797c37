"""Products for the next tokens of several sequences: each row of activations is multiplied as in decoding.

Matrices are read once for all of them. Every row of the result has the bits that it has alone: rows are added up in
the order of `dot.py`, however many there are. So the text of a sequence does not depend on which others are decoded
with it, or on whether any are.
"""

from collections.abc import Callable
from dataclasses import dataclass

from picompile_codegen.build import isa
from picompile_codegen.cpu.dot import Vector, dots
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.matrix import KernelMatrix
from picompile_codegen.cpu.quantized import QuantizedVector, quantize_to, vector_sizes
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, minimum, parallel, when, worth_a_region

# Rows of a matrix that a task multiplies with all tokens: they stay in the first-level cache, as the tokens of a tile
# do, and are few enough for all threads to have tasks.
_ROWS = 8
# Tokens that one thread quantizes in less time than it takes to start the others.
_FEW = 2


def each_row(tokens: Expr, body: Callable[[Expr], None]) -> None:
    """Run `body(token)` for the rows of a step: on all threads, where there are more than a few."""
    if isinstance(tokens, int) and tokens == 1:
        body(0)
        return
    with when(tokens <= _FEW), loop(0, tokens) as token:
        body(token)
    with when(tokens > _FEW), parallel(tokens) as token:
        body(token)


def tile_tokens() -> int:
    """Return how many tokens are multiplied with a row at once: as many as there are registers for their sums."""
    return 4 if isa.current().registers >= 32 else 2


@dataclass(frozen=True)
class TokenVectors:
    """Rows of x float32 [rows, columns], and memory for their bytes where matrices have bytes as well."""

    x: KernelTensor
    matrix: KernelMatrix
    bytes: KernelTensor | None
    scales: KernelTensor | None
    offsets: KernelTensor | None

    @staticmethod
    def has_bytes(matrix: KernelMatrix) -> bool:
        """Return whether x is multiplied with `matrix` as bytes."""
        return matrix.scale is not None

    @classmethod
    def declare(
        cls, function: KernelFunction, name: str, x: KernelTensor, rows: int, matrix: KernelMatrix
    ) -> "TokenVectors":
        """Declare the memory, as scratch tensors that begin with `name`, for products with `matrix` or any like it."""
        if not cls.has_bytes(matrix):
            return cls(x, matrix, None, None, None)
        count, padded = vector_sizes(matrix)
        return cls(
            x,
            matrix,
            function.scratch(f"{name}_bytes", "int8", rows, -(-count // 64) * 64),
            function.scratch(f"{name}_scales", "float32", rows, padded),
            function.scratch(f"{name}_offsets", "float32", rows, padded) if matrix.offset else None,
        )

    def prepare(self, tokens: Expr) -> None:
        """Quantize the first `tokens` rows, where matrices have bytes."""
        if self.bytes is None:
            return
        each_row(tokens, self.quantize)

    def quantize(self, token: Expr) -> None:
        """Quantize one row, where matrices have bytes."""
        if (quantized := self[token].quantized) is not None:
            quantize_to(self.x, token, self.matrix, quantized)

    def __getitem__(self, token: Expr) -> Vector:
        """Return row `token` as `dot` takes it."""
        if self.bytes is None or self.scales is None:
            return Vector(self.x, token, None)
        return Vector(self.x, token, QuantizedVector(self.bytes, self.scales, self.offsets, token))


def each_tile(first: Expr, stop: Expr, body: Callable[[list[Expr]], None]) -> None:
    """Run `body(tokens)` for tiles of the tokens from `first` to `stop` - 1, then for those left over, one by one."""
    size = tile_tokens()
    tiles = bind((stop - first) // size)
    with loop(0, tiles) as tile:
        body([bind(first + tile * size + i) for i in range(size)])
    with loop(first + tiles * size, stop) as token:
        body([bind(token)])


def each_exact_tile(count: Expr, body: Callable[[list[Expr]], None]) -> None:
    """Run `body(places)` for tiles of the places below `count`, then for a smaller tile of those left over."""
    size = tile_tokens()
    tiles = bind(count // size)
    with loop(0, tiles) as tile:
        body([bind(tile * size + i) for i in range(size)])
    rest = bind(count - tiles * size)
    for left in range(1, size):
        with when(rest == left):
            body([bind(tiles * size + i) for i in range(left)])


def multiply_rows(
    matrix: KernelMatrix,
    row_of: Callable[[Expr], Expr],
    count: int,
    vectors: TokenVectors,
    tokens: Expr,
    emit: Callable[[Expr, Expr, Expr], None],
) -> None:
    """Multiply rows `row_of(0)` … `row_of(count - 1)` with all tokens; `emit(token, i, product)` takes each product."""
    with parallel(-(-count // _ROWS), when_worth=worth_a_region(count * matrix.row_bytes)) as block:
        start = bind(block * _ROWS)
        stop = bind(minimum(start + _ROWS, count))

        def multiply(tile: list[Expr]) -> None:
            with loop(start, stop) as i:
                ahead = row_of(minimum(i + matrix.rows_ahead, count - 1))
                products = dots(matrix, row_of(i), [vectors[token] for token in tile], [ahead])
                for token, product in zip(tile, products, strict=True):
                    emit(token, i, product)

        each_tile(0, tokens, multiply)
