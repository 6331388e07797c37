"""Activations as tensor cores take them: halves, times a power of two for each token that keeps them in range."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, when
from picompile_codegen.cuda.function import CudaFunction, ThreadIndex, blocks_for
from picompile_codegen.cuda.memory import block_max, extern, registers
from picompile_passes.formats import GROUP

_THREADS = 256


@dataclass(frozen=True)
class Halves:
    """Rows of activations: `values` float16 [rows, columns], and more columns of zeros up to a multiple of 32.

    An activation is a value times its row's power of two in `factors` float32 [rows]. `count` gives, in a launch, how
    many columns there are, where they may be fewer than there is room for.
    """

    values: KernelTensor
    factors: KernelTensor
    columns: int
    count: Callable[[], Expr] | None = None

    @classmethod
    def scratch(cls, function: CudaFunction, name: str, rows: int, columns: int) -> "Halves":
        """Declare scratch memory for `rows` rows."""
        padded = blocks_for(columns, GROUP) * GROUP
        values = function.scratch(name, "float16", rows, padded)
        return cls(values, function.scratch(f"{name}_factors", "float32", rows), columns)

    def groups(self) -> Expr:
        """Return how many groups of 32 columns there are, in a launch: a number, where that is known before."""
        return self.values.columns // GROUP if self.count is None else bind((self.count() + (GROUP - 1)) // GROUP)

    def write(self, function: CudaFunction, x: KernelTensor) -> None:
        """Write the launch that rounds x float32 [rows, columns]; a block has a row.

        The largest of a row becomes 2^14 to 2^15, so that all above 2^-28 of it keep the bits of a normal half.
        """
        rows = self.values.rows
        with function.launch(grid=rows, block=_THREADS) as place, when(place.block < function.tokens(rows)):
            columns = self.columns if self.count is None else self.count()
            row = _Row(x, place, columns, self.groups() * GROUP)
            power = bind(extern("pi_power_for", row.largest()))
            with when(place.thread == 0):
                self.factors[place.block] = 1.0 / power
            with row.turns() as column, when(column < row.padded):
                value = row.element(column) * power
                self.values[place.block, column] = tirx.Cast("float16", value)


@dataclass(frozen=True)
class _Row:
    """A block's row of x: `columns` of them count, and there are zeros up to `padded`."""

    x: KernelTensor
    place: ThreadIndex
    columns: Expr
    padded: Expr

    def largest(self) -> Expr:
        """Return the largest magnitude in the row."""
        largest = registers(1)
        largest[0] = 0.0
        with self.turns() as column:
            largest[0] = tirx.Max(largest[0], tirx.abs(self.element(column)))
        return block_max(largest[0], self.place.thread, _THREADS)

    @contextmanager
    def turns(self) -> Iterator[Expr]:
        """Give the columns of a thread, a few of which may be past the last."""
        with loop(0, (self.padded + (_THREADS - 1)) // _THREADS) as turn:
            yield bind(turn * _THREADS + self.place.thread)

    def element(self, column: Expr) -> Expr:
        """Return the element of a column, 0 past the last."""
        return bind(tirx.if_then_else(column < self.columns, self.x[self.place.block, column], 0.0))
