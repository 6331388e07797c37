from collections.abc import Callable

import pytest
from torch.fx import Node

from helpers.raising import HIDDEN, aten, captured, only, operators, raised
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.nodes import arguments
from picompile_passes.graph.operands import EMBEDDING, LAYER_NORM, RMS_NORM
from picompile_passes.passes.canonicalize.raise_norms import RaiseNorms

EPS = 1e-3
HEADS = 3


def _square(kind: str, b: GraphBuilder, x: Node) -> Node:
    if kind == "pow":
        return b.call(aten.pow.Tensor_Scalar, x, 2)
    return b.call(aten.mul.Tensor, x, x) if kind == "mul" else b.call(aten.square.default, x)


def _mean_square(b: GraphBuilder, x: Node, kind: str = "pow") -> Node:
    return b.call(aten.add.Tensor, b.call(aten.mean.dim, _square(kind, b, x), [-1], True), EPS)


def _by_rsqrt(b: GraphBuilder, x: Node, kind: str = "pow") -> Node:
    return b.call(aten.mul.Tensor, x, b.call(aten.rsqrt.default, _mean_square(b, x, kind)))


def _by_sqrt(b: GraphBuilder, x: Node) -> Node:
    return b.call(aten.div.Tensor, x, b.call(aten.sqrt.default, _mean_square(b, x)))


def _by_reciprocal(b: GraphBuilder, x: Node) -> Node:
    root = b.call(aten.sqrt.default, _mean_square(b, x))
    return b.call(aten.mul.Tensor, b.call(aten.reciprocal.default, root), x)


def _by_reciprocal_times_one(b: GraphBuilder, x: Node) -> Node:
    """Build the nodes that export makes of x · (1.0 / sqrt(…))."""
    inverse = b.call(aten.reciprocal.default, b.call(aten.sqrt.default, _mean_square(b, x)))
    return b.call(aten.mul.Tensor, x, b.call(aten.mul.Tensor, inverse, 1.0))


def _by_powers(b: GraphBuilder, x: Node) -> Node:
    return b.call(aten.mul.Tensor, x, b.call(aten.pow.Tensor_Scalar, _mean_square(b, x), -0.5))


def _by_root_power(b: GraphBuilder, x: Node) -> Node:
    return b.call(aten.div.Tensor, x, b.call(aten.pow.Tensor_Scalar, _mean_square(b, x), 0.5))


def _by_sum(b: GraphBuilder, x: Node) -> Node:
    mean = b.call(aten.div.Tensor, b.call(aten.sum.dim_IntList, _square("pow", b, x), [-1], True), HIDDEN)
    return b.call(aten.mul.Tensor, x, b.call(aten.rsqrt.default, b.call(aten.add.Tensor, mean, EPS)))


def _by_unsqueezed_mean(b: GraphBuilder, x: Node) -> Node:
    mean = b.call(aten.unsqueeze.default, b.call(aten.mean.dim, _square("pow", b, x), [-1]), -1)
    return b.call(aten.mul.Tensor, x, b.call(aten.rsqrt.default, b.call(aten.add.Tensor, mean, EPS)))


@pytest.mark.parametrize("kind", ["pow", "mul", "square"])
@pytest.mark.parametrize("weight_first", [False, True])
def test_root_mean_square(kind: str, weight_first: bool) -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        factors = [_by_rsqrt(b, x, kind), b.parameter("norm.weight", HIDDEN)]
        return b.call(aten.mul.Tensor, *(factors[::-1] if weight_first else factors))

    result = raised(captured(write), RaiseNorms())
    assert operators(result) == {"rms_norm": 1}
    _, weight, eps = only(result, RMS_NORM).args
    assert (weight.target, eps) == ("norm.weight", EPS)


_WRITINGS = (
    _by_sqrt,
    _by_reciprocal,
    _by_reciprocal_times_one,
    _by_powers,
    _by_root_power,
    _by_sum,
    _by_unsqueezed_mean,
)


@pytest.mark.parametrize("normed", _WRITINGS)
def test_root_mean_square_written_in_other_ways(normed: Callable[[GraphBuilder, Node], Node]) -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        return b.call(aten.mul.Tensor, normed(b, x), b.parameter("norm.weight", HIDDEN))

    assert operators(raised(captured(write), RaiseNorms())) == {"rms_norm": 1}


def _weight_then_inverse(b: GraphBuilder, x: Node, weight: Node) -> Node:
    return b.call(aten.mul.Tensor, b.call(aten.mul.Tensor, x, weight), b.call(aten.rsqrt.default, _mean_square(b, x)))


def _weighted_inverse(b: GraphBuilder, x: Node, weight: Node) -> Node:
    return b.call(aten.mul.Tensor, x, b.call(aten.mul.Tensor, b.call(aten.rsqrt.default, _mean_square(b, x)), weight))


