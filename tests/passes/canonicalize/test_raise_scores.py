"""Attention that is written out as products and a softmax, and what is no attention of that form."""

from collections.abc import Callable

import pytest
import torch

from helpers.raising import HIDDEN, Builder, Value, Write, aten, only, operators, raised, stays
from picompile_passes.graph.nodes import arguments
from picompile_passes.graph.operands import ATTENTION
from picompile_passes.passes.canonicalize.flatten_tokens import FlattenTokens
from picompile_passes.passes.canonicalize.raise_attention import RaiseAttention
from picompile_passes.passes.canonicalize.raise_scores import RaiseScores

HEADS, SIZE = 3, HIDDEN // 3
SDPA = aten.scaled_dot_product_attention.default

# write(builder, q · kᵀ) → the argument of the softmax; scores are [1, HEADS, T, T] or [HEADS, T, T].
Scores = Write


def _heads(b: Builder, x: Value, name: str, batched: bool) -> Value:
    y = b.linear(x, name)
    y = y.unsqueeze(0) if batched else y
    return y.unflatten(-1, [HEADS, SIZE]).transpose(-2, -3)


def _causal(b: Builder) -> Value:
    """True where a token is seen, [T, T]."""
    rows, columns = (b.positions.unsqueeze(dim) for dim in (1, 0))
    return columns.le(rows)


def _plus_hidden(b: Builder, scores: Value, number: float, **options: object) -> Value:
    """Add 0, or minus a number where a token is hidden."""
    return scores.add((_causal(b)._to_copy(dtype=torch.float32) - 1.0) * number, **options)


def _added(b: Builder, scores: Value) -> Value:
    return _plus_hidden(b, scores, torch.finfo(torch.float32).max)


def _added_four_times(b: Builder, scores: Value) -> Value:
    """Four times a number that hides nothing by itself."""
    return _plus_hidden(b, scores, 4e8, alpha=4)


def _filled(b: Builder, scores: Value) -> Value:
    return scores.masked_fill(_causal(b).logical_not(), float("-inf"))


def _times(number: float, then: Scores) -> Scores:
    return lambda b, scores: then(b, scores * number)


def _over(number: float, then: Scores) -> Scores:
    return lambda b, scores: then(b, scores / number)


def _attend(scores: Scores, *, batched: bool = True) -> Write:
    def write(b: Builder, x: Value) -> Value:
        # Masks are evaluated for as many tokens as a graph takes.
        b.bounded(40)
        q, k, v = (_heads(b, x, name, batched) for name in "qkv")
        weights = scores(b, q @ k.transpose(-1, -2)).softmax(-1 if batched else 2)
        merged = (weights @ v).transpose(-2, -3).flatten(-2)
        merged = merged.squeeze(0) if batched else merged
        return b.linear(merged, "o")

    return write


_FORMS: dict[str, tuple[Scores, float]] = {
    "added mask": (_times(0.25, _added), 0.25),
    "filled": (_over(8.0, _filled), 0.125),
    "chosen": (_times(0.3, lambda b, scores: _causal(b).where(scores, b.constant("lowest", torch.tensor(-3e38)))), 0.3),
    # What is hidden stays hidden.
    "scaled after the mask": (lambda b, scores: _filled(b, scores) * 0.5, 0.5),
    "scaled before and after": (lambda b, scores: _over(4.0, _added)(b, scores) * 2.0, 0.5),
    "divided twice": (_over(2.0, _over(2.0, _added)), 0.25),
    "not scaled": (_added, 1.0),
    "added four times": (_times(0.25, _added_four_times), 0.25),
}


@pytest.mark.slow(
    "runs three passes per form; one of each kind is fast",
    but=("added mask", "filled", "chosen", "scaled after", "divided"),
)
@pytest.mark.parametrize("form", _FORMS)
def test_scores_become_scaled_dot_product_attention(form: str) -> None:
    """And the rest of the pipeline takes it."""
    scores, scale = _FORMS[form]
    batched = list(_FORMS).index(form) % 2 == 0
    result = raised(_attend(scores, batched=batched), RaiseScores())
    assert only(result, SDPA).kwargs["scale"] == pytest.approx(scale, rel=1e-6)
    assert "softmax" not in operators(result)
    values = arguments(only(raised(result, RaiseAttention(), FlattenTokens()), ATTENTION))
    assert (values["heads"], values["kv_heads"], values["window"]) == (HEADS, HEADS, 0)
    assert values["scale"] == pytest.approx(scale, rel=1e-6)


