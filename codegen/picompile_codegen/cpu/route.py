"""A router's choice of experts, token by token.

Scores are computed eight at a time and kept on the stack of a task, 512 at most in the models that there are. Experts
are compared by integers in the order of their scores, so that one that is taken, or not a number, has a place as well.
"""

from collections.abc import Callable

from tvm import tirx

from picompile_codegen.backend import body
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, local, loop, maximum, parallel, select, when
from picompile_codegen.cpu.token_ops import INFINITY, MAGNITUDE, order_of
from picompile_codegen.cpu.vector import (
    LANES,
    at,
    blocks,
    exp_of_negative,
    highest,
    load,
    sigmoid,
    softplus,
    splat,
    splat_int,
    store,
    total,
    whole_vectors,
    zero_vector,
)
from picompile_codegen.specs.route import RouteSpec

# Orders of float32 numbers (`order_of`) that no number has: below that of minus infinity.
_TAKEN = -(2**31)
_LOWEST = -3.4e38


@body(RouteSpec)
def route(spec: RouteSpec, function: KernelFunction) -> None:
    """Write the body of a `RouteSpec`."""
    logits, gains, scales = function["logits"], function["gains"], function.get("expert_scale")
    with parallel(function.tokens(spec.rows), when_worth=spec.rows > 1) as t:
        scores = _scores(spec, logits, t)
        choice = scores if function.get("bias") is None else _biased(spec, scores, function["bias"])
        orders = _orders(choice, spec.experts)
        if spec.chosen_groups < spec.groups:
            _drop_groups(spec, choice, orders)
        chosen, weights = local(spec.chosen, dtype="int32"), local(whole_vectors(spec.chosen))
        with loop(0, spec.chosen) as i:
            chosen[i] = _take_best(orders)
            weights[i] = scores[chosen[i]]
            if spec.normalized == "sparse_mixer":
                weights[i] = _share_of_drawn(spec, scores, orders, bind(weights[i]))
        _normalize(spec, weights)
        blocks(spec.experts, lambda c, valid: store(gains, t, c, value=splat(0.0), valid=valid))
        with loop(0, spec.chosen) as i:
            gain = bind(weights[i] * tirx.FloatImm("float32", spec.scale))
            gains[t, chosen[i]] = gain if scales is None else gain * scales[chosen[i]]


def _scores(spec: RouteSpec, logits: KernelTensor, t: Expr) -> KernelTensor:
    """Return the scores of the experts of token t; the last vector's other lanes are of no expert."""
    scores = local(whole_vectors(spec.experts))
    if spec.scores == "softmax":
        blocks(spec.experts, lambda c, valid: _put(scores, c, load(logits, t, c, valid=valid, fill=_LOWEST)))
        _softmax(scores)
        return scores
    function = _SCORES[spec.scores]
    blocks(spec.experts, lambda c, valid: _put(scores, c, function(bind(load(logits, t, c, valid=valid)))))
    return scores


def _put(vector: KernelTensor, c: Expr, value: Expr) -> None:
    vector[at(c)] = value


def _softmax(values: KernelTensor) -> None:
    """Divide e^x of all elements, whole vectors, by their sum."""
    top, sums = local(LANES), zero_vector()
    top[at(0)] = splat(_LOWEST)
    width = values.columns
    blocks(width, lambda c, _: _put(top, 0, maximum(top[at(0)], values[at(c)])))
    most = bind(splat(highest(top[at(0)])))

    def add(c: Expr, _: int) -> None:
        x = bind(values[at(c)])
        values[at(c)] = _or_nan(x, exp_of_negative(x - most))
        sums[at(0)] = sums[at(0)] + values[at(c)]

    blocks(width, add)
    whole = bind(splat(total(sums[at(0)])))
    blocks(width, lambda c, _: _put(values, c, values[at(c)] / whole))


def _or_nan(x: Expr, value: Expr) -> Expr:
    """Return `value`, or x where x is not a number: the functions of `vector.py` have some number for it."""
    magnitude = tirx.reinterpret(f"int32x{LANES}", x) & splat_int(MAGNITUDE)
    return bind(select(magnitude > splat_int(INFINITY), x, value))


_SCORES: dict[str, Callable[[Expr], Expr]] = {
    "identity": lambda x: x,
    "sigmoid": lambda x: _or_nan(x, sigmoid(x)),
    "sqrt_softplus": lambda x: _or_nan(x, tirx.sqrt(softplus(x))),
}


def _biased(spec: RouteSpec, scores: KernelTensor, bias: KernelTensor) -> KernelTensor:
    """Return what experts are chosen by: their scores, each plus its bias."""
    choice = local(scores.columns)
    blocks(spec.experts, lambda c, valid: _put(choice, c, scores[at(c)] + load(bias, c, valid=valid)))
    return choice


