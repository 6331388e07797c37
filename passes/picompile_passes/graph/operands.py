"""The operators that our passes match, by name, and the operands of calls: matrices, rows of neurons.

`SharedConstants`, `Projection` and `input_rows` make the operands of new nodes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from picompile_passes.dialect import OPERATORS, operator_of
from picompile_passes.dialect.state import State
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


ADD = OPERATORS["add"].target
TRANSPOSE: OpOverload = torch.ops.aten.transpose.int
RESHAPE: OpOverload = torch.ops.aten.reshape.default
INDEX_SELECT: OpOverload = torch.ops.aten.index_select.default
EMBEDDING = OPERATORS["embedding"].target
LINEAR = OPERATORS["linear"].target
RMS_NORM = OPERATORS["rms_norm"].target
LAYER_NORM = OPERATORS["layer_norm"].target
ROTARY = OPERATORS["rotary"].target
ATTENTION = OPERATORS["attention"].target
FFN = OPERATORS["ffn"].target
ROUTE = OPERATORS["route"].target
PREDICT = OPERATORS["predict"].target
SPARSE_FFN = OPERATORS["sparse_ffn"].target
DIVIDE_BY_RMS = OPERATORS["divide_by_rms"].target
ELEMENTWISE = OPERATORS["elementwise"].target
QUANTIZE = OPERATORS["quantize"].target
DEQUANTIZE = OPERATORS["dequantize"].target

# Operators that only move elements, of which constants may be made besides pointwise ones.
_MOVES_CONSTANTS: frozenset[Any] = frozenset(
    {
        TRANSPOSE,
        INDEX_SELECT,
        *(RESHAPE, torch.ops.aten.view.default, torch.ops.aten.expand.default),
        *(torch.ops.aten.flatten.using_ints, torch.ops.aten.unsqueeze.default, torch.ops.aten.cat.default),
        *(torch.ops.aten.slice.Tensor, torch.ops.aten.squeeze.dim, torch.ops.aten.permute.default),
        *(torch.ops.aten.t.default, torch.ops.aten.select.int, torch.ops.aten.stack.default),
        torch.ops.aten._unsafe_view.default,
        *(torch.ops.aten.contiguous.default, torch.ops.aten.clone.default, torch.ops.aten.unflatten.int),
    }
)


def makes_constants(target: object) -> bool:
    """Return whether constants may be computed by `target`: it moves elements, or computes each from others alone."""
    if target in _MOVES_CONSTANTS:
        return True
    return isinstance(target, OpOverload) and target.namespace == "aten" and torch.Tag.pointwise in target.tags


# The arguments of a feed-forward block that have one row for each neuron.
NEURON_ROWS = OPERATORS["ffn"].neuron_operands

# Those of a `sparse_ffn` that have one number for each neuron, below which the neuron is left out.
NEURON_LIMITS = tuple(name for name in OPERATORS["sparse_ffn"].neuron_operands if name.endswith("_limits"))

# All that a `sparse_ffn` over some of the rows takes these rows of.
NEURON_OPERANDS = (*NEURON_ROWS, *NEURON_LIMITS)


def state_of(node: Node) -> State | None:
    """Return the state that `node` keeps between tokens, or None."""
    operator = operator_of(node.target)
    return None if operator is None else operator.state


def matrix_operands(node: Node) -> list[Node]:
    """Return the matrices that `node` multiplies with, in the order of its arguments; maybe none."""
    operator = operator_of(node.target)
    if operator is None or not operator.packed:
        return []
    values, found = arguments(node), list[object]()
    for name in operator.packed:
        value = values[name]
        found.extend(value if isinstance(value, (list, tuple)) else [value])
    return [operand for operand in found if isinstance(operand, Node) and operand.meta["val"].dim() == 2]


def computes_every_neuron(node: Node, *, hot: bool = False) -> bool:
    """Return whether `node` is a block of which every neuron is computed for every token, and that is in one part.

    A block that is marked as hot or cold does not count, unless it is hot and `hot` is set.
    """
    if not is_call(node, SPARSE_FFN) or node.meta.get("neurons") not in (None, *(("hot",) if hot else ())):
        return False
    values = arguments(node)
    if is_call(values["down"], INDEX_SELECT):  # a part
        return False
    chosen = values["squares"] or any(values[name] is not None for name in ("neurons", *NEURON_LIMITS))
    return not chosen and bool(arguments(values["mask"])["kind"] == "none")


def dequantized(operand: Node) -> Node:
    """Return the `dequantize` of a matrix in a quantized graph: the operand itself, or what it is made of by moves."""
    while is_call(operand, TRANSPOSE, RESHAPE):
        operand = operand.all_input_nodes[0]
    return operand


def by_outputs(rewriter: Rewriter, down: Node, experts: int, before: Node) -> Node:
    """Return down, the rows [F, D] of neurons, as a matrix with a row for each output: [D, F].

    Of G experts it has a row for each output of each expert, [G · D, F / G]; `experts` is 0 without them.
    """
    if not experts:
        return input_rows(rewriter, down, before)
    rows, columns = (int(size) for size in down.meta["val"].shape)
    stack = down.all_input_nodes[0] if is_call(down, RESHAPE) else None
    if stack is not None and is_call(stack, TRANSPOSE) and tuple(stack.args[1:]) == (1, 2):
        outputs = stack.all_input_nodes[0]
        if tuple(outputs.meta["val"].shape) == (experts, columns, rows // experts):
            return rewriter.call(RESHAPE, (outputs, [experts * columns, -1]), before=before, sources=(down,))
    return _turned(rewriter, down, experts, before)


def by_neurons(rewriter: Rewriter, outputs: Node, experts: int, before: Node) -> Node:
    """Return the rows [F, D] of neurons of a matrix that `by_outputs` made."""
    if not experts:
        return rewriter.call(TRANSPOSE, (outputs, 0, 1), before=before, sources=(outputs,))
    return _turned(rewriter, outputs, experts, before)


def _turned(rewriter: Rewriter, matrix: Node, experts: int, before: Node) -> Node:
    """Return the transposes of the matrices of experts that lie one behind the other in `matrix`."""
    columns = int(matrix.meta["val"].shape[1])
    by_expert = rewriter.call(RESHAPE, (matrix, [experts, -1, columns]), before=before, sources=(matrix,))
    turned = rewriter.call(TRANSPOSE, (by_expert, 1, 2), before=before, sources=(matrix,))
    return rewriter.call(RESHAPE, (turned, [experts * columns, -1]), before=before, sources=(matrix,))


def expert_count(node: Node) -> int:
    """Return the number of experts of a block, 0 for one without."""
    gains = arguments(node)["gains"]
    return 0 if gains is None else int(gains.meta["val"].shape[-1])


@dataclass(frozen=True)
class Projection:
    """The columns `table` of the result of `linear`, all of them where it is None, as a linear of their own."""

    linear: Node
    table: Tensor | None

    def rows(self, rewriter: Rewriter, constants: SharedConstants, before: Node) -> tuple[Node, Node | None]:
        """Return the rows of weight and bias that these columns are computed from."""
        _, weight, bias = self.linear.args
        if self.table is None:
            return weight, bias  # type: ignore[return-value]
        table = constants.get("rows", self.table, self.linear)

        def select(matrix: Node) -> Node:
            return rewriter.call(INDEX_SELECT, (matrix, 0, table), before=before, sources=(matrix,))

        return select(weight), None if bias is None else select(bias)  # type: ignore[arg-type]


def input_rows(rewriter: Rewriter, weight: Node, before: Node) -> Node:
    """Return the transpose [K, N] of the weight of a projection [N, K]: a row for each input (neuron, for down)."""
    if is_call(weight, TRANSPOSE):
        return weight.all_input_nodes[0]
    return rewriter.call(TRANSPOSE, (weight, 0, 1), before=before, sources=(weight,))


def makes_logits(node: Node) -> bool:
    """Return whether the graph returns the value of `node`, or pointwise arithmetic on it."""
    return any(user.op == "output" or (is_call(user, ELEMENTWISE) and makes_logits(user)) for user in node.users)


def makes_choices(node: Node) -> bool:
    """Return whether a `route` chooses experts by the value of `node`, or by pointwise arithmetic on it."""
    return any(is_call(user, ROUTE) or (is_call(user, ELEMENTWISE) and makes_choices(user)) for user in node.users)


INPUTS = ("block", "stream", "previous")
"""The inputs that a learned predictor can read.

