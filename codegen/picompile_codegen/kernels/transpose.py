"""Rows to columns."""

from tvm import tirx

from picompile_codegen.kernels.tensor import Expr, bind
from picompile_codegen.kernels.vector import LANES

_PAIRS = ([0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15])
_FOURS = ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])
_HALVES = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])


def transpose(rows: list[Expr]) -> list[Expr]:
    """Eight vectors of eight: vector i of the result holds element i of each. Three times eight instructions."""
    rows = [bind(row) for row in rows]
    pairs = [_shuffle(rows[i], rows[i + 1], lanes) for i in range(0, LANES, 2) for lanes in _PAIRS]
    fours = [_shuffle(pairs[i + k], pairs[i + 2 + k], lanes) for i in (0, 4) for k in range(2) for lanes in _FOURS]
    return [_shuffle(fours[i], fours[4 + i], lanes) for lanes in _HALVES for i in range(4)]


def _shuffle(a: Expr, b: Expr, lanes: list[int]) -> Expr:
    return bind(tirx.Shuffle([a, b], lanes))
