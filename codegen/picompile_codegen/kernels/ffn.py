"""Feed-forward blocks: which kernel there is for which kind, and the arguments they have in common."""

from picompile_codegen.kernels.ffn_batch import ffn_batch
from picompile_codegen.kernels.ffn_chunk import ffn_chunk
from picompile_codegen.kernels.ffn_one import ffn_one
from picompile_codegen.kernels.ffn_shape import FfnArguments, FfnShape
from picompile_codegen.kernels.kernel import Kernel, KernelFunction
from picompile_codegen.kernels.matrix import matrix_argument


def ffn(
    *, kind: str, format: str, neurons: int, dim: int, rows: int, gated: bool, activation: str, up_activation: str,
    gate_bias: bool, up_bias: bool, down_bias: bool, mask_columns: int | None = None,
) -> Kernel:  # fmt: skip
    """y = h · down + down_bias, h = activation(x · gateᵀ + gate_bias) ∘ up_activation(x · upᵀ + up_bias).

    Without a gate (`gated` False), h = activation(x · upᵀ + up_bias). x float32 [rows, dim], y like x, biases float32
    [neurons] and [dim]. `neuron_w` is a bundle: the rows of one neuron follow one another.

    | kind | `decide_w` | bundle | rows = 1 computes |
    | --- | --- | --- | --- |
    | `dense` | | gate, up, down or up, down | every neuron |
    | `exact`, gated | gate | up, down | up and down of neurons whose gate is above the activation's threshold |
    | `exact`, not gated | up | down | down of neurons whose up is above it |
    | `masked` | | gate, up, down or up, down | the neurons of `mask` |

    `mask` uint8 [rows, neurons] holds 0 or 1. With `mask_columns` it has that many columns instead, and neuron r is
    column `table`[r], int32 [neurons]. With several rows `masked` computes the neurons of each row's mask, or all where
    the masks name many; the other kinds compute all.

    `stats` int64 [2] counts, for rows = 1 and in `masked`, neurons computed and neurons whose h is not zero, of all
    rows together. It is added to, not set.
    """
    shape = FfnShape(kind, neurons, dim, rows, gated, activation, up_activation)
    name = ("gated" if gated else "plain", activation, "" if up_activation == "identity" else f"up_{up_activation}")
    biases = "g" * gate_bias + "u" * up_bias + "d" * down_bias
    suffixes = (biases and f"b{biases}", "" if mask_columns is None else f"of{mask_columns}")
    function = KernelFunction("ffn", kind, format, f"{neurons}x{dim}", f"r{rows}", *name, *suffixes)
    with function:
        x = function.floats("x", rows, dim)
        columns = mask_columns or neurons
        mask = function.argument("mask", "uint8", rows, columns, below=2) if shape.is_masked else None
        table = None if mask_columns is None else function.argument("table", "int32", neurons, below=columns)
        decide = matrix_argument(function, "decide_w", format, neurons, dim) if shape.is_exact else None
        bundle = matrix_argument(function, "neuron_w", format, neurons * shape.bundle_parts, dim)
        gate = function.optional_floats("gate_bias", neurons, gate_bias)
        up = function.optional_floats("up_bias", neurons, up_bias)
        down = function.optional_floats("down_bias", dim, down_bias)
        stats = function.argument("stats", "int64", 2, access="adds")
        arguments = FfnArguments(shape, x, mask, table, decide, bundle, gate, up, down, stats)
        if rows == 1:
            ffn_one(function, arguments)
        elif shape.is_masked:
            ffn_batch(function, arguments)
        else:
            ffn_chunk(function, arguments)
    return function.kernel()