| input | is |
| --- | --- |
| `block` | the x of the block itself |
| `stream` | the residual stream: the input of the norm whose result is x |
| `previous` | the x of the block of the layer before, which is ready while attention still computes |
"""

PREDICTORS = "predictors.layers."
"""The prefix of the names of parameters that passes add, whose values say what is skipped: those of predictors, and
limits of neurons. Layer, dot and the parameter follow."""


def is_limit(name: str) -> bool:
    """Return whether the parameter `name` of a graph holds limits of neurons."""
    return name.startswith(PREDICTORS) and name.endswith("_limits")


def gating_weights(block: Mapping[str, Any], *, with_bias: bool) -> list[Node]:
    """Return the gating matrix among the arguments `block` of an `ffn` or `sparse_ffn`; and its bias, if asked for."""
    side = gating_side(block)
    weights = [block[side], block[f"{side}_bias"]] if with_bias else [block[side]]
    return [weight for weight in weights if weight is not None]


def gating_side(block: Mapping[str, Any]) -> str:
    """Return the name of the gating matrix among the arguments of a block: `gate`, or `up` where there is no gate."""
    return "up" if block["gate"] is None else "gate"


def operator_args(target: OpOverload, values: Mapping[str, Any]) -> list[Any]:
    """Return the arguments `values` of an operator, by name, in its order, without defaults at the end."""
    arguments = target._schema.arguments
    args = [values.get(argument.name, argument.default_value) for argument in arguments]
    while arguments[len(args) - 1].has_default_value() and args[-1] is arguments[len(args) - 1].default_value:
        args.pop()
    return args


def stream_of(x: Node) -> Node | None:
    """Return the input of the norm whose result is `x`; None where `x` is not from a norm."""
    return arguments(x)["x"] if is_call(x, RMS_NORM, LAYER_NORM) else None
