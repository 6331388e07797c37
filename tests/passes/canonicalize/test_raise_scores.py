"""Attention that is written out as products and a softmax, and what is no attention of that form."""

from collections.abc import Callable

import pytest
import torch
from torch.fx import Node

from helpers.raising import HIDDEN, Write, aten, bounded, captured, linear, only, operators, raised
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.nodes import arguments
from picompile_passes.graph.operands import ATTENTION
from picompile_passes.passes.canonicalize.flatten_tokens import FlattenTokens
from picompile_passes.passes.canonicalize.raise_attention import RaiseAttention
from picompile_passes.passes.canonicalize.raise_scores import RaiseScores

HEADS, SIZE = 3, HIDDEN // 3
SDPA = aten.scaled_dot_product_attention.default

# write(builder, q · kᵀ) → the argument of the softmax; scores are [1, HEADS, T, T] or [HEADS, T, T].
Scores = Write


def _heads(b: GraphBuilder, x: Node, name: str, batched: bool) -> Node:
    y = linear(b, x, name)
    y = b.call(aten.unsqueeze.default, y, 0) if batched else y
    return b.call(aten.transpose.int, b.call(aten.unflatten.int, y, -1, [HEADS, SIZE]), -2, -3)


def _causal(b: GraphBuilder) -> Node:
    """True where a token is seen, [T, T]."""
    rows, columns = (b.call(aten.unsqueeze.default, b.positions, dim) for dim in (1, 0))
    return b.call(aten.le.Tensor, columns, rows)


def _plus_hidden(b: GraphBuilder, scores: Node, number: float, **options: object) -> Node:
    """Add 0, or minus a number where a token is hidden."""
    hidden = b.call(aten.sub.Tensor, b.call(aten._to_copy.default, _causal(b), dtype=torch.float32), 1.0)
    return b.call(aten.add.Tensor, scores, b.call(aten.mul.Tensor, hidden, number), **options)


def _added(b: GraphBuilder, scores: Node) -> Node:
    return _plus_hidden(b, scores, torch.finfo(torch.float32).max)


def _added_four_times(b: GraphBuilder, scores: Node) -> Node:
    """Four times a number that hides nothing by itself."""
    return _plus_hidden(b, scores, 4e8, alpha=4)


def _filled(b: GraphBuilder, scores: Node) -> Node:
    return b.call(aten.masked_fill.Scalar, scores, b.call(aten.logical_not.default, _causal(b)), float("-inf"))


def _chosen(b: GraphBuilder, scores: Node) -> Node:
    return b.call(aten.where.self, _causal(b), scores, b.constant("lowest", torch.tensor(-3e38)))


def _times(number: float, then: Scores) -> Scores:
    return lambda b, scores: then(b, b.call(aten.mul.Tensor, scores, number))


def _over(number: float, then: Scores) -> Scores:
    return lambda b, scores: then(b, b.call(aten.div.Tensor, scores, number))


def _attend(scores: Scores, *, batched: bool = True) -> Write:
    def write(b: GraphBuilder, x: Node) -> Node:
        # Masks are evaluated for as many tokens as a graph takes.
        bounded(b, 40)
        q, k, v = (_heads(b, x, name, batched) for name in "qkv")
        product = b.call(aten.matmul.default, q, b.call(aten.transpose.int, k, -1, -2))
        weights = b.call(aten.softmax.int, scores(b, product), -1)
        mixed = b.call(aten.transpose.int, b.call(aten.matmul.default, weights, v), -2, -3)
        merged = b.call(aten.flatten.using_ints, mixed, -2)
        merged = b.call(aten.squeeze.dim, merged, 0) if batched else merged
        return linear(b, merged, "o")

    return write


_FORMS: dict[str, tuple[Scores, float]] = {
    "added mask": (_times(0.25, _added), 0.25),
    "filled": (_over(8.0, _filled), 0.125),
    "chosen": (_times(0.3, _chosen), 0.3),
    # What is hidden stays hidden.
    "scaled after the mask": (lambda b, scores: b.call(aten.mul.Tensor, _filled(b, scores), 0.5), 0.5),
    "scaled before and after": (lambda b, scores: b.call(aten.mul.Tensor, _over(4.0, _added)(b, scores), 2.0), 0.5),
    "divided twice": (_over(2.0, _over(2.0, _added)), 0.25),
    "not scaled": (_added, 1.0),
    "added four times": (_times(0.25, _added_four_times), 0.25),
}


