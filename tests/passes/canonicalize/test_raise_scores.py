"""Attention that is written out as products and a softmax, and what is no attention of that form."""

from collections.abc import Callable

import pytest
import torch
from torch.fx import Node

from helpers.raising import HIDDEN, aten, captured, only, operators, raised
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.nodes import arguments
from picompile_passes.graph.operands import ATTENTION, LINEAR
from picompile_passes.graph.values import fake_mode_of
from picompile_passes.passes.canonicalize.flatten_tokens import FlattenTokens
from picompile_passes.passes.canonicalize.raise_attention import RaiseAttention
from picompile_passes.passes.canonicalize.raise_scores import RaiseScores

HEADS, SIZE = 3, HIDDEN // 3
SDPA = aten.scaled_dot_product_attention.default

# write(builder, q · kᵀ) → the argument of the softmax; scores are [1, HEADS, T, T] or [HEADS, T, T].
Scores = Callable[[GraphBuilder, Node], Node]


def _heads(b: GraphBuilder, x: Node, name: str, batched: bool) -> Node:
    y = b.call(LINEAR, x, b.parameter(name, HIDDEN, HIDDEN), None)
    y = b.call(aten.unsqueeze.default, y, 0) if batched else y
    parts = b.call(aten.unflatten.int, y, -1, [HEADS, SIZE])
    return b.call(aten.transpose.int, parts, -2, -3)


def _causal(b: GraphBuilder) -> Node:
    """True where a token is seen, [T, T]."""
    rows, columns = (b.call(aten.unsqueeze.default, b.positions, dim) for dim in (1, 0))
    return b.call(aten.le.Tensor, columns, rows)


def _added(b: GraphBuilder, scores: Node) -> Node:
    """Adds 0 or the lowest number to each score."""
    hidden = b.call(aten.sub.Tensor, b.call(aten._to_copy.default, _causal(b), dtype=torch.float32), 1.0)
    lowest = b.call(aten.mul.Tensor, hidden, torch.finfo(torch.float32).max)
    return b.call(aten.add.Tensor, scores, lowest)


def _added_four_times(b: GraphBuilder, scores: Node) -> Node:
    """Adds 0 or four times a number that hides nothing by itself."""
    hidden = b.call(aten.sub.Tensor, b.call(aten._to_copy.default, _causal(b), dtype=torch.float32), 1.0)
    return b.call(aten.add.Tensor, scores, b.call(aten.mul.Tensor, hidden, 4e8), alpha=4)


def _filled(b: GraphBuilder, scores: Node) -> Node:
    return b.call(aten.masked_fill.Scalar, scores, b.call(aten.logical_not.default, _causal(b)), float("-inf"))


def _chosen(b: GraphBuilder, scores: Node) -> Node:
    return b.call(aten.where.self, _causal(b), scores, b.constant("lowest", torch.tensor(-3e38)))


def _times(number: float, then: Scores) -> Scores:
    return lambda b, scores: then(b, b.call(aten.mul.Tensor, scores, number))


def _over(number: float, then: Scores) -> Scores:
    return lambda b, scores: then(b, b.call(aten.div.Tensor, scores, number))


def _scaled_late(b: GraphBuilder, scores: Node) -> Node:
    """Scales after the mask, which stays hidden."""
    return b.call(aten.mul.Tensor, _filled(b, scores), 0.5)


def _twice(b: GraphBuilder, scores: Node) -> Node:
    return b.call(aten.mul.Tensor, _added(b, b.call(aten.div.Tensor, scores, 4.0)), 2.0)


def _attend(scores: Scores, *, batched: bool = True, dropout: bool = False) -> Callable[[GraphBuilder, Node], Node]:
    def write(b: GraphBuilder, x: Node) -> Node:
        # Masks are evaluated for as many tokens as a graph takes.
        with fake_mode_of(b.graph):
            torch._check(b.tokens.meta["val"].shape[0] <= 40)
        q, k, v = (_heads(b, x, name, batched) for name in "qkv")
        product = b.call(aten.matmul.default, q, b.call(aten.transpose.int, k, -1, -2))
        weights = b.call(aten.softmax.int, scores(b, product), -1)
        weights = b.call(aten.dropout.default, weights, 0.1, False) if dropout else weights
        mixed = b.call(aten.transpose.int, b.call(aten.matmul.default, weights, v), -2, -3)
        merged = b.call(aten.flatten.using_ints, mixed, -2)
        merged = b.call(aten.squeeze.dim, merged, 0) if batched else merged
        return b.call(LINEAR, merged, b.parameter("o", HIDDEN, HIDDEN), None)

    return write


_FORMS: dict[str, tuple[Scores, float]] = {
    "added mask": (_times(0.25, _added), 0.25),
    "filled": (_over(8.0, _filled), 0.125),
    "chosen": (_times(0.3, _chosen), 0.3),
    "scaled after the mask": (_scaled_late, 0.5),
    "scaled before and after": (_twice, 0.5),
    "divided twice": (_over(2.0, _over(2.0, _added)), 0.25),
    "not scaled": (_added, 1.0),
    "added four times": (_times(0.25, _added_four_times), 0.25),
}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("form", _FORMS)
def test_scores_become_scaled_dot_product_attention(form: str, batched: bool) -> None:
    scores, scale = _FORMS[form]
    result = raised(captured(_attend(scores, batched=batched)), RaiseScores())
    attended = only(result, SDPA)
    assert attended.kwargs["scale"] == pytest.approx(scale, rel=1e-6)
    assert "softmax" not in operators(result)


