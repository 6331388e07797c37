"""Feed-forward blocks on a GPU: which kernel there is for which kind."""

from picompile_codegen.cuda.ffn_arguments import CudaFfn
from picompile_codegen.cuda.ffn_chunk import ffn_chunk
from picompile_codegen.cuda.ffn_tokens import ffn_tokens
from picompile_codegen.cuda.function import CudaFunction, CudaKernel
from picompile_codegen.cuda.matrix import matrix_argument
from picompile_codegen.kernels.ffn_shape import FfnShape


def ffn(
    *, kind: str, format: str, neurons: int, dim: int, rows: int, gated: bool, activation: str, up_activation: str,
    gate_bias: bool, up_bias: bool, down_bias: bool, mask_columns: int | None = None,
) -> CudaKernel:  # fmt: skip
    """y = h · down + down_bias, h as in `kernels.ffn.ffn`, which has the same arguments and counts the same.

    With several rows `masked` always computes the neurons of each row's mask, however many they are.
    """
    shape = FfnShape(kind, neurons, dim, rows, gated, activation, up_activation)
    name = ("gated" if gated else "plain", activation, "" if up_activation == "identity" else f"up_{up_activation}")
    biases = "g" * gate_bias + "u" * up_bias + "d" * down_bias
    suffixes = (biases and f"b{biases}", "" if mask_columns is None else f"of{mask_columns}")
    function = CudaFunction("ffn", kind, format, f"{neurons}x{dim}", f"r{rows}", *name, *suffixes)
    columns = mask_columns or neurons
    with function:
        block = CudaFfn(
            shape=shape,
            x=function.floats("x", rows, dim),
            mask=function.argument("mask", "uint8", rows, columns, below=2) if shape.is_masked else None,
            table=None if mask_columns is None else function.argument("table", "int32", neurons, below=columns),
            decide=matrix_argument(function, "decide_w", format, neurons, dim) if shape.is_exact else None,
            bundle=matrix_argument(function, "neuron_w", format, neurons * shape.bundle_parts, dim),
            gate_bias=function.optional_floats("gate_bias", neurons, gate_bias),
            up_bias=function.optional_floats("up_bias", neurons, up_bias),
            down_bias=function.optional_floats("down_bias", dim, down_bias),
            stats=function.argument("stats", "int64", 2, access="adds"),
        )
        if rows == 1 or shape.is_masked:
            ffn_tokens(function, block)
        else:
            ffn_chunk(function, block)
    return function.cuda_kernel()
