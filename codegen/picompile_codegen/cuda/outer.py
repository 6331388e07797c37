"""Products of two tiles in the memory of a block: 64 by 64 results, of which each of 256 threads has 4 by 4."""

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cuda.function import Place
from picompile_codegen.cuda.memory import registers, shared
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, loop

SIDE = 64
THREADS = 256
OWN = 4
_ACROSS = SIDE // OWN
_PITCH = SIDE + 4


@dataclass(frozen=True)
class Padded:
    """`memory` of rows of 64 float32, and four more between them: threads that store a column meet different banks.

    It has one dimension: TVM would take the padding away from two.
    """

    memory: Tensor

    @classmethod
    def of(cls, rows: int) -> "Padded":
        """272 bytes of the block a row."""
        return cls(shared(rows * _PITCH))

    def at(self, row: Expr, column: Expr) -> Expr:
        """The index of an element."""
        return row * _PITCH + column

    def load(self, row: Expr, column: Expr) -> Expr:
        """Four elements from `column` on, a multiple of four."""
        return self.memory[tirx.Ramp(self.at(row, column), 1, OWN)]

    def store(self, row: Expr, column: Expr, values: Sequence[Expr]) -> None:
        """Up to four elements from `column` on, a multiple of their number, which is a power of two."""
        count = len(values)
        if count == 1:
            self.memory[self.at(row, column)] = values[0]
        else:
            self.memory[tirx.Ramp(self.at(row, column), 1, count)] = tirx.Shuffle(list(values), list(range(count)))


def own_place(place: Place) -> tuple[Expr, Expr]:
    """The first row and the first column of the results that a thread has."""
    return bind(place.thread // _ACROSS * OWN), bind(place.thread % _ACROSS * OWN)


def own_sums() -> Tensor:
    """A thread's results, all zero."""
    sums = registers(OWN * OWN)
    for i in range(OWN * OWN):
        sums[i] = tirx.FloatImm("float32", 0.0)
    return sums


def add_products(left: Padded, right: Padded, depth: int, sums: Tensor, place: Place, right_first: int = 0) -> None:
    """sums[i, j] += Σ left[k, row + i] · right[right_first + k, column + j] over k below `depth`."""
    row, column = own_place(place)
    with loop(0, depth) as k:
        of_rows, of_columns = bind(left.load(k, row)), bind(right.load(right_first + k, column))
        a = [bind(tirx.Shuffle([of_rows], [i])) for i in range(OWN)]
        b = [bind(tirx.Shuffle([of_columns], [j])) for j in range(OWN)]
        for i in range(OWN):
            for j in range(OWN):
                sums[i * OWN + j] = sums[i * OWN + j] + a[i] * b[j]
