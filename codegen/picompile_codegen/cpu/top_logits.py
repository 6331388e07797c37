"""The highest of a vocabulary's scores: what greedy and top-k sampling need of them."""

from tvm import tirx

from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, local, loop, parallel, select, when
from picompile_codegen.specs import TopLogitsSpec

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000


def top_logits(spec: TopLogitsSpec, function: KernelFunction) -> None:
    """Write the body of a `TopLogitsSpec`."""
    logits, scores, ids = function["logits"], function["scores"], function["ids"]
    with parallel(function.tokens(spec.rows), when_worth=spec.rows > 1) as row:
        kept = _Kept(scores, ids, row)
        with loop(0, spec.count) as token:
            kept.insert(bind(logits[row, token]), token, token)
        with loop(spec.count, spec.vocab) as token:
            value = bind(logits[row, token])
            # Of many thousands a few hundred are among the highest so far.
            with when(order_of(value) > order_of(bind(scores[row, spec.count - 1]))):
                kept.insert(value, token, spec.count - 1)


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
