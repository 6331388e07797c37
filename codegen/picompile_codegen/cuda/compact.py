"""Numbering those threads of a block for which something holds: how lists are made that keep their order."""

from tvm import tirx

from picompile_codegen.cuda.function import WARP, Place
from picompile_codegen.cuda.memory import barrier, registers, shared
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, select, when


class Numbering:
    """Numbers the threads of a block of `threads`, as often as it is asked to."""

    def __init__(self, threads: int) -> None:
        self._warps = threads // WARP
        self._words: Tensor = shared(self._warps, dtype="uint32")

    def number(self, flag: Expr, place: Place) -> tuple[Expr, Expr]:
        """How many threads before this one have a `flag`, and how many threads have one. All of the block must ask."""
        # Not a pure call: TVM would repeat it where its value is used, and there not all lanes may come.
        bits = bind(tirx.call_extern("uint32", "pi_ballot", tirx.Cast("int32", flag)))
        # Whoever still reads the words of an earlier call must be done first.
        barrier()
        with when(place.lane == 0):
            self._words[place.warp] = bits
        barrier()
        below = (tirx.const(1, "uint32") << tirx.Cast("uint32", place.lane)) - tirx.const(1, "uint32")
        before, total = _ones(bits & below), tirx.IntImm("int32", 0)
        for warp in range(self._warps):
            count = bind(_ones(self._words[warp]))
            before = before + select(place.warp > warp, count, 0)
            total = total + count
        # TVM would write these sums out wherever they are used, if they were not stored.
        found = registers(2, dtype="int32")
        found[0], found[1] = before, total
        return bind(found[0]), bind(found[1])


def _ones(word: Expr) -> Expr:
    return tirx.Cast("int32", tirx.popcount(word))
