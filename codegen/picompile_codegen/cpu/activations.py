"""Activations and expressions of `picompile_passes.dialect`, for CPU and GPU alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import pi, sqrt

from tvm import tirx

from picompile_codegen.cpu.tensor import Expr, bind, maximum, minimum, select
from picompile_passes.dialect.activations import parse_activation
from picompile_passes.dialect.expressions import parse_expression


@dataclass(frozen=True)
class Arithmetic:
    """The functions that activations are made of: of vectors on the CPU, of single float32 on a GPU."""

    constant: Callable[[float], Expr]
    sigmoid: Callable[[Expr], Expr]
    tanh: Callable[[Expr], Expr]
    erf: Callable[[Expr], Expr]
    exp: Callable[[Expr], Expr]
    softplus: Callable[[Expr], Expr]


def apply_activation(text: str, x: Expr, arithmetic: Arithmetic) -> Expr:
    """Return the activation that `text` names, of x. Raises `ValueError` for one that is not known."""
    activation = parse_activation(text)
    x = bind(x)
    parameters = map(arithmetic.constant, activation.parameters)
    return bind(_FUNCTIONS[activation.name](x, arithmetic, *parameters))


def _relu(x: Expr, of: Arithmetic) -> Expr:
    return maximum(x, of.constant(0.0))


def _relu2(x: Expr, of: Arithmetic) -> Expr:
    positive = bind(_relu(x, of))
    return positive * positive


def _gelu(x: Expr, of: Arithmetic) -> Expr:
    return of.constant(0.5) * x * (of.constant(1.0) + of.erf(x * of.constant(sqrt(0.5))))


def _gelu_tanh(x: Expr, of: Arithmetic) -> Expr:
    # (1 + tanh u) / 2 = sigmoid 2u, and does not cancel where u is far below zero.
    inner = x * (of.constant(1.0) + of.constant(0.044715) * x * x)
    return x * of.sigmoid(of.constant(2.0 * sqrt(2.0 / pi)) * inner)


def _fatrelu(x: Expr, of: Arithmetic, threshold: Expr) -> Expr:
    return select(x > threshold, x, of.constant(0.0))


def _clamped_swish(x: Expr, of: Arithmetic, limit: Expr, beta: Expr) -> Expr:
    clamped = bind(minimum(x, limit))
    return clamped * of.sigmoid(beta * clamped)


def _clamped_linear(x: Expr, of: Arithmetic, limit: Expr, shift: Expr) -> Expr:
    return maximum(minimum(x, limit), of.constant(0.0) - limit) + shift


_FUNCTIONS: dict[str, Callable[..., Expr]] = {
    "identity": lambda x, _: x,
    "relu": _relu,
    "relu2": _relu2,
    "relu6": lambda x, of: minimum(_relu(x, of), of.constant(6.0)),
    "silu": lambda x, of: x * of.sigmoid(x),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": lambda x, of: x * of.sigmoid(of.constant(1.702) * x),
    "sigmoid": lambda x, of: of.sigmoid(x),
    "tanh": lambda x, of: of.tanh(x),
    "fatrelu": _fatrelu,
    "clamped_swish": _clamped_swish,
    "clamped_linear": _clamped_linear,
}


_ARITHMETIC: dict[str, Callable[..., Expr]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "maximum": maximum,
    "minimum": minimum,
    "where_greater": lambda a, b, yes, no: select(a > b, yes, no),
    "abs": tirx.abs,
    "sqrt": tirx.sqrt,
}


def apply_expression(text: str, inputs: Sequence[Expr], of: Arithmetic) -> Expr:
    """Return the value of an expression of `elementwise`. Raises `ValueError` for a text that is none."""
    results: list[Expr] = []
    for step in parse_expression(text, len(inputs)):
        operands = []
        for operand in step.operands:
            if isinstance(operand, float):
                constant = of.constant(operand)
                operands.append(tirx.FloatImm("float32", constant) if isinstance(constant, float) else constant)
            else:
                operands.append((inputs if operand[0] == "x" else results)[int(operand[1:])])
        if step.function in _ARITHMETIC:
            results.append(bind(_ARITHMETIC[step.function](*operands)))
        elif step.function in ("exp", "erf", "softplus"):
            results.append(bind(getattr(of, step.function)(*operands)))
        else:
            results.append(apply_activation(step.function, operands[0], of))
    return results[-1]
