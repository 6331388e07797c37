from collections.abc import Callable

import pytest
from torch.fx import Node

from helpers.raising import HIDDEN, Write, aten, captured, only, operators, raised
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


def _mul(b: GraphBuilder, x: Node, y: Node) -> Node:
    return b.call(aten.mul.Tensor, x, y)


def _root(b: GraphBuilder, x: Node) -> Node:
    return b.call(aten.sqrt.default, _mean_square(b, x))


def _inverse(b: GraphBuilder, x: Node, kind: str = "pow") -> Node:
    return b.call(aten.rsqrt.default, _mean_square(b, x, kind))


def _by_rsqrt(b: GraphBuilder, x: Node, kind: str = "pow") -> Node:
    return _mul(b, x, _inverse(b, x, kind))


def _by_mean(b: GraphBuilder, x: Node, mean: Node) -> Node:
    return _mul(b, x, b.call(aten.rsqrt.default, b.call(aten.add.Tensor, mean, EPS)))


def _by_sum(b: GraphBuilder, x: Node, count: int = HIDDEN) -> Node:
    total = b.call(aten.sum.dim_IntList, _square("pow", b, x), [-1], True)
    return _by_mean(b, x, b.call(aten.div.Tensor, total, count))


@pytest.mark.parametrize(("kind", "weight_first"), [("pow", True), ("mul", False), ("square", True), ("pow", False)])
def test_root_mean_square(kind: str, weight_first: bool) -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        factors = [_by_rsqrt(b, x, kind), b.parameter("norm.weight", HIDDEN)]
        return _mul(b, *(factors[::-1] if weight_first else factors))

    result = raised(captured(write), RaiseNorms())
    assert operators(result) == {"rms_norm": 1}
    _, weight, eps = only(result, RMS_NORM).args
    assert (weight.target, eps) == ("norm.weight", EPS)


_WRITINGS: dict[str, Callable[[GraphBuilder, Node, Node], Node]] = {
    "sqrt": lambda b, x, weight: _mul(b, b.call(aten.div.Tensor, x, _root(b, x)), weight),
    "reciprocal": lambda b, x, weight: _mul(b, _mul(b, b.call(aten.reciprocal.default, _root(b, x)), x), weight),
    # The nodes that export makes of x · (1.0 / sqrt(…)).
    "reciprocal times one": lambda b, x, weight: _mul(
        b, _mul(b, x, b.call(aten.mul.Tensor, b.call(aten.reciprocal.default, _root(b, x)), 1.0)), weight
    ),
    "inverse root power": lambda b, x, weight: _mul(
        b, _mul(b, x, b.call(aten.pow.Tensor_Scalar, _mean_square(b, x), -0.5)), weight
    ),
    "root power": lambda b, x, weight: _mul(
        b, b.call(aten.div.Tensor, x, b.call(aten.pow.Tensor_Scalar, _mean_square(b, x), 0.5)), weight
    ),
    "sum": lambda b, x, weight: _mul(b, _by_sum(b, x), weight),
    "unsqueezed mean": lambda b, x, weight: _mul(
        b, _by_mean(b, x, b.call(aten.unsqueeze.default, b.call(aten.mean.dim, _square("pow", b, x), [-1]), -1)), weight
    ),
    "weight, then inverse": lambda b, x, weight: _mul(b, _mul(b, x, weight), _inverse(b, x)),
    "weighted inverse": lambda b, x, weight: _mul(b, x, _mul(b, _inverse(b, x), weight)),
    "weight, then division": lambda b, x, weight: b.call(aten.div.Tensor, _mul(b, weight, x), _root(b, x)),
    "weight over root": lambda b, x, weight: _mul(b, b.call(aten.div.Tensor, weight, _root(b, x)), x),
    "torch's": lambda b, x, weight: b.call(aten.rms_norm.default, x, [HIDDEN], weight, EPS),
}


@pytest.mark.parametrize("form", _WRITINGS)
def test_root_mean_square_written_in_other_ways(form: str) -> None:
    result = raised(captured(lambda b, x: _WRITINGS[form](b, x, b.parameter("norm.weight", HIDDEN))), RaiseNorms())
    assert operators(result) == {"rms_norm": 1}
    assert only(result, RMS_NORM).args[1].target == "norm.weight"


def test_root_mean_square_without_weight() -> None:
    result = raised(captured(_by_rsqrt), RaiseNorms())
    weight = only(result, RMS_NORM).args[1]
    assert bool((result.get_buffer(weight.target) == 1).all())


