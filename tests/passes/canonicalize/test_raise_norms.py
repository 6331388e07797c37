from collections.abc import Callable

import pytest

from helpers.raising import HIDDEN, Builder, Value, Write, aten, only, operators, raised, stays
from picompile_passes.graph.nodes import arguments
from picompile_passes.graph.operands import EMBEDDING, LAYER_NORM, RMS_NORM
from picompile_passes.passes.canonicalize.raise_norms import RaiseNorms

EPS = 1e-3
HEADS = 3


def _mean(x: Value, dim: int = -1) -> Value:
    return x.mean([dim], True)


def _root(x: Value) -> Value:
    return (_mean(x**2) + EPS).sqrt()


def _inverse(x: Value) -> Value:
    return (_mean(x**2) + EPS).rsqrt()


def _by_sum(x: Value, count: int) -> Value:
    return x * ((x**2).sum([-1], True) / count + EPS).rsqrt()


# Of a value and a weight.
_WRITINGS: dict[str, Callable[[Value, Value], Value]] = {
    "rsqrt, then weight": lambda x, weight: x * _inverse(x) * weight,
    "weight times rsqrt": lambda x, weight: weight * (x * _inverse(x)),
    "square by mul": lambda x, weight: x * (_mean(x * x) + EPS).rsqrt() * weight,
    "square": lambda x, weight: weight * (x * (_mean(x.square()) + EPS).rsqrt()),
    "sqrt": lambda x, weight: x / _root(x) * weight,
    "reciprocal": lambda x, weight: _root(x).reciprocal() * x * weight,
    # The nodes that export makes of x · (1.0 / sqrt(…)).
    "reciprocal times one": lambda x, weight: x * (_root(x).reciprocal() * 1.0) * weight,
    "inverse root power": lambda x, weight: x * (_mean(x**2) + EPS) ** -0.5 * weight,
    "root power": lambda x, weight: x / (_mean(x**2) + EPS) ** 0.5 * weight,
    "sum": lambda x, weight: _by_sum(x, HIDDEN) * weight,
    "unsqueezed mean": lambda x, weight: x * ((x**2).mean([-1]).unsqueeze(-1) + EPS).rsqrt() * weight,
    "weight, then inverse": lambda x, weight: x * weight * _inverse(x),
    "weighted inverse": lambda x, weight: x * (_inverse(x) * weight),
    "weight, then division": lambda x, weight: weight * x / _root(x),
    "weight over root": lambda x, weight: weight / _root(x) * x,
    "torch's": lambda x, weight: x.rms_norm([HIDDEN], weight, EPS),
}


@pytest.mark.parametrize("form", _WRITINGS)
def test_root_mean_square(form: str) -> None:
    result = raised(lambda b, x: _WRITINGS[form](x, b.parameter("norm.weight", HIDDEN)), RaiseNorms())
    assert operators(result) == {"rms_norm": 1}
    _, weight, eps = only(result, RMS_NORM).args
    assert (weight.target, eps) == ("norm.weight", EPS)


def test_root_mean_square_without_weight() -> None:
    result = raised(lambda b, x: x * _inverse(x), RaiseNorms())
    weight = only(result, RMS_NORM).args[1]
    assert bool((result.get_buffer(weight.target) == 1).all())


def test_one_root_mean_square_with_two_weights() -> None:
    def write(b: Builder, x: Value) -> Value:
        normed = x * _inverse(x)
        return normed * b.parameter("a", HIDDEN) + normed * b.parameter("b", HIDDEN)

    assert operators(raised(write, RaiseNorms())) == {"rms_norm": 2, "add": 1}


@pytest.mark.parametrize(
    "write",
    [
        lambda b, x: x * (_mean(x**2, 0) + EPS).rsqrt(),
        lambda b, x: x * (_mean(x**3) + EPS).rsqrt(),
        lambda b, x: x * _inverse(x.relu()),
        lambda b, x: _by_sum(x, HIDDEN - 1),
        # The variance is of another value than the deviation.
        lambda b, x: (x - _mean(x)) * _inverse(x),
    ],
)
def test_another_mean_is_no_norm(write: Write) -> None:
    assert stays(write, RaiseNorms())


