"""Weights that the scores of a tile become, where a block has a few queries of one token."""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cuda.attention_arguments import LOWEST, number, weight_of
from picompile_codegen.cuda.attention_scores import TILE, Tile
from picompile_codegen.cuda.function import WARP, Place
from picompile_codegen.cuda.memory import barrier, registers, shared, warp_max, warp_sum
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, minimum, when


@dataclass(frozen=True)
class Weights:
    """What warp i knows of query i, in the memory of the block.

    `highest` is the running maximum of scores, `totals` the running sum of weights, and `rescale` what all
    before the last tile is to be multiplied by. They take no registers, of which sums of values need all.
    """

    count: int
    highest: Tensor
    totals: Tensor
    rescale: Tensor
    place: Place

    @classmethod
    def of(cls, count: int, place: Place) -> "Weights":
        """Of nothing yet; seen behind the next barrier."""
        weights = cls(count, shared(count), shared(count), shared(count), place)
        with when(place.thread < count):
            weights.highest[place.thread], weights.totals[place.thread] = number(LOWEST), number(0.0)
        return weights

    def soften(self, scores: Tensor, tile: Tile) -> None:
        """Turns the scores of a tile into weights relative to the new maximum; zeros where there is no position."""
        query, lane = bind(minimum(self.place.warp, self.count - 1)), self.place.lane
        places = [bind(lane + j * WARP) for j in range(TILE // WARP)]
        found = [bind(tirx.if_then_else(p < tile.count, scores[query, p], number(LOWEST))) for p in places]
        before, total = bind(self.highest[query]), bind(self.totals[query])
        # Lanes write nothing but what they alone have read. TVM does not see that, and wants a barrier in between.
        barrier()
        largest = before
        for score in found:
            largest = tirx.Max(largest, score)
        now = warp_max(largest)
        own: Expr = number(0.0)
        # TVM would compute a weight again wherever it is used, if it were not stored.
        weights = registers(len(places))
        with when(self.place.warp < self.count):
            for i, (p, score) in enumerate(zip(places, found, strict=True)):
                weights[i] = weight_of(p < tile.count, score, now)
                scores[query, p] = weights[i]
                own = bind(own + weights[i])
            factor = bind(tirx.exp(before - now))
            total = bind(total * factor + warp_sum(own))
            with when(lane == 0):
                self.highest[query], self.totals[query], self.rescale[query] = now, total, factor

    def each(self, body: Callable[[Expr, Expr, Expr], None]) -> None:
        """`body(i, highest, total)` for each query, in one thread, behind a barrier."""
        thread = self.place.thread
        with when(thread < self.count):
            body(thread, self.highest[thread], self.totals[thread])
