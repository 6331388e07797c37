"""Products of float32 inputs with a matrix in panels whose codes stand for floats: E4M3, NF4.

Codes become float32, sixteen rows in a vector, and are multiplied with inputs as they are: no rounding but that of
float32. For several tokens a group's numbers are made once and lie in the first-level cache. A token's products are
added up in `_CHAINS` sums, the same ones for any number of tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from picompile_codegen.cpu.decode import number_unit
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.matrix import KernelMatrix
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, local_vectors, loop
from picompile_codegen.cpu.vector import LANES, at, fma, load, splat
from picompile_passes.formats import GROUP, Codec

# Two sums of each row of a vector hide half of what a multiply-add takes; four tokens, or the next group, the rest.
_CHAINS = 2
# Tokens whose sums are in registers at a time.
_TOKENS = 4
# Inputs are multiplied with this where numbers are tiny multiples of `number_unit`, so that no product is too small for
# float32.
_INPUT_UNIT = 2.0**60


def _input_unit(form: Codec) -> float:
    return 1.0 if number_unit(form) == 1.0 else _INPUT_UNIT


def product_unit(form: Codec) -> float:
    """Return what sums of products are multiples of, besides scales."""
    return number_unit(form) / _input_unit(form)


@dataclass(frozen=True)
class FloatInputs:
    """Inputs of a chunk, `values` float32 [tokens, groups · 32], for products with matrices in `form`.

    They are multiples of 1 / `_input_unit(form)`.
    """

    values: KernelTensor
    form: Codec

    @classmethod
    def declare(
        cls, function: KernelFunction, name: str, rows: int, columns: int, matrix: KernelMatrix
    ) -> "FloatInputs":
        """Declare memory for `rows` tokens, for products with `matrix`, or any like it."""
        padded = matrix.form.padded_columns(columns)
        return cls(function.scratch(f"{name}_floats", "float32", rows, padded), matrix.form)

    @property
    def capacity(self) -> int:
        """Tokens that there is memory for."""
        return self.values.rows

    def quantize(self, x: KernelTensor, token: Expr, columns: int) -> None:
        """Take in one row of x float32 [rows, columns]."""
        unit, whole = splat(_input_unit(self.form)), columns // LANES * LANES
        with loop(0, whole // LANES) as i:
            self.values[token, at(i * LANES)] = x[token, at(i * LANES)] * unit
        for start in range(whole, self.values.columns, LANES):
            valid = max(0, columns - start)
            self.values[token, at(start)] = load(x, token, start, valid=valid) * unit if valid else splat(0.0)


@dataclass(frozen=True)
class FloatGroup:
    """A group of columns of some vectors of rows: `numbers` yields those of each vector, 32 a vector, as float32."""

    numbers: list[Iterator[Expr]]
    first_column: Expr
    lanes: int

    def multiply(self, x: KernelTensor, row: Expr, add: Callable[[Expr, int, Expr], None]) -> None:
        """Multiply with one token, whose inputs are in row `row`; `add(0, vector, sum)` takes the sums."""
        for vector, numbers in enumerate(self.numbers):
            chains = [splat(0.0, self.lanes)] * _CHAINS
            for column, number in enumerate(numbers):
                value = splat(x[row, self.first_column + column], self.lanes)
                chains[column % _CHAINS] = bind(fma(bind(number), value, chains[column % _CHAINS], self.lanes))
            add(0, vector, _added(chains))

    def multiply_all(
        self, x: KernelTensor, row_of: Callable[[Expr], Expr], count: Expr, add: Callable[[Expr, int, Expr], None]
    ) -> None:
        """Multiply with `count` tokens, whose inputs are in the rows `row_of(0)` …; `add` takes numbers of tokens."""
        vectors = len(self.numbers)
        made = local_vectors(GROUP, vectors, lanes=self.lanes)
        for vector, numbers in enumerate(self.numbers):
            for column, number in enumerate(numbers):
                made[column, vector] = number

        def multiply(tokens: list[Expr]) -> None:
            rows = [row_of(token) for token in tokens]
            sums = [[[splat(0.0, self.lanes)] * _CHAINS for _ in range(vectors)] for _ in tokens]
            for column in range(GROUP):
                own, chain = [bind(made[column, vector]) for vector in range(vectors)], column % _CHAINS
                for row, of_token in zip(rows, sums, strict=True):
                    value = bind(splat(x[row, self.first_column + column], self.lanes))
                    for number, chains in zip(own, of_token, strict=True):
                        chains[chain] = bind(fma(number, value, chains[chain], self.lanes))
            for token, of_token in zip(tokens, sums, strict=True):
                for vector, chains in enumerate(of_token):
                    add(token, vector, _added(chains))

        whole = bind(count // _TOKENS)
        with loop(0, whole) as block:
            multiply([bind(block * _TOKENS + i) for i in range(_TOKENS)])
        with loop(whole * _TOKENS, count) as token:
            multiply([token])


def _added(chains: list[Expr]) -> Expr:
    return bind(chains[0] + chains[1])
