"""Activation functions of single numbers: those of `picompile_passes.dialect.activations`, by the same names."""

from collections.abc import Callable
from math import pi, sqrt

from tvm import tirx

from picompile_codegen.kernels.tensor import Expr, bind, maximum, minimum, select
from picompile_passes.dialect.activations import parse_activation


def _number(value: float) -> Expr:
    return tirx.FloatImm("float32", value)


def _sigmoid(x: Expr) -> Expr:
    # Where exp is infinite the quotient is 0, as it should be.
    return _number(1.0) / (_number(1.0) + tirx.exp(-x))


def _relu(x: Expr) -> Expr:
    return maximum(x, _number(0.0))


def _relu2(x: Expr) -> Expr:
    positive = bind(_relu(x))
    return positive * positive


def _gelu(x: Expr) -> Expr:
    return _number(0.5) * x * (_number(1.0) + tirx.erf(x * _number(sqrt(0.5))))


def _gelu_tanh(x: Expr) -> Expr:
    # (1 + tanh u) / 2 = sigmoid 2u, and does not cancel where u is far below zero.
    inner = x * (_number(1.0) + _number(0.044715) * x * x)
    return x * _sigmoid(_number(2.0 * sqrt(2.0 / pi)) * inner)


_FUNCTIONS: dict[str, Callable[[Expr], Expr]] = {
    "identity": lambda x: x,
    "relu": _relu,
    "relu2": _relu2,
    "relu6": lambda x: minimum(_relu(x), _number(6.0)),
    "silu": lambda x: x * _sigmoid(x),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * _sigmoid(_number(1.702) * x),
    "sigmoid": _sigmoid,
    "tanh": tirx.tanh,
}


def activate(text: str, x: Expr) -> Expr:
    """The activation that `text` names, of a float32. Raises `ValueError` for one that is not known."""
    activation = parse_activation(text)
    x = bind(x)
    if activation.name == "fatrelu":
        return bind(select(x > _number(activation.threshold), x, _number(0.0)))
    return bind(_FUNCTIONS[activation.name](x))
