"""Weights that the scores of a tile become, where a block has queries of a chunk."""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cuda.attention_arguments import LOWEST, number, weight_of
from picompile_codegen.cuda.attention_queries import ChunkTile
from picompile_codegen.cuda.function import Place
from picompile_codegen.cuda.memory import barrier, from_lane, registers, shared
from picompile_codegen.cuda.outer import SIDE, THREADS, Padded
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, maximum, minimum, when

# Threads that turn the scores of a query into weights.
_SOFTENERS = THREADS // SIDE


@dataclass(frozen=True)
class Softener:
    """Turns scores into weights. Four threads side by side have a query, which sees positions `first` … `last`.

    In the memory of the block, for each query: the running maximum of scores in `maxima` and sum of weights in
    `totals`, and `rescale`, by which all before the last tile is to be multiplied. They take no registers, of which
    outputs need all.
    """

    query: Expr
    part: Expr
    first: Expr
    last: Expr
    rescale: Tensor
    maxima: Tensor
    totals: Tensor

    @classmethod
    def of(cls, tile: ChunkTile, stop: Expr, place: Place) -> "Softener":
        """Of nothing yet; seen behind the next barrier. No position from `stop` on counts."""
        query = bind(place.thread // _SOFTENERS)
        first, position = tile.seen(query)
        memory = (shared(SIDE), shared(SIDE), shared(SIDE))
        last = bind(minimum(position, stop - 1))
        softener = cls(query, bind(place.thread % _SOFTENERS), first, last, *memory)
        with when(softener.part == 0):
            softener.maxima[query], softener.totals[query] = number(LOWEST), number(0.0)
        return softener

    def soften(self, weights: Padded, begin: Expr) -> None:
        """Scores of the positions from `begin` on become weights, relative to the new maximum."""
        # With steps of two, threads of a warp meet different banks of memory.
        keys = [bind(i // 2 * (2 * _SOFTENERS) + i % 2 + self.part * 2) for i in range(SIDE // _SOFTENERS)]
        seen = [bind(self._sees(bind(begin + key))) for key in keys]
        scores = [
            bind(tirx.Select(flag, weights.memory[weights.at(key, self.query)], number(LOWEST)))
            for key, flag in zip(keys, seen, strict=True)
        ]
        before, total = bind(self.maxima[self.query]), bind(self.totals[self.query])
        # Threads write nothing but what they alone have read. TVM does not see that, and wants a barrier in between.
        barrier()
        largest = before
        for score in scores:
            largest = tirx.Max(largest, score)
        now = self._over_four(largest, maximum)
        own: Expr = number(0.0)
        # TVM would compute a weight again wherever it is used, if it were not stored.
        found = registers(len(keys))
        for i, (key, score, flag) in enumerate(zip(keys, scores, seen, strict=True)):
            # Not for the score alone: a query that has seen nothing yet has LOWEST for its maximum.
            found[i] = weight_of(flag, score, now)
            weights.memory[weights.at(key, self.query)] = found[i]
            own = bind(own + found[i])
        factor = bind(tirx.exp(before - now))
        total = bind(total * factor + self._over_four(own, lambda a, b: a + b))
        with when(self.part == 0):
            self.maxima[self.query], self.totals[self.query], self.rescale[self.query] = now, total, factor

    def _sees(self, position: Expr) -> Expr:
        return tirx.And(position >= self.first, position <= self.last)

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
