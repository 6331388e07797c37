"""Predictors that were trained: two matrices of low rank tell which neurons one token will fire."""

from tvm import tirx

from picompile_codegen.kernels.dot import dot, prepare_vector
from picompile_codegen.kernels.kernel import Kernel, KernelFunction
from picompile_codegen.kernels.matrix import matrix_argument
from picompile_codegen.kernels.tensor import maximum, parallel, worth_a_region


def predict_low_rank(*, formats: tuple[str, str], neurons: int, rank: int, dim: int, relu: bool) -> Kernel:
    """mask[j] = 1 where fc2[j] · h + bias[j] > threshold, else 0; h = fc1 · x, or relu(fc1 · x) with `relu`.

    x float32 [1, dim], fc1 packed [rank, dim], fc2 packed [neurons, rank], in `formats`, bias float32 [neurons],
    threshold float32 [1] → mask uint8 [1, neurons].
    """
    function = KernelFunction("predict", "relu" if relu else "linear", *formats, f"{neurons}x{rank}x{dim}")
    with function:
        x = function.floats("x", 1, dim)
        fc1 = matrix_argument(function, "fc1", formats[0], rank, dim)
        fc2 = matrix_argument(function, "fc2", formats[1], neurons, rank)
        bias, threshold = function.floats("bias", neurons), function.floats("threshold", 1)
        hidden = function.scratch("hidden", "float32", 1, rank)
        mask = function.argument("mask", "uint8", 1, neurons)

        inputs = prepare_vector(x, fc1)
        with parallel(rank, when_worth=worth_a_region(fc1.bytes)) as row:
            product = dot(fc1, row, inputs, [row + fc1.rows_ahead])
            hidden[0, row] = maximum(product, tirx.FloatImm("float32", 0.0)) if relu else product
        inputs = prepare_vector(hidden, fc2)
        with parallel(neurons, when_worth=worth_a_region(fc2.bytes)) as neuron:
            mask[0, neuron] = tirx.Cast("uint8", dot(fc2, neuron, inputs, [neuron + fc2.rows_ahead]) + bias[neuron] > threshold[0])
    return function.kernel()
