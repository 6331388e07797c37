"""Mixtures of values by weights, where a block has a few queries of one token."""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cuda.attention_arguments import number
from picompile_codegen.cuda.attention_scores import THREADS, Tile
from picompile_codegen.cuda.attention_units import load_unit, unit_scale, unit_size
from picompile_codegen.cuda.function import Place, blocks_for
from picompile_codegen.cuda.memory import barrier, registers, shared
from picompile_codegen.errors import CodegenError
from picompile_codegen.kernels.cache import Cache
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, loop, when

# Positions that a thread takes at once: their weights are one load, and all of their values are on their way.
_POSITIONS = 4
_UNIT = 8
# 16 KiB.
_MEMORY = 4096


@dataclass(frozen=True)
class Mixture:
    """Sums of `count` queries: a thread has a unit of columns of all of them, `sums` [count · size].

    Threads side by side have the `units` units of a row; `sets` of them take different positions.
    """

    count: int
    size: int
    units: int
    sums: Tensor
    unit: Expr
    set: Expr
    place: Place

    @classmethod
    def of(cls, count: int, values: Cache, place: Place) -> "Mixture":
        """Zeros. Raises `CodegenError` for rows that have more units than a block has threads."""
        size = unit_size(values.data.dtype, values.dim, _UNIT)
        units = values.dim // size
        if units > THREADS:
            raise CodegenError(f"attention cannot have values that are {values.dim} wide: {THREADS * size} at most")
        sums = registers(count * size)
        for i in range(count * size):
            sums[i] = number(0.0)
        return cls(count, size, units, sums, bind(place.thread % units), bind(place.thread // units), place)

    @property
    def sets(self) -> int:
        """Sets of threads. A few threads may be left over."""
        return THREADS // self.units

    def add(self, values: Cache, tile: Tile, weights: Tensor, rescale: Tensor) -> None:
        """Multiplies all before by `rescale`, and adds the values of a tile times `weights`."""
        for i in range(self.count):
            factor = bind(rescale[i])
            for e in range(self.size):
                self.sums[i * self.size + e] = self.sums[i * self.size + e] * factor
        at_once = self.sets * _POSITIONS
        with loop(0, bind((tile.count + (at_once - 1)) // at_once)) as turn:
            first = bind(turn * at_once + self.set * _POSITIONS)
            with when(tirx.And(self.set < self.sets, first < tile.count)):
                self._add_positions(values, tile, weights, first)

    def _add_positions(self, values: Cache, tile: Tile, weights: Tensor, first: Expr) -> None:
        rows = [tile.row(first + j) for j in range(_POSITIONS)]
        start = self.unit * self.size
        read = [load_unit(values.data, row, start, self.size) for row in rows]
        scales = [unit_scale(values, row, start) for row in rows]
        for i in range(self.count):
            four = bind(weights[i, tirx.Ramp(first, 1, _POSITIONS)])
            for j, (elements, scale) in enumerate(zip(read, scales, strict=True)):
                weight = tirx.Shuffle([four], [j])
                weight = bind(weight if scale is None else weight * scale)
                for e, element in enumerate(elements):
                    self.sums[i * self.size + e] = self.sums[i * self.size + e] + weight * element

    def finish(self, give: Callable[[Expr, Expr, Expr], None]) -> None:
        """Adds up what the sets have, in their order: `give(query, column, sum)`."""
        width = self.units * self.size
        at_once = min(self.count, max(1, _MEMORY // (self.sets * width)))
        memory = shared(at_once, self.sets, width)
        for begin in range(0, self.count, at_once):
            queries = min(at_once, self.count - begin)
            if begin:
                barrier()
            with when(self.set < self.sets):
                for i in range(queries):
                    for e in range(self.size):
                        memory[i, self.set, self.unit * self.size + e] = self.sums[(begin + i) * self.size + e]
            barrier()
            self._add_sets(memory, (begin, queries), width, give)

    def _add_sets(
        self, memory: Tensor, span: tuple[int, int], width: int, give: Callable[[Expr, Expr, Expr], None]
    ) -> None:
        total, (begin, queries) = registers(1), span
        with loop(0, blocks_for(queries * width, THREADS)) as turn:
            index = bind(turn * THREADS + self.place.thread)
            with when(index < queries * width):
                i, column = bind(index // width), bind(index % width)
                total[0] = number(0.0)
                with loop(0, self.sets) as each:
                    total[0] = total[0] + memory[i, each, column]
                give(begin + i, column, total[0])
