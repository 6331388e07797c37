"""What the arguments of the dialect's operators are: their dimensions, and which of them hold matrices.

A dimension is one letter that stands for the same size throughout a call; T is the token count of the graph.
"""

import torch
from torch._ops import OpOverload
from torch.fx import Node

# The import registers `torch.ops.picompile`.
import picompile_passes.dialect  # noqa: F401
from picompile_passes.nodes import arguments

DIALECT = torch.ops.picompile
ADD: OpOverload = torch.ops.aten.add.Tensor
TRANSPOSE: OpOverload = torch.ops.aten.transpose.int
INDEX_SELECT: OpOverload = torch.ops.aten.index_select.default
EMBEDDING: OpOverload = DIALECT.embedding.default
LINEAR: OpOverload = DIALECT.linear.default
RMS_NORM: OpOverload = DIALECT.rms_norm.default
LAYER_NORM: OpOverload = DIALECT.layer_norm.default
ROTARY: OpOverload = DIALECT.rotary.default
ATTENTION: OpOverload = DIALECT.attention.default
FFN: OpOverload = DIALECT.ffn.default
PREDICT: OpOverload = DIALECT.predict.default
SPARSE_FFN: OpOverload = DIALECT.sparse_ffn.default
QUANTIZE: OpOverload = DIALECT.quantize.default
DEQUANTIZE: OpOverload = DIALECT.dequantize.default

_FFN_DIMENSIONS = {
    "x": "TD",
    "gate": "FD",
    "up": "FD",
    "down": "FE",
    "gate_bias": "F",
    "up_bias": "F",
    "down_bias": "E",
}

DIMENSIONS: dict[OpOverload, dict[str, str]] = {
    EMBEDDING: {"ids": "T", "weight": "VD"},
    LINEAR: {"x": "TK", "weight": "NK", "bias": "N"},
    RMS_NORM: {"x": "TD", "weight": "D"},
    LAYER_NORM: {"x": "TD", "weight": "D", "bias": "D"},
    ROTARY: {"x": "TD", "positions": "T", "inverse_frequency": "H"},
    ATTENTION: {"q": "TQ", "k": "TK", "v": "TV"},
    FFN: _FFN_DIMENSIONS,
    SPARSE_FFN: _FFN_DIMENSIONS | {"mask": "TM", "neurons": "F"},
    ADD: {"self": "TD", "other": "TD"},
}

# The matrices that quantization packs; none of `ffn`, which is gone by then. `predict` takes a list that may hold
# vectors too.
MATRICES: dict[OpOverload, tuple[str, ...]] = {
    EMBEDDING: ("weight",),
    LINEAR: ("weight",),
    PREDICT: ("weights",),
    SPARSE_FFN: ("gate", "up", "down"),
}

# What of a feed-forward block has one row for each neuron.
NEURON_ROWS = ("gate", "up", "down", "gate_bias", "up_bias")


def matrix_operands(node: Node) -> list[Node]:
    """The matrices that `node` uses, in the order of its arguments; none for an operator that uses none."""
    names = MATRICES.get(node.target, ()) if isinstance(node.target, OpOverload) else ()
    values = arguments(node) if names else {}
    found: list[object] = []
    for name in names:
        value = values[name]
        found.extend(value if isinstance(value, (list, tuple)) else [value])
    return [operand for operand in found if isinstance(operand, Node) and operand.meta["val"].dim() == 2]
