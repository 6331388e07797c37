"""Products of rows of packed matrices with one row of activations, a warp for a few rows at a time.

The activations are in the memory of a block, laid out so that 32 threads read them without waiting for each other.
"""

from collections.abc import Sequence

from tvm import tirx

from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, when
from picompile_codegen.cuda.function import WARP, ThreadIndex, blocks_for
from picompile_codegen.cuda.matrix import CudaMatrix, Unit
from picompile_codegen.cuda.memory import barrier, loads_first, shared

_GROUP = 32
# Threads read 16 bytes each from groups side by side. Four floats between groups put these reads in different banks.
_PITCH = _GROUP + 4


class BlockVector:
    """Up to `size` float32 in shared memory."""

    def __init__(self, size: int) -> None:
        self._size = blocks_for(size, _GROUP) * _GROUP
        self._memory = shared(self._size // _GROUP * _PITCH)

    def fill(self, x: KernelTensor, row: Expr, first: Expr, columns: int, place: ThreadIndex, threads: int) -> None:
        """Copy x[row, first … first + size - 1]; zeros where there is no such column. All threads of the block come.

        `columns` are those that x has.
        """
        barrier()
        with loop(0, blocks_for(self._size, threads)) as turn:
            column = bind(turn * threads + place.thread)
            with when(column < self._size):
                inside = first + column < columns
                value = tirx.if_then_else(inside, x[row, first + column], 0.0)
                self._memory[self._at(column)] = value
        barrier()

    def read(self, start: Expr, count: int) -> list[Expr]:
        """Return elements `start` … `start` + `count` - 1, where `start` and `count` are multiples of 4, inside one
        group."""
        place = bind(self._at(start))
        found: list[Expr] = []
        for i in range(0, count, 4):
            four = bind(self._memory[tirx.Ramp(place + i, 1, 4)])
            found += [bind(tirx.Shuffle([four], [lane])) for lane in range(4)]
        return found

    def _at(self, column: Expr) -> Expr:
        return column // _GROUP * _PITCH + column % _GROUP


# Columns of x in shared memory at a time: 18 KiB, so that several blocks fit a multiprocessor.
_COLUMNS = 4096
# Reads that a lane has under way at once.
_UNITS_TOGETHER = 4
# Weights of a unit that is finished before the next one begins.
_MANY_WEIGHTS = 32


def in_parts(columns: int) -> bool:
    """Return whether a `BlockInput` of so many columns has several parts."""
    return columns > _COLUMNS


class BlockInput:
    """Row `row` of x in the memory of a block of `threads`, one part at a time where it is long."""

    def __init__(self, x: KernelTensor, row: Expr, columns: int, threads: int) -> None:
        self.columns = columns
        self.threads = threads
        self._x, self._row = x, row
        self._vector = BlockVector(min(_COLUMNS, columns))
        self._is_whole = False

    def parts(self) -> list[tuple[int, int]]:
        """Return (first column, columns) of each part."""
        return [(start, min(_COLUMNS, self.columns - start)) for start in range(0, self.columns, _COLUMNS)]

    def fill(self, start: int, place: ThreadIndex) -> BlockVector:
        """Load the part that begins at column `start`. All threads of the block must come here."""
        if not self._is_whole:
            self._vector.fill(self._x, self._row, start, self.columns, place, self.threads)
            self._is_whole = self.columns <= _COLUMNS
        return self._vector


def product(products: KernelTensor, index: Expr) -> Expr:
    """Return the whole product of a row: the sum of its parts."""
    total = products[0, index]
    for part in range(1, products.rows):
        total = total + products[part, index]
    return bind(total)


def add_part(
    vector: BlockVector, matrix: CudaMatrix, rows: Sequence[Expr], part: tuple[int, int], sums: KernelTensor, lane: Expr
) -> None:
    """sums[i] += this lane's share of x · row `rows[i]` in `part`, the first column and how many are in `vector`.

    The lanes of a warp take the units of a row in turns.
    """
    start, columns = part
    first_unit, units = start // matrix.unit_weights, blocks_for(columns, matrix.unit_weights)

    def add(numbers: list[Expr]) -> None:
        read = [[matrix.unit(row, first_unit + number) for row in rows] for number in numbers]
        for turn, (number, of_rows) in enumerate(zip(numbers, read, strict=True)):
            # ptxas mixes the work of several units. With 32 weights each that takes a fourth block its registers.
            if turn == 0 or matrix.unit_weights >= _MANY_WEIGHTS:
                loads_first()
            values = vector.read(number * matrix.unit_weights, matrix.unit_weights)
            for i, unit in enumerate(of_rows):
                sums[i] = sums[i] + unit_product(unit, values)

    ahead = max(_UNITS_TOGETHER // len(rows), 1)
    full = units // (ahead * WARP)
    with loop(0, full) as turn:
        add([bind((turn * ahead + i) * WARP + lane) for i in range(ahead)])
    with loop(0, blocks_for(units, WARP) - full * ahead) as turn:
        number = bind((full * ahead + turn) * WARP + lane)
        with when(number < units):
            add([number])


def unit_product(unit: Unit, values: Sequence[Expr]) -> Expr:
    """Return the product of a unit's weights with as many activations."""
    total = unit.values[0] * values[0]
    for weight, value in zip(unit.values[1:], values[1:], strict=True):
        total = total + weight * value
    return bind(total if unit.scale is None else total * unit.scale)