def _weight_then_division(b: GraphBuilder, x: Node, weight: Node) -> Node:
    return b.call(aten.div.Tensor, b.call(aten.mul.Tensor, weight, x), b.call(aten.sqrt.default, _mean_square(b, x)))


def _weight_over_root(b: GraphBuilder, x: Node, weight: Node) -> Node:
    return b.call(aten.mul.Tensor, b.call(aten.div.Tensor, weight, b.call(aten.sqrt.default, _mean_square(b, x))), x)


@pytest.mark.parametrize("write", [_weight_then_inverse, _weighted_inverse, _weight_then_division, _weight_over_root])
def test_products_in_any_order(write: Callable[[GraphBuilder, Node, Node], Node]) -> None:
    result = raised(captured(lambda b, x: write(b, x, b.parameter("norm.weight", HIDDEN))), RaiseNorms())
    assert operators(result) == {"rms_norm": 1}
    assert only(result, RMS_NORM).args[1].target == "norm.weight"


def test_root_mean_square_without_weight() -> None:
    result = raised(captured(_by_rsqrt), RaiseNorms())
    weight = only(result, RMS_NORM).args[1]
    assert bool((result.get_buffer(weight.target) == 1).all())


def test_one_root_mean_square_with_two_weights() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        normed = _by_rsqrt(b, x)
        halves = [b.call(aten.mul.Tensor, normed, b.parameter(f"{side}.weight", HIDDEN)) for side in ("left", "right")]
        return b.call(aten.add.Tensor, *halves)

    assert operators(raised(captured(write), RaiseNorms())) == {"rms_norm": 2, "add": 1}


def test_another_mean_is_no_norm() -> None:
    def over_tokens(b: GraphBuilder, x: Node) -> Node:
        mean = b.call(aten.mean.dim, _square("pow", b, x), [0], True)
        return b.call(aten.mul.Tensor, x, b.call(aten.rsqrt.default, b.call(aten.add.Tensor, mean, EPS)))

    def of_cubes(b: GraphBuilder, x: Node) -> Node:
        mean = b.call(aten.mean.dim, b.call(aten.pow.Tensor_Scalar, x, 3), [-1], True)
        return b.call(aten.mul.Tensor, x, b.call(aten.rsqrt.default, b.call(aten.add.Tensor, mean, EPS)))

    def of_another(b: GraphBuilder, x: Node) -> Node:
        other = b.call(aten.relu.default, x)
        return b.call(aten.mul.Tensor, x, b.call(aten.rsqrt.default, _mean_square(b, other)))

    def of_another_sum(b: GraphBuilder, x: Node) -> Node:
        mean = b.call(aten.div.Tensor, b.call(aten.sum.dim_IntList, _square("pow", b, x), [-1], True), HIDDEN - 1)
        return b.call(aten.mul.Tensor, x, b.call(aten.rsqrt.default, b.call(aten.add.Tensor, mean, EPS)))

    for write in (over_tokens, of_cubes, of_another, of_another_sum):
        assert not RaiseNorms()(captured(write)).modified


@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, False)])
def test_layer_norm(weight: bool, bias: bool) -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        weights = [b.parameter(f"norm.{name}", HIDDEN) if there else None
                   for name, there in (("weight", weight), ("bias", bias))]  # fmt: skip
        return b.call(aten.layer_norm.default, x, [HIDDEN], *weights, EPS)

    result = raised(captured(write), RaiseNorms())
    _, *found, eps = only(result, LAYER_NORM).args
    assert [argument is not None for argument in found] == [weight, bias]
    assert eps == EPS


def test_rms_norm_of_torch() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        return b.call(aten.rms_norm.default, x, [HIDDEN], b.parameter("norm.weight", HIDDEN), EPS)

    assert operators(raised(captured(write), RaiseNorms())) == {"rms_norm": 1}


def _norm_of_heads(b: GraphBuilder, heads: Node, *weights: Node) -> Node:
    normed = b.call(aten.mul.Tensor, heads, b.call(aten.rsqrt.default, _mean_square(b, heads)))
    return b.call(aten.mul.Tensor, normed, *weights) if weights else normed


