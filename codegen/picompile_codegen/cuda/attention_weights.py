"""Weights that the scores of a tile become, where a block has a few queries of one token."""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cuda.attention_arguments import LOWEST, number
from picompile_codegen.cuda.attention_scores import TILE, Tile
from picompile_codegen.cuda.function import WARP, Place
from picompile_codegen.cuda.memory import barrier, registers, shared, warp_max, warp_sum
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, minimum, when


@dataclass(frozen=True)
class Weights:
    """What warp i knows of query i: the running `highest` score and `sum` of weights, in every lane.

    In the memory of the block: `rescale`, by which all before the last tile is to be multiplied; at the end `totals`.
    """

    count: int
    highest: Tensor
    sum: Tensor
    rescale: Tensor
    totals: Tensor
    place: Place

    @classmethod
    def of(cls, count: int, place: Place) -> "Weights":
        """Of nothing yet."""
        weights = cls(count, registers(1), registers(1), shared(count), shared(count), place)
        weights.highest[0], weights.sum[0] = number(LOWEST), number(0.0)
        return weights

    def soften(self, scores: Tensor, tile: Tile) -> None:
        """Turns the scores of a tile into weights relative to the new maximum; zeros where there is no position."""
        query, lane = bind(minimum(self.place.warp, self.count - 1)), self.place.lane
        places = [bind(lane + j * WARP) for j in range(TILE // WARP)]
        found = [bind(tirx.if_then_else(p < tile.count, scores[query, p], number(LOWEST))) for p in places]
        # Lanes write nothing but what they alone have read. TVM does not see that, and wants a barrier in between.
        barrier()
        before = bind(self.highest[0])
        largest = before
        for score in found:
            largest = tirx.Max(largest, score)
        now = warp_max(largest)
        own: Expr = number(0.0)
        with when(self.place.warp < self.count):
            for p, score in zip(places, found, strict=True):
                weight = bind(tirx.Select(p < tile.count, tirx.exp(score - now), number(0.0)))
                scores[query, p] = weight
                own = bind(own + weight)
            factor = bind(tirx.exp(before - now))
            self.sum[0] = self.sum[0] * factor + warp_sum(own)
            self.highest[0] = now
            with when(lane == 0):
                self.rescale[query] = factor

    def keep_totals(self) -> None:
        """Puts the sums where all threads see them behind the next barrier."""
        with when(tirx.And(self.place.warp < self.count, self.place.lane == 0)):
            self.totals[self.place.warp] = self.sum[0]

    def each(self, body: Callable[[Expr, Expr, Expr], None]) -> None:
        """`body(i, highest, sum)` for each query, in one thread."""
        with when(tirx.And(self.place.warp < self.count, self.place.lane == 0)):
            body(self.place.warp, self.highest[0], self.sum[0])
