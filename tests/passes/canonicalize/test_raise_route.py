"""Routers as models write them, and the rules that they are raised to."""

from collections.abc import Callable
from operator import getitem

import pytest
import torch

from helpers.raising import HIDDEN, Builder, Value, Write, aten, captured, only, operators, raised, refused
from picompile_passes.base import Stage
from picompile_passes.errors import VerifyError
from picompile_passes.graph.nodes import arguments
from picompile_passes.graph.operands import FFN, LINEAR, ROUTE
from picompile_passes.passes.canonicalize.captured_experts import EXPERT_GAINS
from picompile_passes.passes.canonicalize.raise_ffn import RaiseFFN
from picompile_passes.passes.canonicalize.raise_linear import RaiseLinear
from picompile_passes.passes.canonicalize.raise_route import RaiseRoute
from picompile_passes.verify import verify

EXPERTS, CHOSEN, NEURONS = 8, 3, 10

# From logits [T, EXPERTS] to the numbers and the weights of the chosen experts, [T, CHOSEN] each.
Router = Callable[[Builder, Value], tuple[Value, Value]]


def _best(b: Builder, values: Value, count: int = CHOSEN) -> tuple[Value, Value]:
    top = b.call(aten.topk.default, values, count)
    return b.call(getitem, top, 0), b.call(getitem, top, 1)


def _gains(router: Router) -> Write:
    def write(b: Builder, x: Value) -> Value:
        index, weights = router(b, b.linear(x, "router", EXPERTS))
        gains = b.call(EXPERT_GAINS, index, weights, EXPERTS)
        return b.call(LINEAR, gains, b.parameter("out", HIDDEN, EXPERTS), None)

    return write


def _softmax_then_best(b: Builder, logits: Value) -> tuple[Value, Value]:
    weights, index = _best(b, logits.softmax(-1))
    return index, weights


def _normalized(b: Builder, logits: Value) -> tuple[Value, Value]:
    weights, index = _best(b, logits.softmax(-1))
    return index, weights / weights.sum([-1], True)


def _best_then_softmax(b: Builder, logits: Value) -> tuple[Value, Value]:
    weights, index = _best(b, logits)
    return index, weights.softmax(-1)


