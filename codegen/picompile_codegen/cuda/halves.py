"""Activations as tensor cores take them: halves, times a power of two for each token that keeps them in range."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, when
from picompile_codegen.cuda.function import CudaFunction, ThreadIndex, blocks_for
from picompile_codegen.cuda.memory import block_max, extern, registers
from picompile_passes.weight_formats import GROUP

_THREADS = 256


@dataclass(frozen=True)
class Halves:
    """Rows of activations: `values` float16 [rows, columns], and more columns of zeros up to a multiple of 32.

    An activation is a value times its row's power of two in `factors` float32 [rows].
    """

    values: KernelTensor
    factors: KernelTensor
    columns: int

    @classmethod
    def scratch(cls, function: CudaFunction, name: str, rows: int, columns: int) -> "Halves":
        """Declare scratch memory for `rows` rows."""
        padded = blocks_for(columns, GROUP) * GROUP
        values = function.scratch(name, "float16", rows, padded)
        return cls(values, function.scratch(f"{name}_factors", "float32", rows), columns)

    @property
    def groups(self) -> int:
        """Groups of 32 columns."""
        return self.values.columns // GROUP

    def write(self, function: CudaFunction, x: KernelTensor) -> None:
        """Write the launch that rounds x float32 [rows, columns]; a block has a row.

        The largest of a row becomes 2^14 to 2^15, so that all above 2^-28 of it keep the bits of a normal half.
        """
        rows = self.values.rows
        with function.launch(grid=rows, block=_THREADS) as place, when(place.block < function.tokens(rows)):
            power = bind(extern("pi_power_for", self._largest(x, place)))
            with when(place.thread == 0):
                self.factors[place.block] = 1.0 / power
            with self._turns(place) as column, when(column < self.values.columns):
                value = self._element(x, place.block, column) * power
                self.values[place.block, column] = tirx.Cast("float16", value)

    def _largest(self, x: KernelTensor, place: ThreadIndex) -> Expr:
        largest = registers(1)
        largest[0] = 0.0
        with self._turns(place) as column:
            largest[0] = tirx.Max(largest[0], tirx.abs(self._element(x, place.block, column)))
        return block_max(largest[0], place.thread, _THREADS)

    @contextmanager
    def _turns(self, place: ThreadIndex) -> Iterator[Expr]:
        """Give the columns of a thread, a few of which may be past the last."""
        with loop(0, blocks_for(self.values.columns, _THREADS)) as turn:
            yield bind(turn * _THREADS + place.thread)

    def _element(self, x: KernelTensor, row: Expr, column: Expr) -> Expr:
        return bind(tirx.if_then_else(column < self.columns, x[row, column], 0.0))
