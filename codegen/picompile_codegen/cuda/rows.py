"""Rows that threads read and write: four columns at a time where they are aligned for it."""

from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cuda.function import WARP, blocks_for
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, when
from picompile_codegen.kernels.vector import at, splat

_MOST_LANES = 4
_MOST_THREADS = 1024
_ZERO = tirx.FloatImm("float32", 0.0)


def lanes_for(width: int) -> int:
    """How many columns of rows so wide a thread takes at once: every row must begin at a multiple of them."""
    return _MOST_LANES if width % _MOST_LANES == 0 else 1


def load_lanes(x: Tensor, index: tuple[Expr, ...], lanes: int, inside: Expr) -> list[Expr]:
    """`lanes` elements of x from `index` on, a multiple of `lanes`; zeros unless `inside`."""
    *row, start = index
    zero = tirx.const(0, x.dtype)
    zeros = zero if lanes == 1 else splat(zero, lanes)
    value = bind(tirx.if_then_else(inside, x[(*row, at(start, lanes))], zeros))
    return [value] if lanes == 1 else [bind(tirx.Shuffle([value], [i])) for i in range(lanes)]


def store_lanes(y: Tensor, index: tuple[Expr, ...], values: list[Expr], inside: Expr) -> None:
    """Writes `values` to y from `index` on, a multiple of how many they are, if `inside`."""
    *row, start = index
    lanes = len(values)
    with when(inside):
        y[(*row, at(start, lanes))] = values[0] if lanes == 1 else tirx.Shuffle(values, list(range(lanes)))


def block_threads(width: int) -> int:
    """How many threads a block needs for a row: one for every `lanes_for` columns, if a block can have so many."""
    return min(_MOST_THREADS, blocks_for(width // lanes_for(width), WARP) * WARP)


@dataclass(frozen=True)
class Columns:
    """The columns of a row that are one thread's, `lanes` side by side: where they begin, and whether they exist."""

    lanes: int
    runs: tuple[tuple[Expr, Expr], ...]

    @classmethod
    def of(cls, width: int, thread: Expr) -> "Columns":
        """Those of `thread`, where a block of `block_threads(width)` shares a row."""
        lanes, threads = lanes_for(width), block_threads(width)
        numbers = [bind(turn * threads + thread) for turn in range(blocks_for(width // lanes, threads))]
        return cls(lanes, tuple((number * lanes, number < width // lanes) for number in numbers))

    def load(self, x: Tensor, *row: Expr) -> list[Expr]:
        """Its elements of a row of x, zeros for those that do not exist."""
        return [value for start, inside in self.runs for value in load_lanes(x, (*row, start), self.lanes, inside)]

    def store(self, y: Tensor, row: Expr, values: list[Expr]) -> None:
        """Writes its elements to a row of y."""
        for number, (start, inside) in enumerate(self.runs):
            store_lanes(y, (row, start), values[number * self.lanes : (number + 1) * self.lanes], inside)

    def or_zeros(self, values: list[Expr]) -> list[Expr]:
        """`values`, zeros for those that do not exist."""
        return [bind(tirx.Select(self.runs[i // self.lanes][1], value, _ZERO)) for i, value in enumerate(values)]