@pytest.mark.parametrize("form", _FORMS)
def test_the_rest_of_the_pipeline_takes_it(form: str) -> None:
    scores, scale = _FORMS[form]
    result = raised(captured(_attend(scores)), RaiseScores(), RaiseAttention(), FlattenTokens())
    values = arguments(only(result, ATTENTION))
    assert (values["heads"], values["kv_heads"], values["window"]) == (HEADS, HEADS, 0)
    assert values["scale"] == pytest.approx(scale, rel=1e-6)


def _by_baddbmm(factor: float, bias: Callable[[GraphBuilder], Node]) -> Callable[[GraphBuilder, Node], Node]:
    """BLOOM's: a bias of each head beside the product, whose factors are options."""

    def write(b: GraphBuilder, x: Node) -> Node:
        q, k, v = (_heads(b, x, name, batched=False) for name in "qkv")
        kt = b.call(aten.transpose.int, k, -1, -2)
        product = b.call(aten.baddbmm.default, _square(b, bias(b)), q, kt, beta=1.0, alpha=factor)
        weights = b.call(aten.softmax.int, _filled(b, product), -1)
        mixed = b.call(aten.transpose.int, b.call(aten.bmm.default, weights, v), -2, -3)
        return b.call(LINEAR, b.call(aten.flatten.using_ints, mixed, -2), b.parameter("o", HIDDEN, HIDDEN), None)

    return write


def _square(b: GraphBuilder, bias: Node) -> Node:
    return b.call(aten.expand.default, bias, [HEADS, b.call(aten.sym_size.int, b.tokens, 0), -1])


def _slopes(b: GraphBuilder) -> Node:
    slopes = b.constant("slopes", torch.tensor([0.5, 0.25, 0.125]).view(HEADS, 1, 1))
    return b.call(aten.mul.Tensor, slopes, b.positions)


def _zeros(b: GraphBuilder) -> Node:
    return b.call(aten.mul.Tensor, _slopes(b), 0.0)


@pytest.mark.parametrize("bias", [_slopes, _zeros])
def test_a_product_with_a_bias(bias: Callable[[GraphBuilder], Node]) -> None:
    result = raised(captured(_by_baddbmm(0.25, bias)), RaiseScores())
    assert only(result, SDPA).kwargs["scale"] == pytest.approx(0.25)
    assert "baddbmm" not in operators(result)


def test_a_product_with_a_bias_of_the_tokens_stays() -> None:
    def of_tokens(b: GraphBuilder) -> Node:
        row = b.call(aten._to_copy.default, b.tokens, dtype=torch.float32)
        return b.call(aten.mul.Tensor, b.constant("slopes", torch.ones(HEADS, 1, 1)), row)

    assert not RaiseScores()(captured(_by_baddbmm(0.25, of_tokens))).modified


def _squared(b: GraphBuilder, scores: Node) -> Node:
    return _added(b, b.call(aten.mul.Tensor, scores, scores))


def _capped(b: GraphBuilder, scores: Node) -> Node:
    return _added(b, b.call(aten.mul.Tensor, b.call(aten.tanh.default, scores), 30.0))


def _positive(b: GraphBuilder, scores: Node) -> Node:
    return _added(b, b.call(aten.relu.default, scores))


def _by_head(b: GraphBuilder, scores: Node) -> Node:
    """Heads with scales of their own."""
    factors = b.constant("factors", torch.tensor([0.5, 0.25, 0.125]).view(HEADS, 1, 1))
    return _added(b, b.call(aten.mul.Tensor, scores, factors))


def _falling(b: GraphBuilder, scores: Node) -> Node:
    """A factor for each distance."""
    distance = b.call(aten.unsqueeze.default, b.call(aten.add.Tensor, b.positions, 1.0), 0)
    return _added(b, b.call(aten.div.Tensor, scores, distance))


def _all_hidden(b: GraphBuilder, scores: Node) -> Node:
    return b.call(aten.add.Tensor, scores, float("-1e30"))


def _of_a_weight(b: GraphBuilder, scores: Node) -> Node:
    return _added(b, b.call(aten.mul.Tensor, scores, b.parameter("temperature", 1)))


@pytest.mark.parametrize(
    "scores", [_squared, _capped, _positive, _by_head, _falling, _all_hidden, _of_a_weight], ids=lambda s: s.__name__
)
def test_what_is_not_linear_in_the_scores_stays(scores: Scores) -> None:
    assert not RaiseScores()(captured(_attend(scores))).modified


def test_other_softmaxes_stay() -> None:
    def over_queries(b: GraphBuilder, x: Node) -> Node:
        q, k, v = (_heads(b, x, name, batched=False) for name in "qkv")
        product = b.call(aten.matmul.default, q, b.call(aten.transpose.int, k, -1, -2))
        mixed = b.call(aten.matmul.default, b.call(aten.softmax.int, product, -2), v)
        return b.call(aten.flatten.using_ints, b.call(aten.transpose.int, mixed, 0, 1), 1)

    def of_features(b: GraphBuilder, x: Node) -> Node:
        return b.call(aten.softmax.int, x, -1)

    def of_one_head(b: GraphBuilder, x: Node) -> Node:
        """Reads the weights twice."""
        scores = b.call(aten.softmax.int, _added(b, b.call(aten.mm.default, x, b.call(aten.t.default, x))), -1)
        return b.call(aten.mm.default, scores, b.call(aten.mm.default, scores, x))

    for write in (over_queries, of_features, of_one_head):
        assert not RaiseScores()(captured(write)).modified
