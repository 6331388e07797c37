"""Weights that the scores of a tile become, where a block has queries of a chunk."""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cuda.attention_arguments import LOWEST, number
from picompile_codegen.cuda.attention_queries import ChunkTile
from picompile_codegen.cuda.function import Place
from picompile_codegen.cuda.memory import barrier, from_lane, registers, shared
from picompile_codegen.cuda.outer import SIDE, THREADS, Padded
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, maximum, minimum, when

# Threads that turn the scores of a query into weights.
_SOFTENERS = THREADS // SIDE


@dataclass(frozen=True)
class Softener:
    """Turns scores into weights. Four threads side by side have a query: its running `highest` score and `sum`.

    In the memory of the block, for each query: `rescale`, by which all before the last tile is to be multiplied; at the
    end `maxima` and `totals`.
    """

    query: Expr
    part: Expr
    first: Expr
    last: Expr
    highest: Tensor
    sum: Tensor
    rescale: Tensor
    maxima: Tensor
    totals: Tensor

    @classmethod
    def of(cls, tile: ChunkTile, stop: Expr, place: Place) -> "Softener":
        """Of nothing yet. No position from `stop` on counts."""
        query = bind(place.thread // _SOFTENERS)
        first, position = tile.seen(query)
        memory = (shared(SIDE), shared(SIDE), shared(SIDE))
        last = bind(minimum(position, stop - 1))
        softener = cls(query, bind(place.thread % _SOFTENERS), first, last, registers(1), registers(1), *memory)
        softener.highest[0], softener.sum[0] = number(LOWEST), number(0.0)
        return softener

    def soften(self, weights: Padded, begin: Expr) -> None:
        """Scores of the positions from `begin` on become weights, relative to the new maximum."""
        # With steps of two, threads of a warp meet different banks of memory.
        keys = [bind(i // 2 * (2 * _SOFTENERS) + i % 2 + self.part * 2) for i in range(SIDE // _SOFTENERS)]
        scores = [self._seen(weights.memory[weights.at(key, self.query)], bind(begin + key)) for key in keys]
        # Threads write nothing but what they alone have read. TVM does not see that, and wants a barrier in between.
        barrier()
        before = bind(self.highest[0])
        largest = before
        for score in scores:
            largest = tirx.Max(largest, score)
        now = self._over_four(largest, maximum)
        own: Expr = number(0.0)
        for key, score in zip(keys, scores, strict=True):
            # Not merely a small number: a query that has seen nothing yet has LOWEST for its maximum.
            weight = bind(tirx.Select(score > number(LOWEST), tirx.exp(score - now), number(0.0)))
            weights.memory[weights.at(key, self.query)] = weight
            own = bind(own + weight)
        factor = bind(tirx.exp(before - now))
        self.sum[0] = self.sum[0] * factor + self._over_four(own, lambda a, b: a + b)
        self.highest[0] = now
        with when(self.part == 0):
            self.rescale[self.query] = factor

    def _seen(self, score: Expr, position: Expr) -> Expr:
        return bind(tirx.Select(tirx.And(position >= self.first, position <= self.last), score, number(LOWEST)))

    @staticmethod
    def _over_four(value: Expr, combine: Callable[[Expr, Expr], Expr]) -> Expr:
        for offset in (1, 2):
            value = bind(value)
            value = combine(value, from_lane(value, offset))
        return bind(value)

    def rescale_of(self, query: Expr) -> list[Expr]:
        """The factors of four queries, a multiple of four and the next."""
        four = bind(self.rescale[tirx.Ramp(query, 1, 4)])
        return [bind(tirx.Shuffle([four], [i])) for i in range(4)]

    def finish(self, with_maxima: bool) -> None:
        """Puts totals, and maxima if they are wanted, where all threads see them behind the next barrier."""
        with when(self.part == 0):
            self.totals[self.query] = self.sum[0]
            if with_maxima:
                self.maxima[self.query] = self.highest[0]