def _orders(choice: KernelTensor, count: int) -> KernelTensor:
    """Return the order of each of `count` numbers, int32; what follows them is taken."""
    orders = local(choice.columns, dtype="int32")
    blocks(count, lambda c, valid: _put(orders, c, order_of(choice[at(c)], lanes=LANES)))
    for place in range(count, choice.columns):
        orders[place] = tirx.IntImm("int32", _TAKEN)
    return orders


def _take_best(orders: KernelTensor) -> Expr:
    """Return the place of the highest order, the first of equal ones, and mark it as taken."""
    width = orders.columns
    top, found = local(LANES, dtype="int32"), local(LANES, dtype="int32")
    top[at(0)], found[at(0)] = splat_int(_TAKEN), splat_int(0)
    blocks(width, lambda c, _: _put(top, 0, maximum(top[at(0)], orders[at(c)])))
    best = bind(tirx.Broadcast(highest(top[at(0)]), LANES))

    def find(c: Expr, _: int) -> None:
        # The first place is the one with most behind it.
        behind = select(orders[at(c)] == best, tirx.Ramp(width - c, -1, LANES), splat_int(0))
        found[at(0)] = maximum(found[at(0)], behind)

    blocks(width, find)
    place = bind(width - highest(found[at(0)]))
    orders[place] = tirx.IntImm("int32", _TAKEN)
    return place


def _share_of_drawn(spec: RouteSpec, scores: KernelTensor, orders: KernelTensor, best: Expr) -> Expr:
    """Return the softmax of the score `best`, which has just been taken, over those that are left and near it."""
    sums, top = zero_vector(), bind(splat(best))

    def add(c: Expr, _: int) -> None:
        score = bind(scores[at(c)])
        below = bind(top - score)
        # No comparison that is true of NaN: what is no number counts, and shows.
        is_far = below / maximum(tirx.abs(score), top) > splat(spec.eps)
        value = select(is_far, splat(0.0), _or_nan(below, exp_of_negative(-below)))
        sums[at(0)] = sums[at(0)] + select(orders[at(c)] == splat_int(_TAKEN), splat(0.0), value)

    blocks(scores.columns, add)
    # Its own exponential is 1, or NaN where it is no finite number.
    return bind(1.0 / (total(sums[at(0)]) + (best - best) + tirx.FloatImm("float32", 1.0)))


def _drop_groups(spec: RouteSpec, choice: KernelTensor, orders: KernelTensor) -> None:
    """Put the experts of all but the best groups behind all others."""
    size = spec.experts // spec.groups
    # Two of each group: its best expert, and its second best.
    best, order = local(2), local(2, dtype="int32")
    groups = local(whole_vectors(spec.groups))
    with loop(0, spec.groups) as group:
        for i in range(2):
            best[i], order[i] = 0.0, tirx.IntImm("int32", _TAKEN)
        with loop(group * size, (group + 1) * size) as expert:
            value, its_order = bind(choice[expert]), bind(orders[expert])
            with when(its_order > order[1]):
                is_best = bind(its_order > order[0])
                best[1], order[1] = select(is_best, best[0], value), select(is_best, order[0], its_order)
                best[0], order[0] = select(is_best, value, best[0]), select(is_best, its_order, order[0])
        groups[group] = best[0] if spec.group_score == "max" else best[0] + best[1]
    left = _orders(groups, spec.groups)
    with loop(0, spec.chosen_groups):
        _take_best(left)
    with loop(0, spec.experts) as expert, when(left[expert // size] != tirx.IntImm("int32", _TAKEN)):
        orders[expert] = tirx.IntImm("int32", -INFINITY)


def _normalize(spec: RouteSpec, weights: KernelTensor) -> None:
    """Normalize the scores of the chosen experts, the first elements of `weights`."""
    if spec.normalized in ("none", "sparse_mixer"):
        return
    if spec.normalized in ("sigmoid", "sigmoid_sum"):
        blocks(spec.chosen, lambda c, _: _put(weights, c, _SCORES["sigmoid"](bind(weights[at(c)]))))
    if spec.normalized == "sigmoid":
        return
    is_softmax = spec.normalized == "softmax"
    for place in range(spec.chosen, weights.columns):
        weights[place] = _LOWEST if is_softmax else 0.0
    if is_softmax:
        _softmax(weights)
        return
    sums = zero_vector()
    blocks(weights.columns, lambda c, _: _put(sums, 0, sums[at(0)] + weights[at(c)]))
    whole = bind(splat(total(sums[at(0)]) + tirx.FloatImm("float32", spec.eps)))
    blocks(weights.columns, lambda c, _: _put(weights, c, weights[at(c)] / whole))