def test_one_root_mean_square_with_two_weights() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        normed = _by_rsqrt(b, x)
        return b.call(aten.add.Tensor, *(_mul(b, normed, b.parameter(f"{side}.weight", HIDDEN)) for side in ("a", "b")))

    assert operators(raised(captured(write), RaiseNorms())) == {"rms_norm": 2, "add": 1}


def _over_tokens(b: GraphBuilder, x: Node) -> Node:
    return _by_mean(b, x, b.call(aten.mean.dim, _square("pow", b, x), [0], True))


def _of_cubes(b: GraphBuilder, x: Node) -> Node:
    return _by_mean(b, x, b.call(aten.mean.dim, b.call(aten.pow.Tensor_Scalar, x, 3), [-1], True))


@pytest.mark.parametrize(
    "write",
    [
        _over_tokens,
        _of_cubes,
        lambda b, x: _mul(b, x, _inverse(b, b.call(aten.relu.default, x))),
        lambda b, x: _by_sum(b, x, HIDDEN - 1),
        # The variance is of another value than the deviation.
        lambda b, x: _mul(b, _less_mean(b, x), _inverse(b, x)),
    ],
)
def test_another_mean_is_no_norm(write: Write) -> None:
    assert not RaiseNorms()(captured(write)).modified


@pytest.mark.parametrize("names", [("weight", "bias"), ("weight",), ()])
def test_layer_norm(names: tuple[str, ...]) -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        weights = [b.parameter(name, HIDDEN) if name in names else None for name in ("weight", "bias")]
        return b.call(aten.layer_norm.default, x, [HIDDEN], *weights, EPS)

    _, *found, eps = only(raised(captured(write), RaiseNorms()), LAYER_NORM).args
    assert [argument.target for argument in found if argument is not None] == list(names)
    assert eps == EPS


def _norm_of_heads(b: GraphBuilder, heads: Node, *weights: Node) -> Node:
    normed = _by_rsqrt(b, heads)
    return _mul(b, normed, *weights) if weights else normed


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


@pytest.mark.parametrize(
    ("heads_first", "names"),
    [(True, ("weight", "bias")), (False, ("weight",)), (True, ()), (False, ("weight", "bias"))],
)
def test_layer_norms_of_heads_become_groups(heads_first: bool, names: tuple[str, ...]) -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        size = HIDDEN // HEADS
        weights = [b.parameter(f"norm.{name}", size) if name in names else None for name in ("weight", "bias")]
        heads = _heads(b, x, heads_first=heads_first)
        normed = b.call(aten.layer_norm.default, heads, [size], *weights, EPS)
        return _merged(b, normed, heads_first=heads_first)

    values = arguments(only(raised(captured(write), RaiseNorms()), LAYER_NORM))
    assert values["groups"] == HEADS
    assert [name for name in ("weight", "bias") if values[name] is not None] == list(names)


@pytest.mark.parametrize("heads_first", [False, True])
def test_weights_of_each_head(heads_first: bool) -> None:
    """They belong to the norm where they have the layout of its heads, and stay behind it otherwise."""
    shape = (HEADS, *([1] if heads_first else []), HIDDEN // HEADS)

    def write(b: GraphBuilder, x: Node) -> Node:
        normed = _norm_of_heads(b, _heads(b, x, heads_first=heads_first), b.parameter("w", *shape))
        return _merged(b, normed, heads_first=heads_first)

    found = operators(raised(captured(write), RaiseNorms()))
    assert (found["rms_norm"], found.get("mul", 0)) == (1, int(heads_first))


def test_a_weight_that_is_computed() -> None:
    """Gemma's weights are stored less one."""

    def write(b: GraphBuilder, x: Node) -> Node:
        return _mul(b, _by_rsqrt(b, x), b.call(aten.add.Tensor, b.parameter("norm.weight", HIDDEN), 1.0))

    weight = only(raised(captured(write), RaiseNorms()), RMS_NORM).args[1]
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
    def write(b: GraphBuilder, x: Node) -> Node:
        other = b.call(aten.mean.dim, b.call(aten.relu.default, x), [-1], True)
        deviation = b.call(aten.sub.Tensor, x, other)
        return _mul(b, deviation, _inverse(b, deviation))

    assert "layer_norm" not in operators(raised(captured(write), RaiseNorms()))