def _in_heads(b: Builder, x: Value, norm: Callable[[Value], Value], heads_first: bool) -> Value:
    """The norm of [1, HEADS, T, size] or [1, T, HEADS, size]."""
    heads = x.unsqueeze(0).unflatten(-1, [HEADS, HIDDEN // HEADS])
    normed = norm(heads.transpose(1, 2)).transpose(1, 2) if heads_first else norm(heads)
    return normed.flatten(2).squeeze(0)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("shape", [None, (HIDDEN // HEADS,)])
def test_norms_of_heads_become_groups(heads_first: bool, shape: tuple[int, ...] | None) -> None:
    def normed(b: Builder, heads: Value) -> Value:
        return heads * _inverse(heads) * b.parameter("w", *shape) if shape else heads * _inverse(heads)

    result = raised(lambda b, x: _in_heads(b, x, lambda heads: normed(b, heads), heads_first), RaiseNorms())
    values = arguments(only(result, RMS_NORM))
    assert (values["groups"], values["eps"]) == (HEADS, EPS)
    assert values["x"].meta["val"].shape[-1] == HIDDEN
    # One weight for all heads, repeated.
    assert values["weight"].meta["val"].shape == (HIDDEN,)


@pytest.mark.parametrize("heads_first", [False, True])
def test_weights_of_each_head(heads_first: bool) -> None:
    """They belong to the norm where they have the layout of its heads, and stay behind it otherwise."""
    shape = (HEADS, *([1] if heads_first else []), HIDDEN // HEADS)
    found = operators(
        raised(
            lambda b, x: _in_heads(b, x, lambda heads: heads * _inverse(heads) * b.parameter("w", *shape), heads_first),
            RaiseNorms(),
        )
    )
    assert (found["rms_norm"], found.get("mul", 0)) == (1, int(heads_first))


@pytest.mark.parametrize("names", [("weight", "bias"), ("weight",), ()])
@pytest.mark.parametrize("heads_first", [None, False, True])
def test_layer_norm(names: tuple[str, ...], heads_first: bool | None) -> None:
    """Of whole tokens, and of heads."""

    def write(b: Builder, x: Value) -> Value:
        size = HIDDEN if heads_first is None else HIDDEN // HEADS
        weights = [b.parameter(name, size) if name in names else None for name in ("weight", "bias")]
        if heads_first is None:
            return x.layer_norm([size], *weights, EPS)
        return _in_heads(b, x, lambda heads: heads.layer_norm([size], *weights, EPS), heads_first)

    values = arguments(only(raised(write, RaiseNorms()), LAYER_NORM))
    assert (values["groups"], values["eps"]) == (1 if heads_first is None else HEADS, EPS)
    found = {name: values[name] for name in ("weight", "bias") if values[name] is not None}
    assert list(found) == list(names)
    assert heads_first is not None or [weight.target for weight in found.values()] == list(names)


def test_a_weight_that_is_computed() -> None:
    """Gemma's weights are stored less one."""
    result = raised(lambda b, x: x * _inverse(x) * (b.parameter("norm.weight", HIDDEN) + 1.0), RaiseNorms())
    weight = only(result, RMS_NORM).args[1]
    assert (weight.target, weight.args[0].target) == (aten.add.Tensor, "norm.weight")


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("weight", [False, True])
def test_layer_norm_written_out(twice: bool, weight: bool) -> None:
    """The deviation is one value, or computed again for the variance, as Cohere's norm does."""

    def write(b: Builder, x: Value) -> Value:
        deviation = x - _mean(x)
        normed = deviation * _inverse(x - _mean(x) if twice else deviation)
        return b.parameter("w", HIDDEN) * normed if weight else normed

    result = raised(write, RaiseNorms())
    assert operators(result) == {"layer_norm": 1}
    values = arguments(only(result, LAYER_NORM))
    assert (values["bias"], values["eps"]) == (None, EPS)
    assert (values["weight"] is None or values["weight"].target == "w") and values["x"].target is EMBEDDING


def test_a_deviation_from_another_mean_is_no_layer_norm() -> None:
    def write(b: Builder, x: Value) -> Value:
        deviation = x - _mean(x.relu())
        return deviation * _inverse(deviation)

    assert "layer_norm" not in operators(raised(write, RaiseNorms()))
