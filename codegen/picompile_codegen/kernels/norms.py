"""Normalization of each token's activations."""

from collections.abc import Callable
from itertools import cycle

from tvm import tirx

from picompile_codegen.kernels.kernel import Kernel, KernelFunction
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, local, parallel
from picompile_codegen.kernels.vector import LANES, at, blocks, load, splat, store, total

# Independent sums, so that an addition need not wait for the one before.
_CHAINS = 4


def rms_norm(*, dim: int, rows: int, eps: float) -> Kernel:
    """y = x / sqrt(mean(x²) + eps) · weight. x float32 [rows, dim], weight float32 [dim] → y like x."""
    function = KernelFunction("rms_norm", dim, f"r{rows}", eps)
    with function:
        x, weight, y = function.floats("x", rows, dim), function.floats("weight", dim), function.floats("y", rows, dim)
        with parallel(function.tokens(rows), when_worth=rows > 1) as t:
            mean_square = _sum(x, t, dim, lambda value: value * value) / float(dim)
            factor = bind(splat(_inverse_root(mean_square, eps)))

            def scale(c: Expr, valid: int) -> None:
                value = load(x, t, c, valid=valid) * factor * load(weight, c, valid=valid)
                store(y, t, c, value=value, valid=valid)

            blocks(dim, scale)
    return function.kernel()


def layer_norm(*, dim: int, rows: int, eps: float, weight: bool, bias: bool) -> Kernel:
    """y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias. x float32 [rows, dim], weight, bias [dim] → y like x."""
    function = KernelFunction("layer_norm", dim, f"r{rows}", eps, "w" * weight + "b" * bias)
    with function:
        x = function.floats("x", rows, dim)
        weights = function.optional_floats("weight", dim, weight)
        biases = function.optional_floats("bias", dim, bias)
        y = function.floats("y", rows, dim)
        with parallel(function.tokens(rows), when_worth=rows > 1) as t:
            center = bind(_sum(x, t, dim, lambda value: value) / float(dim))
            mean = bind(splat(center))
            variance = _sum(x, t, dim, lambda value: (value - mean) * (value - mean), fill=center) / float(dim)
            factor = bind(splat(_inverse_root(variance, eps)))

            def scale(c: Expr, valid: int) -> None:
                value = (load(x, t, c, valid=valid) - mean) * factor
                if weights is not None:
                    value = value * load(weights, c, valid=valid)
                if biases is not None:
                    value = value + load(biases, c, valid=valid)
                store(y, t, c, value=value, valid=valid)

            blocks(dim, scale)
    return function.kernel()


def _inverse_root(value: Expr, eps: float) -> Expr:
    return bind(tirx.FloatImm("float32", 1.0) / tirx.sqrt(value + tirx.FloatImm("float32", eps)))


def _sum(x: Tensor, token: Expr, dim: int, term: Callable[[Expr], Expr], fill: Expr = 0.0) -> Expr:
    """Σ term(x[token, c]) over c. Lanes past the end enter as `fill`, whose term must be 0."""
    sums = local(_CHAINS * LANES)
    for chain in range(_CHAINS):
        sums[at(chain * LANES)] = splat(0.0)
    chains = cycle(range(_CHAINS))

    def add(c: Expr, valid: int) -> None:
        index = at(next(chains) * LANES)
        sums[index] = sums[index] + term(bind(load(x, token, c, valid=valid, fill=fill)))

    blocks(dim, add, unroll=_CHAINS)
    first, second, third, fourth = (sums[at(chain * LANES)] for chain in range(_CHAINS))
    return total((first + second) + (third + fourth))
