"""Constants that passes compute, made once for equal contents."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

# The import registers `torch.ops.picompile`.
import picompile_passes.dialect  # noqa: F401
from picompile_passes.graph.nodes import arguments, is_call
from picompile_passes.graph.rewriter import Rewriter


class SharedConstants:
    """The constants that one run of a pass has made: the same values again are the same node."""

    def __init__(self, rewriter: Rewriter) -> None:
        self._rewriter = rewriter
        self._made: list[tuple[Tensor, Node]] = []

    def get(self, name: str, tensor: Tensor, source: Node) -> Node:
        """A node that reads `tensor`; `name` and `source` are for one that is new."""
        for known, node in self._made:
            if known.dtype == tensor.dtype and torch.equal(known, tensor):
                return node
        node = self._rewriter.constant(name, tensor, sources=(source,))
        self._made.append((tensor, node))
        return node


# What the arguments of the dialect's operators are: their dimensions, and which of them hold matrices.
#
# A dimension is one letter that stands for the same size throughout a call; T is the token count of the graph.


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


# Columns of a `linear` as a linear of their own: the rows of its weight and bias that make them.


@dataclass(frozen=True)
class Projection:
    """The columns `table` of the result of `linear`, or all of them where it is None."""

    linear: Node
    table: Tensor | None

    def rows(self, rewriter: Rewriter, constants: SharedConstants, before: Node) -> tuple[Node, Node | None]:
        """Weight and bias that give these columns alone."""
        _, weight, bias = self.linear.args
        if self.table is None:
            return weight, bias  # type: ignore[return-value]
        table = constants.get("rows", self.table, self.linear)

        def select(matrix: Node) -> Node:
            return rewriter.call(INDEX_SELECT, (matrix, 0, table), before=before, sources=(matrix,))

        return select(weight), None if bias is None else select(bias)  # type: ignore[arg-type]


def down_rows(rewriter: Rewriter, weight: Node, before: Node) -> Node:
    """The weight of a down projection [D, F] with a row for each neuron: its transpose [F, D]."""
    if is_call(weight, TRANSPOSE):
        return weight.all_input_nodes[0]
    return rewriter.call(TRANSPOSE, (weight, 0, 1), before=before, sources=(weight,))


# What predictors are made from: the weights of a block that decide whether a neuron fires, and the inputs there are.
#
# | input | is |
# | --- | --- |
# | `block` | the x of the block itself |
# | `stream` | what the norm reads that makes x: the residual stream, where x comes from a norm |
# | `previous` | the x of the block of the layer before, which is there while attention still computes |


INPUTS = ("block", "stream", "previous")

PREDICTORS = "predictors.layers."
"""What the names of predictors' own parameters begin with; layer, dot and the parameter follow."""


def gating_weights(block: Mapping[str, Any], *, with_bias: bool) -> list[Node]:
    """The matrix that decides, of the arguments of an `ffn` or `sparse_ffn`; and its bias, if asked for and there."""
    side = gating_side(block)
    weights = [block[side], block[f"{side}_bias"]] if with_bias else [block[side]]
    return [weight for weight in weights if weight is not None]


def gating_side(block: Mapping[str, Any]) -> str:
    """`gate`, or `up` where there is no gate."""
    return "up" if block["gate"] is None else "gate"


def stream_of(x: Node) -> Node | None:
    """What the norm reads that makes `x`; None where no norm does."""
    return arguments(x)["x"] if is_call(x, RMS_NORM, LAYER_NORM) else None
