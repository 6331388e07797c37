"""The highest of a vocabulary's scores: what greedy and top-k sampling need of them."""

from tvm import tirx

from picompile_codegen.cpu.kernel import Kernel, KernelFunction
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, local, loop, parallel, select, when

# More than top-k of most programs (40 or 50), and few enough to go to the host in no time.
MOST_LEADING = 64
_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000


def leading_logits(*, vocab: int, rows: int) -> Kernel:
    """The n = min(64, vocab) highest logits of each row, highest first, and their tokens.

    logits float32 [rows, vocab] → scores float32 [rows, n], ids int32 [rows, n]. Of equal logits the lower token comes
    first; NaN comes before all numbers.
    """
    function, count = KernelFunction("leading_logits", vocab, f"r{rows}"), min(MOST_LEADING, vocab)
    with function:
        logits = function.floats("logits", rows, vocab)
        scores, ids = (
            function.floats("scores", rows, count),
            function.argument("ids", "int32", rows, count, below=vocab),
        )
        with parallel(function.tokens(rows), when_worth=rows > 1) as row:
            kept = _Kept(scores, ids, row)
            with loop(0, count) as token:
                kept.insert(bind(logits[row, token]), token, token)
            with loop(count, vocab) as token:
                value = bind(logits[row, token])
                # Of many thousands a few hundred are among the highest so far.
                with when(order_of(value) > order_of(bind(scores[row, count - 1]))):
                    kept.insert(value, token, count - 1)
    return function.kernel()


def order_of(value: Expr) -> Expr:
    """An int32 that is larger for a larger float32, the same for both zeros, and largest for NaN."""
    bits = bind(tirx.reinterpret("int32", value))
    magnitude = bind(bits & _MAGNITUDE)
    is_nan = magnitude > _INFINITY
    return bind(select(is_nan, tirx.IntImm("int32", _MAGNITUDE), select(bits < 0, -magnitude, magnitude)))


class _Kept:
    """The highest scores of a row so far, in order."""

    def __init__(self, scores: KernelTensor, ids: KernelTensor, row: Expr) -> None:
        self._scores, self._ids, self._row = scores, ids, row
        self._place = local(1, dtype="int32")

    def insert(self, value: Expr, token: Expr, last: Expr) -> None:
        """Puts a score behind all that are no lower; those behind it move on by one, into place `last` at most."""
        scores, ids, row, place = self._scores, self._ids, self._row, self._place
        order = order_of(value)
        place[0] = last
        with loop(0, last) as passed:
            other = bind(last - 1 - passed)
            moved = bind(scores[row, other])
            with when(order > order_of(moved)):
                scores[row, other + 1], ids[row, other + 1] = moved, ids[row, other]
                place[0] = other
        scores[row, place[0]], ids[row, place[0]] = value, token
