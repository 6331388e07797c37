"""Notes on every node what one token costs there."""

from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.fx import Node

from picompile_passes.base import Pass, Stage
from picompile_passes.graph.nodes import arguments, constant_nodes, is_call
from picompile_passes.graph.operands import ATTENTION, DEQUANTIZE, EMBEDDING, SPARSE_FFN
from picompile_passes.graph.rewriter import Rewriter


@dataclass(frozen=True)
class CountWeightBytes(Pass):
    """Notes on every node that depends on the tokens what one token costs there; changes nothing else.

    1. `weight_bytes`: bytes of all constants that the node uses, as the stage stores them: 4 an element, 8 an element
       of a table of rows, packed rows where the matrix is quantized. An embedding reads one row.
    2. `flops`: two for each element of the matrices that it multiplies with.
    3. Attention multiplies with no constant: `flops_per_visible_token` is for each token that it looks back on.

    Every neuron counts, whether it fires or not. What a block and its predictor both use counts for the predictor
    alone, which has read it when the block comes; so the notes of all nodes add up to the cost of a token.
    """

    name: ClassVar[str] = "count-weight-bytes"
    requires: ClassVar[Stage] = Stage.CANONICAL
    ensures: ClassVar[Stage | None] = None

    def rewrite(self, rewriter: Rewriter) -> None:
        """Applies the rules. A graph that says all this already stays as it is."""
        constants = constant_nodes(rewriter.graph)
        for node in rewriter.graph.nodes:
            if node.op == "call_function" and node not in constants:
                used = _used(node, constants)
                rewriter.annotate(node, weight_bytes=_weight_bytes(node, used))
                if is_call(node, ATTENTION):
                    rewriter.annotate(node, flops_per_visible_token=_attention_flops(node))
                else:
                    rewriter.annotate(node, flops=_flops(node, used))


def _used(node: Node, constants: Set[Node]) -> list[Node]:
    """The constants that are read for the sake of `node`."""
    predictor = arguments(node)["mask"].all_input_nodes if is_call(node, SPARSE_FFN) else ()
    return [operand for operand in node.all_input_nodes if operand in constants and operand not in predictor]


def _weight_bytes(node: Node, used: list[Node]) -> int:
    stored = [_value(operand.all_input_nodes[0] if is_call(operand, DEQUANTIZE) else operand) for operand in used]
    total = sum(value.numel() * value.element_size() for value in stored)
    return total // int(stored[0].shape[0]) if is_call(node, EMBEDDING) else total


def _flops(node: Node, used: list[Node]) -> int:
    multiplied = [] if is_call(node, EMBEDDING) else [_value(operand) for operand in used]
    return 2 * sum(value.numel() for value in multiplied if value.dim() == 2)


def _attention_flops(node: Node) -> int:
    """Each head multiplies its query with a key, and the value of that token with the result."""
    values = arguments(node)
    query, value = int(_value(values["q"]).shape[1]), int(_value(values["v"]).shape[1])
    return 2 * (query + value // int(values["kv_heads"]) * int(values["heads"]))


def _value(node: Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value
