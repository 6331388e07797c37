"""The graph dialect: a dozen operators that every supported model is made of.

Each operator is a `torch.library.custom_op` with a fake implementation and an eager reference, so that a graph at any
stage runs in plain PyTorch and can be compared with the stage before it. Leading dimensions are free:
`[tokens, hidden]` stands for `[..., tokens, hidden]`.
"""

from picompile_passes.dialect.activations import ACTIVATIONS, Activation, parse_activation
from picompile_passes.dialect.ops import (
    attention,
    dequantize,
    divide_by_rms,
    eager_function,
    elementwise,
    embedding,
    ffn,
    layer_norm,
    linear,
    predict,
    quantize,
    rms_norm,
    rotary,
    sparse_ffn,
)
from picompile_passes.formats.packing import dequantize_rows, quantize_rows

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "attention",
    "dequantize",
    "dequantize_rows",
    "divide_by_rms",
    "eager_function",
    "elementwise",
    "embedding",
    "ffn",
    "layer_norm",
    "linear",
    "parse_activation",
    "predict",
    "quantize",
    "quantize_rows",
    "rms_norm",
    "rotary",
    "sparse_ffn",
]