def _by_baddbmm(factor: float, bias: Callable[[Builder], Value]) -> Write:
    """BLOOM's: a bias of each head beside the product, whose factors are options."""

    def write(b: Builder, x: Value) -> Value:
        q, k, v = (_heads(b, x, name, batched=False) for name in "qkv")
        weights = _filled(b, _square(b, bias(b)).baddbmm(q, k.transpose(-1, -2), beta=1.0, alpha=factor)).softmax(-1)
        return b.linear(weights.bmm(v).transpose(-2, -3).flatten(-2), "o")

    return write


def _square(b: Builder, bias: Value) -> Value:
    return bias.expand([HEADS, b.tokens.sym_size(0), -1])


def _slope_of_each_head(b: Builder) -> Value:
    return b.constant("slopes", torch.tensor([0.5, 0.25, 0.125]).view(HEADS, 1, 1))


def _slopes(b: Builder) -> Value:
    return _slope_of_each_head(b) * b.positions


def _window(b: Builder) -> Value:
    """Hides what is 3 tokens or more away, [HEADS, T, T]."""
    rows, columns = (b.positions.unsqueeze(dim) for dim in (1, 0))
    hidden = (columns + 3).le(rows)._to_copy(dtype=torch.float32)
    return _slope_of_each_head(b) + hidden * torch.finfo(torch.float32).min


@pytest.mark.parametrize("bias", [_slopes, lambda b: _slopes(b) * 0.0, _window], ids=["slopes", "zeros", "window"])
def test_a_product_with_a_bias(bias: Callable[[Builder], Value]) -> None:
    result = raised(_by_baddbmm(0.25, bias), RaiseScores())
    assert only(result, SDPA).kwargs["scale"] == pytest.approx(0.25)
    assert "baddbmm" not in operators(result)


def test_a_product_with_a_bias_of_the_tokens_stays() -> None:
    def of_tokens(b: Builder) -> Value:
        return b.constant("slopes", torch.ones(HEADS, 1, 1)) * b.tokens._to_copy(dtype=torch.float32)

    assert stays(_by_baddbmm(0.25, of_tokens), RaiseScores())


_OTHERS: dict[str, Scores] = {
    "squared": lambda b, scores: _added(b, scores * scores),
    "capped": lambda b, scores: _added(b, scores.tanh() * 30.0),
    "capped far away": lambda b, scores: _added(b, (scores / 1000.0).tanh() * 1000.0),
    "cut off above": lambda b, scores: _added(b, scores.clamp(None, 50.0)),
    "cut off below": lambda b, scores: _added(b, scores.clamp(-50.0)),
    "rounded": lambda b, scores: _added(b, scores.round()),
    "positive": lambda b, scores: _added(b, scores.relu()),
    "scales of each head": lambda b, scores: _added(b, scores * _slope_of_each_head(b)),
    "factors by distance": lambda b, scores: _added(b, scores / (b.positions + 1.0)),
    "all hidden": lambda b, scores: scores + -1e30,
    "times a weight": lambda b, scores: _added(b, scores * b.parameter("temperature", 1)),
}


@pytest.mark.parametrize("scores", _OTHERS)
def test_what_is_not_linear_in_the_scores_stays(scores: str) -> None:
    assert stays(_attend(_OTHERS[scores]), RaiseScores())


def test_other_softmaxes_stay() -> None:
    def over_queries(b: Builder, x: Value) -> Value:
        q, k, v = (_heads(b, x, name, batched=False) for name in "qkv")
        return ((q @ k.transpose(-1, -2)).softmax(-2) @ v).transpose(0, 1).flatten(1)

    def of_one_head(b: Builder, x: Value) -> Value:
        """Reads the weights twice."""
        scores = _added(b, x.mm(x.t())).softmax(-1)
        return scores.mm(scores.mm(x))

    for write in (over_queries, lambda b, x: x.softmax(-1), of_one_head):
        assert stays(write, RaiseScores())
