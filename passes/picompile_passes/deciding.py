"""What predictors are made from: the weights of a block that decide whether a neuron fires, and the inputs there are.

| input | is |
| --- | --- |
| `block` | the x of the block itself |
| `stream` | what the norm reads that makes x: the residual stream, where x comes from a norm |
| `previous` | the x of the block of the layer before, which is there while attention still computes |
"""

from collections.abc import Mapping
from typing import Any

from torch.fx import Node

from picompile_passes.nodes import arguments, is_call
from picompile_passes.operands import LAYER_NORM, RMS_NORM

INPUTS = ("block", "stream", "previous")

PREDICTORS = "predictors.layers."
"""What the names of predictors' own parameters begin with; layer, dot and the parameter follow."""


def deciding_weights(block: Mapping[str, Any], *, with_bias: bool) -> list[Node]:
    """The matrix that decides, of the arguments of an `ffn` or `sparse_ffn`; and its bias, if asked for and there."""
    side = deciding_side(block)
    weights = [block[side], block[f"{side}_bias"]] if with_bias else [block[side]]
    return [weight for weight in weights if weight is not None]


def deciding_side(block: Mapping[str, Any]) -> str:
    """`gate`, or `up` where there is no gate."""
    return "up" if block["gate"] is None else "gate"


def stream_of(x: Node) -> Node | None:
    """What the norm reads that makes `x`; None where no norm does."""
    return arguments(x)["x"] if is_call(x, RMS_NORM, LAYER_NORM) else None
