"""A row of activations in the memory of a block, laid out so that 32 threads read it without waiting for each other."""

from tvm import tirx

from picompile_codegen.cuda.function import Place, blocks_for
from picompile_codegen.cuda.memory import barrier, shared
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, loop, when

_GROUP = 32
# Threads read 16 bytes each from groups side by side. Four floats between groups put these reads in different banks.
_PITCH = _GROUP + 4


class BlockVector:
    """Up to `size` float32 in shared memory."""

    def __init__(self, size: int) -> None:
        self._size = blocks_for(size, _GROUP) * _GROUP
        self._memory = shared(self._size // _GROUP * _PITCH)

    def fill(self, x: Tensor, row: Expr, first: Expr, columns: int, place: Place, threads: int) -> None:
        """Copies x[row, first … first + size - 1]; zeros where there is no such column. All threads of the block come.

        `columns` are those that x has.
        """
        barrier()
        with loop(0, blocks_for(self._size, threads)) as turn:
            column = bind(turn * threads + place.thread)
            with when(column < self._size):
                inside = first + column < columns
                value = tirx.if_then_else(inside, x[row, first + column], tirx.FloatImm("float32", 0.0))
                self._memory[self._at(column)] = value
        barrier()

    def read(self, start: Expr, count: int) -> list[Expr]:
        """Elements `start` … `start` + `count` - 1, where `start` and `count` are multiples of 4, inside one group."""
        place = bind(self._at(start))
        found: list[Expr] = []
        for i in range(0, count, 4):
            four = bind(self._memory[tirx.Ramp(place + i, 1, 4)])
            found += [bind(tirx.Shuffle([four], [lane])) for lane in range(4)]
        return found

    def _at(self, column: Expr) -> Expr:
        return column // _GROUP * _PITCH + column % _GROUP