def _heads(b: GraphBuilder, x: Node, *, heads_first: bool) -> Node:
    """[1, HEADS, T, size] or [1, T, HEADS, size]."""
    heads = b.call(aten.unflatten.int, b.call(aten.unsqueeze.default, x, 0), -1, [HEADS, HIDDEN // HEADS])
    return b.call(aten.transpose.int, heads, 1, 2) if heads_first else heads


def _merged(b: GraphBuilder, heads: Node, *, heads_first: bool) -> Node:
    heads = b.call(aten.transpose.int, heads, 1, 2) if heads_first else heads
    return b.call(aten.squeeze.dim, b.call(aten.flatten.using_ints, heads, 2), 0)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_norms_of_heads_become_groups(heads_first: bool, weighted: bool) -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        weights = [b.parameter("norm.weight", HIDDEN // HEADS)] if weighted else []
        normed = _norm_of_heads(b, _heads(b, x, heads_first=heads_first), *weights)
        return _merged(b, normed, heads_first=heads_first)

    result = raised(captured(write), RaiseNorms())
    values = arguments(only(result, RMS_NORM))
    assert (values["groups"], values["eps"]) == (HEADS, EPS)
    assert values["x"].meta["val"].shape[-1] == HIDDEN
    # One weight for all heads, repeated.
    assert values["weight"].meta["val"].shape == (HIDDEN,)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("affine", [(True, True), (True, False), (False, False)])
def test_layer_norms_of_heads_become_groups(heads_first: bool, affine: tuple[bool, bool]) -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        size = HIDDEN // HEADS
        weights = [b.parameter(f"norm.{name}", size) if there else None
                   for name, there in zip(("weight", "bias"), affine, strict=True)]  # fmt: skip
        heads = _heads(b, x, heads_first=heads_first)
        normed = b.call(aten.layer_norm.default, heads, [size], *weights, EPS)
        return _merged(b, normed, heads_first=heads_first)

    values = arguments(only(raised(captured(write), RaiseNorms()), LAYER_NORM))
    assert values["groups"] == HEADS
    assert tuple(values[name] is not None for name in ("weight", "bias")) == affine


@pytest.mark.parametrize("heads_first", [False, True])
def test_weights_of_each_head(heads_first: bool) -> None:
    """They belong to the norm where they have the layout of its heads, and stay behind it otherwise."""
    shape = (HEADS, *([1] if heads_first else []), HIDDEN // HEADS)

    def write(b: GraphBuilder, x: Node) -> Node:
        normed = _norm_of_heads(b, _heads(b, x, heads_first=heads_first), b.parameter("w", *shape))
        return _merged(b, normed, heads_first=heads_first)

    found = operators(raised(captured(write), RaiseNorms()))
    assert (found["rms_norm"], found.get("mul", 0)) == (1, int(heads_first))


def _one_more(b: GraphBuilder, x: Node) -> Node:
    weight = b.call(aten.add.Tensor, b.parameter("norm.weight", HIDDEN), 1.0)
    return b.call(aten.mul.Tensor, _by_rsqrt(b, x), weight)


def test_a_weight_that_is_computed() -> None:
    """Gemma's weights are stored less one."""
    result = raised(captured(_one_more), RaiseNorms())
    weight = only(result, RMS_NORM).args[1]
    assert (weight.target, weight.args[0].target) == (aten.add.Tensor, "norm.weight")


def _less_mean(b: GraphBuilder, x: Node) -> Node:
    return b.call(aten.sub.Tensor, x, b.call(aten.mean.dim, x, [-1], True))


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("weight", [False, True])
def test_layer_norm_written_out(twice: bool, weight: bool) -> None:
    """The deviation is one value, or computed again for the variance, as Cohere's norm does."""

    def write(b: GraphBuilder, x: Node) -> Node:
        deviation = _less_mean(b, x)
        square = _mean_square(b, _less_mean(b, x) if twice else deviation)
        normed = b.call(aten.mul.Tensor, deviation, b.call(aten.rsqrt.default, square))
        return b.call(aten.mul.Tensor, b.parameter("w", HIDDEN), normed) if weight else normed

    result = raised(captured(write), RaiseNorms())
    assert operators(result) == {"layer_norm": 1}
    values = arguments(only(result, LAYER_NORM))
    assert (values["bias"], values["eps"]) == (None, EPS)
    assert (values["weight"] is None or values["weight"].target == "w") and values["x"].target is EMBEDDING


def test_a_deviation_from_another_mean_is_no_layer_norm() -> None:
    def other_mean(b: GraphBuilder, x: Node) -> Node:
        other = b.call(aten.mean.dim, b.call(aten.relu.default, x), [-1], True)
        deviation = b.call(aten.sub.Tensor, x, other)
        return b.call(aten.mul.Tensor, deviation, b.call(aten.rsqrt.default, _mean_square(b, deviation)))

    assert "layer_norm" not in operators(raised(captured(other_mean), RaiseNorms()))

    def other_variance(b: GraphBuilder, x: Node) -> Node:
        return b.call(aten.mul.Tensor, _less_mean(b, x), b.call(aten.rsqrt.default, _mean_square(b, x)))

    assert not RaiseNorms()(captured(other_variance)).modified
