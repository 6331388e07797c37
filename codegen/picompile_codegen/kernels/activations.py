"""Activation functions on vectors: those of `picompile_passes.dialect.activations`, by the same names."""

from collections.abc import Callable
from math import sqrt

from picompile_codegen.kernels.math import erf, sigmoid, tanh
from picompile_codegen.kernels.tensor import Expr, bind, maximum, minimum, select
from picompile_codegen.kernels.vector import splat
from picompile_passes.dialect.activations import parse_activation


def _relu(x: Expr) -> Expr:
    return maximum(x, splat(0.0))


def _relu2(x: Expr) -> Expr:
    positive = bind(_relu(x))
    return positive * positive


def _gelu(x: Expr) -> Expr:
    return splat(0.5) * x * (splat(1.0) + erf(x * splat(sqrt(0.5))))


def _gelu_tanh(x: Expr) -> Expr:
    # (1 + tanh u) / 2 = sigmoid 2u, and does not cancel where u is far below zero.
    inner = x * (splat(1.0) + splat(0.044715) * x * x)
    return x * sigmoid(splat(2.0 * sqrt(2.0 / 3.141592653589793)) * inner)


_FUNCTIONS: dict[str, Callable[[Expr], Expr]] = {
    "identity": lambda x: x,
    "relu": _relu,
    "relu2": _relu2,
    "relu6": lambda x: minimum(_relu(x), splat(6.0)),
    "silu": lambda x: x * sigmoid(x),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * sigmoid(splat(1.702) * x),
    "sigmoid": sigmoid,
    "tanh": tanh,
}


def activate(text: str, x: Expr) -> Expr:
    """The activation that `text` names, of each lane of x. Raises `ValueError` for one that is not known."""
    activation = parse_activation(text)
    x = bind(x)
    if activation.name == "fatrelu":
        return bind(select(x > splat(activation.threshold), x, splat(0.0)))
    return bind(_FUNCTIONS[activation.name](x))
