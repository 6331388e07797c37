"""Elementary functions of vectors of float32, as polynomials: calls of libm would take one lane at a time.

Each agrees with the exact function to about 1e-7 of its value unless its docstring says otherwise.
"""

from collections.abc import Callable
from functools import reduce
from math import sqrt

from tvm import tirx

from picompile_codegen.cpu.tensor import Expr, bind, maximum, minimum, select
from picompile_codegen.cpu.vector import LANES, fma, splat
from picompile_passes.dialect.activations import parse_activation

# ln 2 in two parts, the first exact in few bits, so that x - n ln 2 loses nothing.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_LOG2_E = 1.44269504088896341

# Beyond these e^x is not a normal float32 number.
_EXP_MIN, _EXP_MAX = -87.33654, 88.72283

# e^r = 1 + r + r² p(r) for |r| <= ln 2 / 2 (Cephes, expf.c), highest power first.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)

# tanh x = x + x³ p(x²) for |x| < 0.625 (Cephes, tanhf.c).
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
_TANH_SMALL = 0.625

# erf x = x p(x²) / q(x²) for |x| <= 4, where it is 1 in float32 (Eigen, MathFunctionsImpl.h).
_ERF_P = (
    -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05, -7.34990630326855e-04,
    -2.95459980854025e-03, -1.60960333262415e-02,
)  # fmt: skip
_ERF_Q = (
    -1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03, -1.42647390514189e-02,
)  # fmt: skip
_ERF_MAX = 4.0


def _polynomial(x: Expr, coefficients: tuple[float, ...]) -> Expr:
    """Horner's rule, highest power first."""
    first, *rest = (splat(coefficient) for coefficient in coefficients)
    return reduce(lambda value, coefficient: bind(fma(value, x, coefficient)), rest, first)


def exp(x: Expr) -> Expr:
    """e^x; where that is below 1e-38 the result is about 1e-38."""
    x = bind(maximum(minimum(x, splat(_EXP_MAX)), splat(_EXP_MIN)))
    n = bind(tirx.floor(fma(x, splat(_LOG2_E), splat(0.5))))
    r = bind(fma(n, splat(-_LN2_LOW), fma(n, splat(-_LN2_HIGH), x)))
    mantissa = bind(fma(_polynomial(r, _EXP), bind(r * r), r + splat(1.0)))
    # 2^n: n goes where a float32 keeps its exponent. 2^128 is not representable, hence in two factors.
    half = bind(tirx.floor(n * splat(0.5)))
    return bind(mantissa * _power_of_two(half) * _power_of_two(n - half))


def exp_of_negative(x: Expr) -> Expr:
    """e^x for x <= 0, in fewer instructions; where that is below 1e-38 the result is about 1e-38."""
    x = bind(maximum(x, splat(_EXP_MIN)))
    n = bind(tirx.floor(fma(x, splat(_LOG2_E), splat(0.5))))
    r = bind(fma(n, splat(-_LN2_LOW), fma(n, splat(-_LN2_HIGH), x)))
    mantissa = bind(fma(_polynomial(r, _EXP), bind(r * r), r + splat(1.0)))
    return bind(mantissa * _power_of_two(n))


def _power_of_two(n: Expr) -> Expr:
    bits = tirx.Cast(f"int32x{LANES}", n) + tirx.Broadcast(tirx.IntImm("int32", 127), LANES)
    return tirx.reinterpret(f"float32x{LANES}", bits << tirx.Broadcast(tirx.IntImm("int32", 23), LANES))


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + e^-x)."""
    return bind(splat(1.0) / (splat(1.0) + exp(splat(0.0) - x)))


def tanh(x: Expr) -> Expr:
    """The hyperbolic tangent."""
    x = bind(x)
    square = bind(x * x)
    small = fma(_polynomial(square, _TANH), bind(square * x), x)
    large = splat(1.0) - splat(2.0) / (exp(x + x) + splat(1.0))
    return bind(select(tirx.abs(x) < splat(_TANH_SMALL), small, large))


def erf(x: Expr) -> Expr:
    """The error function, to about 1e-7 absolutely."""
    x = bind(maximum(minimum(x, splat(_ERF_MAX)), splat(-_ERF_MAX)))
    square = bind(x * x)
    return bind(x * _polynomial(square, _ERF_P) / _polynomial(square, _ERF_Q))


# Activation functions of vectors, by the names of `picompile_passes.dialect.activations`.


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