@pytest.mark.parametrize("form", _FORMS)
def test_scores_become_scaled_dot_product_attention(form: str) -> None:
    """And the rest of the pipeline takes it."""
    scores, scale = _FORMS[form]
    batched = list(_FORMS).index(form) % 2 == 0
    result = raised(captured(_attend(scores, batched=batched)), RaiseScores())
    assert only(result, SDPA).kwargs["scale"] == pytest.approx(scale, rel=1e-6)
    assert "softmax" not in operators(result)
    values = arguments(only(raised(result, RaiseAttention(), FlattenTokens()), ATTENTION))
    assert (values["heads"], values["kv_heads"], values["window"]) == (HEADS, HEADS, 0)
    assert values["scale"] == pytest.approx(scale, rel=1e-6)


def _by_baddbmm(factor: float, bias: Callable[[GraphBuilder], Node]) -> Write:
    """BLOOM's: a bias of each head beside the product, whose factors are options."""

    def write(b: GraphBuilder, x: Node) -> Node:
        q, k, v = (_heads(b, x, name, batched=False) for name in "qkv")
        kt = b.call(aten.transpose.int, k, -1, -2)
        product = b.call(aten.baddbmm.default, _square(b, bias(b)), q, kt, beta=1.0, alpha=factor)
        weights = b.call(aten.softmax.int, _filled(b, product), -1)
        mixed = b.call(aten.transpose.int, b.call(aten.bmm.default, weights, v), -2, -3)
        return linear(b, b.call(aten.flatten.using_ints, mixed, -2), "o")

    return write


def _square(b: GraphBuilder, bias: Node) -> Node:
    return b.call(aten.expand.default, bias, [HEADS, b.call(aten.sym_size.int, b.tokens, 0), -1])


def _slope_of_each_head(b: GraphBuilder) -> Node:
    return b.constant("slopes", torch.tensor([0.5, 0.25, 0.125]).view(HEADS, 1, 1))


def _slopes(b: GraphBuilder) -> Node:
    return b.call(aten.mul.Tensor, _slope_of_each_head(b), b.positions)


@pytest.mark.parametrize("bias", [_slopes, lambda b: b.call(aten.mul.Tensor, _slopes(b), 0.0)], ids=["slopes", "zeros"])
def test_a_product_with_a_bias(bias: Callable[[GraphBuilder], Node]) -> None:
    result = raised(captured(_by_baddbmm(0.25, bias)), RaiseScores())
    assert only(result, SDPA).kwargs["scale"] == pytest.approx(0.25)
    assert "baddbmm" not in operators(result)


def test_a_product_with_a_bias_of_the_tokens_stays() -> None:
    def of_tokens(b: GraphBuilder) -> Node:
        row = b.call(aten._to_copy.default, b.tokens, dtype=torch.float32)
        return b.call(aten.mul.Tensor, b.constant("slopes", torch.ones(HEADS, 1, 1)), row)

    assert not RaiseScores()(captured(_by_baddbmm(0.25, of_tokens))).modified


_OTHERS: dict[str, Scores] = {
    "squared": lambda b, scores: _added(b, b.call(aten.mul.Tensor, scores, scores)),
    "capped": lambda b, scores: _added(b, b.call(aten.mul.Tensor, b.call(aten.tanh.default, scores), 30.0)),
    "positive": lambda b, scores: _added(b, b.call(aten.relu.default, scores)),
    "scales of each head": lambda b, scores: _added(b, b.call(aten.mul.Tensor, scores, _slope_of_each_head(b))),
    "factors by distance": lambda b, scores: _added(
        b, b.call(aten.div.Tensor, scores, b.call(aten.add.Tensor, b.positions, 1.0))
    ),
    "all hidden": lambda b, scores: b.call(aten.add.Tensor, scores, -1e30),
    "times a weight": lambda b, scores: _added(b, b.call(aten.mul.Tensor, scores, b.parameter("temperature", 1))),
}


@pytest.mark.parametrize("scores", _OTHERS)
def test_what_is_not_linear_in_the_scores_stays(scores: str) -> None:
    assert not RaiseScores()(captured(_attend(_OTHERS[scores]))).modified


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
