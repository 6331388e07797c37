"""Products of matrices in panels with the activations of one token, on a GPU.

A block of threads has a panel, whose 16 rows lie side by side (`formats/panels.py`). Its warps take 256 columns at a
time, in turns. A lane has four of the rows and, of every other group of 32 columns, four columns of each half. So a
warp reads 512 bytes that lie side by side, and what a lane has read of the activations serves four rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, select, when
from picompile_codegen.cuda.dot import BlockInput, BlockVector
from picompile_codegen.cuda.function import WARP, ThreadIndex, blocks_for
from picompile_codegen.cuda.matrix import CudaMatrix
from picompile_codegen.cuda.memory import barrier, from_lane, loads_first, shared, zero_registers
from picompile_codegen.cuda.panel_codes import (
    CODES,
    WORDS,
    PanelRows,
    four_numbers,
    load_scales,
    planes_of,
    scaled,
    words_at,
)
from picompile_passes.formats import BLOCK, GROUP, PANEL_ROWS, Plane

# Threads of a block that has a panel.
PANEL_THREADS = 256
_WARPS = PANEL_THREADS // WARP
# Rows of a lane, and lanes with the same columns.
_ROWS = 4
_SHARE = PANEL_ROWS // _ROWS
# Groups of a lane in 256 columns.
_GROUPS = BLOCK // GROUP // 2
_HALF = GROUP // 2
# Bytes that a lane loads together: a word of each of its rows. Words of a panel's rows lie side by side.
_LOADED_BYTES = 4 * _ROWS
_WORD_BYTES = 4 * PANEL_ROWS


def panel_products(
    matrices: Sequence[CudaMatrix], x: BlockInput, panel: Expr, place: ThreadIndex
) -> Callable[[int], Expr]:
    """Multiply x with a panel of each matrix; `x` is for `PANEL_THREADS` threads.

    Return a function of a matrix's number: the product with row `place.thread` of its panel, in the first 16 threads.
    All threads of the block must come.
    """
    sums = [zero_registers(_ROWS) for _ in matrices]
    for start, columns in x.parts():
        vector, blocks = x.fill(start, place), blocks_for(columns, BLOCK)
        with loop(0, blocks_for(blocks, _WARPS)) as turn:
            number = bind(turn * _WARPS + place.warp)
            with when(number < blocks):
                for matrix, of_rows in zip(matrices, sums, strict=True):
                    share = _Share(matrix, panel, block=start // BLOCK + number, lane=place.lane)
                    share.add_products(vector, number, of_rows)
    of_warps: KernelTensor = shared(len(matrices), _WARPS, PANEL_ROWS)
    # TVM may give it the memory of x, which others may still read.
    barrier()
    for number, of_rows in enumerate(sums):
        totals = [_over_columns(of_rows[i]) for i in range(_ROWS)]
        with when(place.lane < _SHARE):
            for i, total in enumerate(totals):
                of_warps[number, place.warp, place.lane * _ROWS + i] = total
    barrier()
    row = bind(place.thread % PANEL_ROWS)

    def product(number: int) -> Expr:
        total = of_warps[number, 0, row]
        for warp in range(1, _WARPS):
            total = total + of_warps[number, warp, row]
        return bind(total)

    return product


def _over_columns(value: Expr) -> Expr:
    """Return the sum over the lanes that have the same rows, in each of them."""
    offset = WARP // 2
    while offset >= _SHARE:
        value = bind(value)
        value = value + from_lane(value, offset)
        offset //= 2
    return bind(value)


@dataclass(frozen=True)
class _Share:
    """A lane's share of the 256 columns number `block` of a panel."""

    matrix: CudaMatrix
    panel: Expr
    block: Expr
    lane: Expr

    def add_products(self, vector: BlockVector, number: Expr, sums: KernelTensor) -> None:
        """sums[i] += the products of the share of row i with block `number` of `vector`, which has the same columns."""
        form, parts = self.matrix.form, GROUP // self.matrix.form.group
        words = self._load_words()
        rows = PanelRows(self.panel, bind(self.lane % _SHARE * _ROWS), _ROWS)
        stored = [
            [load_scales(self.matrix, rows, group, part) for part in range(parts)]
            for group in map(self._group, range(_GROUPS))
        ]
        loads_first()
        for turn in range(_GROUPS):
            first = self._or_first(turn, number * (BLOCK // GROUP) + self._offset(turn), 0)
            start = bind(first * GROUP + self.lane // _SHARE % WORDS * CODES)
            values = [vector.read(start + half * _HALF, CODES) for half in (0, 1)]
            for part in range(parts):
                halves = (0, 1) if parts == 1 else (part,)
                total = _sum([value for half in halves for value in values[half]]) if form.has_zeros else None
                for row, (scale, shift) in enumerate(scaled(form, stored[turn][part], _ROWS)):
                    products = [
                        weight * value
                        for half in halves
                        for weight, value in zip(
                            four_numbers(form, words(turn, row, half), half), values[half], strict=True
                        )
                    ]
                    sums[row] = sums[row] + _sum(products) * self._or_first(turn, scale, 0.0)
                    if shift is not None and total is not None:
                        sums[row] = sums[row] + total * self._or_first(turn, shift, 0.0)

    def _load_words(self) -> Callable[[int, int, int], list[tuple[Expr, int]]]:
        """Load the words of the share; a function of group, row and half returns those of four columns."""
        form = self.matrix.form
        loaded = [[self._words(plane, number) for number in range(plane.bits)] for plane in planes_of(form)]

        def words(turn: int, row: int, half: int) -> list[tuple[Expr, int]]:
            found = []
            for plane, of_plane in zip(planes_of(form), loaded, strict=True):
                if plane.bits == 8:
                    found.append((of_plane[2 * turn + half][row], 0))
                else:
                    groups = _GROUPS // plane.bits
                    found.append((of_plane[turn // groups][row], turn % groups * 2 * plane.bits))
            return found

        return words

    def _words(self, plane: Plane, number: int) -> list[Expr]:
        """Load word `number` of a plane for each row: of one half of a group, or of groups whose bits share bytes."""
        of_half = self.lane % (WARP // 2) * _LOADED_BYTES
        if plane.bits == 8:
            turn, half = divmod(number, 2)
            first = half * WORDS * _WORD_BYTES + of_half
            place = (self._offset(turn) + self.block * (BLOCK // GROUP)) * (GROUP // CODES * _WORD_BYTES) + first
        else:
            turn, first = number * (_GROUPS // plane.bits), of_half
            place = (self.block * plane.bits + number) * (WARP * _LOADED_BYTES) + self.lane * _LOADED_BYTES
        start = PANEL_ROWS * self.matrix.form.plane_offset_bytes(plane, self.matrix.columns)
        return words_at(self.matrix, self.panel, bind(start + self._or_first(turn, place, first)), _ROWS)

    def _offset(self, turn: int) -> Expr:
        """Return which of the eight groups is the lane's in a turn."""
        return 2 * turn + self.lane // (WARP // 2)

    def _group(self, turn: int) -> Expr:
        return bind(self._or_first(turn, self.block * (BLOCK // GROUP) + self._offset(turn), 0))

    def _or_first(self, turn: int, value: Expr, first: Expr) -> Expr:
        """Return `value`, or `first` where the lane's group of a turn is past the last one.

        There the lane reads the first group, and multiplies it with 0.
        """
        groups = self.matrix.form.padded_columns(self.matrix.columns) // GROUP
        if groups % (BLOCK // GROUP) == 0:
            return value
        is_there = self.block * (BLOCK // GROUP) + self._offset(turn) < groups
        return bind(select(is_there, value, tirx.const(first, "float32") if isinstance(first, float) else first))


def _sum(terms: Sequence[Expr]) -> Expr:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return bind(total)