def _deepseek_v3(b: Builder, logits: Value) -> tuple[Value, Value]:
    scores = logits.sigmoid()
    choice = scores + b.parameter("correction", EXPERTS)
    grouped = choice.view([-1, 4, EXPERTS // 4])
    pairs, _ = _best(b, grouped, 2)
    _, groups = _best(b, pairs.sum([-1]), 2)
    kept = b.call(aten.scatter.value, pairs.sum([-1]) * 0.0, 1, groups, 1.0)
    mask = kept.unsqueeze(-1).expand([-1, 4, EXPERTS // 4]).reshape([-1, EXPERTS])
    choice = b.call(aten.masked_fill.Scalar, choice, mask.eq(0.0), float("-inf"))
    _, index = _best(b, choice)
    weights = scores.gather(1, index)
    return index, weights / (weights.sum([-1], True) + 1e-20) * 2.5


def _scaled_experts(b: Builder, logits: Value) -> tuple[Value, Value]:
    weights, index = _best(b, logits.softmax(-1))
    scale = b.parameter("per_expert_scale", EXPERTS)
    return index, weights / weights.sum([-1], True) * b.call(aten.index.Tensor, scale, [index])


def _square_roots(b: Builder, logits: Value) -> tuple[Value, Value]:
    weights, index = _best(b, logits.softplus().sqrt())
    return index, weights / weights.sum([-1], True) * 1.5


def _chosen_by_biased_logits(b: Builder, logits: Value) -> tuple[Value, Value]:
    _, index = _best(b, logits + b.parameter("correction", EXPERTS))
    return index, logits.gather(1, index).sigmoid()


def _sigmoids_of_the_best(b: Builder, logits: Value) -> tuple[Value, Value]:
    weights, index = _best(b, logits)
    weights = weights.sigmoid()
    return index, weights / weights.sum([-1], True)


def _best_sigmoids(b: Builder, logits: Value) -> tuple[Value, Value]:
    weights, index = _best(b, logits.sigmoid())
    return index, weights / weights.sum([-1], True)


def _sparse_mixer(b: Builder, logits: Value) -> tuple[Value, Value]:
    """As PhiMoE has it, for two experts."""
    index, weights, left = [], [], logits
    for _ in range(2):
        top = b.call(aten.max.dim, left, -1, True)
        best, expert = b.call(getitem, top, 0), b.call(getitem, top, 1)
        factor = b.call(aten.clamp.Tensor, logits.abs(), best)
        far = b.call(aten.gt.Scalar, (best - logits) / factor, 0.3)
        weights.append(b.call(aten.masked_fill.Scalar, left, far, float("-inf")).softmax(-1).gather(-1, expert))
        index.append(expert)
        left = b.call(aten.scatter.value, logits, -1, expert, float("-inf"))
    return b.aten("cat", index, -1), b.aten("cat", weights, -1)


_RULES: dict[str, tuple[Router, dict[str, object]]] = {
    "softmax": (_softmax_then_best, {"scores": "softmax", "normalized": "none"}),
    # The softmax of all, over the sum of the chosen, is the softmax of the chosen.
    "normalized": (_normalized, {"scores": "identity", "normalized": "softmax"}),
    "after": (_best_then_softmax, {"scores": "identity", "normalized": "softmax"}),
    "groups": (
        _deepseek_v3,
        {"scores": "sigmoid", "normalized": "sum", "scale": 2.5, "eps": 1e-20, "groups": 4, "chosen_groups": 2}
        | {"group_score": "top2"},
    ),
    "biased": (_chosen_by_biased_logits, {"scores": "identity", "normalized": "sigmoid"}),
    # The gains are equal but where sigmoids are.
    "sigmoids of the best": (_sigmoids_of_the_best, {"scores": "identity", "normalized": "sigmoid_sum"}),
    "best sigmoids": (_best_sigmoids, {"scores": "sigmoid", "normalized": "sum"}),
    "scaled": (_scaled_experts, {"scores": "identity", "normalized": "softmax"}),
    "drawn": (_sparse_mixer, {"chosen": 2, "scores": "identity", "normalized": "sparse_mixer", "eps": 0.3}),
    "roots": (_square_roots, {"scores": "sqrt_softplus", "normalized": "sum", "scale": 1.5}),
}


@pytest.mark.parametrize("name", list(_RULES))
def test_a_router_is_raised_to_its_rule(name: str) -> None:
    router, expected = _RULES[name]
    result = raised(_gains(router), RaiseRoute())
    values = arguments(only(result, ROUTE))
    assert operators(result) == {"linear": 2, "route": 1}
    assert {key: values[key] for key in ("chosen", *expected)} == ({"chosen": CHOSEN} | expected)
    assert (values["bias"] is not None) == (name in ("groups", "biased"))
    assert (values["expert_scale"] is not None) == (name == "scaled")


def test_the_gain_of_one_expert_is_no_quotient_of_logits() -> None:
    """A logit of 0 over itself is no number."""

    def best(b: Builder, logits: Value) -> tuple[Value, Value]:
        weights, index = _best(b, logits.softmax(-1), 1)
        return index, weights / weights.sum([-1], True)

    values = arguments(only(raised(_gains(best), RaiseRoute()), ROUTE))
    assert (values["chosen"], values["scores"], values["normalized"]) == (1, "identity", "softmax")


def test_arithmetic_ahead_of_the_logits_stays() -> None:
    result = raised(_gains(lambda b, logits: _best_then_softmax(b, logits.tanh())), RaiseRoute())
    assert operators(result) == {"linear": 2, "tanh": 1, "route": 1}


def test_an_unknown_rule_is_refused() -> None:
    def cubes(b: Builder, logits: Value) -> tuple[Value, Value]:
        weights, index = _best(b, logits)
        return index, weights * weights * weights

    refused(_gains(cubes), RaiseRoute(), "chooses experts by no rule that is known")


@pytest.mark.parametrize("given", ["bias", "groups"])
def test_experts_are_drawn_by_their_scores_alone(given: str) -> None:
    def write(b: Builder, x: Value) -> Value:
        bias = b.parameter("bias", EXPERTS) if given == "bias" else None
        groups = (4, 2, "max") if given == "groups" else (1, 1, "max")
        logits = b.linear(x, "router", EXPERTS)
        gains = b.call(ROUTE, logits, bias, None, CHOSEN, "identity", "sparse_mixer", 1.0, 0.02, *groups)
        return b.call(LINEAR, gains, b.parameter("out", HIDDEN, EXPERTS), None)

    with pytest.raises(VerifyError, match="draws experts by other numbers than their scores"):
        verify(captured(write), Stage.CANONICAL)


def _mixture(*, bias: bool = False, shared: bool = False, transposed: bool = False) -> Write:
    """Experts as the frontend writes them."""

    def write(b: Builder, x: Value) -> Value:
        index, weights = _best_then_softmax(b, b.linear(x, "router", EXPERTS))
        gains = b.call(EXPERT_GAINS, index, weights, EXPERTS)
        rows = b.parameter("gate_up", EXPERTS, 2 * NEURONS, HIDDEN).reshape([EXPERTS * 2 * NEURONS, HIDDEN])
        both_bias = b.parameter("gate_up_bias", EXPERTS * 2 * NEURONS) if bias else None
        both = b.call(aten.linear.default, x, rows, both_bias).reshape([-1, EXPERTS, 2 * NEURONS])
        gate, up = both.slice(-1, 0, NEURONS), both.slice(-1, NEURONS, 2 * NEURONS)
        hidden = (gate.silu() * up * gains.unsqueeze(-1)).reshape([-1, EXPERTS * NEURONS])
        if transposed:
            down = b.parameter("down", EXPERTS, NEURONS, HIDDEN).reshape([EXPERTS * NEURONS, HIDDEN]).t()
        else:
            down = b.parameter("down", EXPERTS, HIDDEN, NEURONS).transpose(0, 1).reshape([HIDDEN, EXPERTS * NEURONS])
        y = b.call(aten.linear.default, hidden, down)
        if bias:
            y = y + gains @ b.parameter("down_bias", EXPERTS, HIDDEN)
        if shared:
            y = y + b.linear(b.linear(x, "shared_up", 12).relu(), "shared_down")
        return y

    return write


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_experts_are_one_block(bias: bool, transposed: bool) -> None:
    result = raised(_mixture(bias=bias, transposed=transposed), RaiseLinear(), RaiseRoute(), RaiseFFN())
    values = arguments(only(result, FFN))
    assert values["gains"] is only(result, ROUTE)
    assert tuple(values["up"].meta["val"].shape) == (EXPERTS * NEURONS, HIDDEN)
    assert (values["expert_bias"] is not None) == bias
    made_of = {torch.ops.aten.reshape.default} | ({torch.ops.aten.transpose.int} if not transposed else set())
    down = values["down"]
    seen = set()
    while down.op == "call_function":
        seen.add(down.target)
        (down,) = down.all_input_nodes
    assert seen == made_of


def test_other_blocks_beside_experts_stay_linears() -> None:
    result = raised(_mixture(shared=True), RaiseLinear(), RaiseRoute(), RaiseFFN())
    assert arguments(only(result, FFN))["gains"] is not None
    assert operators(result)["relu"] == 1
