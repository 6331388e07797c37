"""The matrices of a quantized graph that can be rounded with compensation, and the inputs that they share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from picompile.streaming import Segment
from picompile_passes.dialect.neurons import neuron_rms
from picompile_passes.dialect.sparse_ffn import SparseFfnOperands
from picompile_passes.formats import FORMATS
from picompile_passes.graph.axes import axes_of
from picompile_passes.graph.nodes import arguments, attribute, has_real_data, is_call
from picompile_passes.graph.operands import (
    DEQUANTIZE,
    EMBEDDING,
    INDEX_SELECT,
    LINEAR,
    PREDICTORS,
    QUANTIZE,
    SPARSE_FFN,
    TRANSPOSE,
    dequantized,
    expert_count,
)


class MatrixKey(NamedTuple):
    """A packed matrix: the parameter that it is made of, and whether it is the parameter's transpose."""

    parameter: str
    transposed: bool


@dataclass(frozen=True)
class Matrix:
    """A matrix, the value of the node `value`; the graph packs all or some of its rows in the format `form`.

    Its rows are outputs or, with `rows_are_inputs`, inputs: the neurons of a down matrix.
    """

    key: MatrixKey
    form: str
    value: Node
    rows_are_inputs: bool

    @property
    def inputs(self) -> int:
        """The number of its inputs."""
        rows, columns = self.value.meta["val"].shape
        return int(rows if self.rows_are_inputs else columns)


@dataclass
class InputGroup:
    """Matrices that have the same inputs, in the order in which the graph uses them.

    `node` has the inputs as its value or, with `of_neurons`, is the block whose neurons' outputs they are.
    """

    node: Node
    of_neurons: bool
    matrices: list[Matrix]


def input_groups(segment: Segment) -> Sequence[InputGroup]:
    """Return the matrices of a segment to round, by the inputs that they share, in the order of the graph.

    Left out are floating-point matrices, those that an embedding looks up too, those of predictors, those of experts,
    and those that are computed from several parameters.
    """
    groups: dict[tuple[Node, bool], InputGroup] = {}
    taken: set[MatrixKey] = set()
    for node in segment.nodes:
        for operand, source, of_neurons in _operands(node):
            matrix = _matrix(operand, of_neurons)
            if matrix is None or matrix.key in taken:
                continue
            taken.add(matrix.key)
            group = groups.setdefault((source, of_neurons), InputGroup(source, of_neurons, []))
            group.matrices.append(matrix)
    return list(groups.values())


def _operands(node: Node) -> Sequence[tuple[Node, Node, bool]]:
    """Return each matrix of a call, the node of its inputs, and whether they are the outputs of the call's neurons."""
    if is_call(node, LINEAR):
        values = arguments(node)
        return [(values["weight"], values["x"], False)]
    if is_call(node, SPARSE_FFN) and not expert_count(node):
        values = arguments(node)
        before = [(values[name], values["x"], False) for name in ("gate", "up") if values[name] is not None]
        return [*before, (values["down"], node, True)]
    return []


def _matrix(operand: Node, rows_are_inputs: bool) -> Matrix | None:
    # Down of a block that computes all of its neurons is packed by its outputs.
    operand, rows_are_inputs = dequantized(operand), rows_are_inputs and not is_call(operand, TRANSPOSE)
    if not is_call(operand, DEQUANTIZE):
        return None
    quantized = arguments(operand)["packed"]
    if not is_call(quantized, QUANTIZE):
        return None
    form, source = arguments(quantized)["format"], source_of(arguments(quantized)["weight"])
    looked_up = any(is_call(user, EMBEDDING) for user in operand.users)
    if source is None or looked_up or not FORMATS[form].scale_bytes or str(source.target).startswith(PREDICTORS):
        return None
    value = _whole(arguments(quantized)["weight"])
    return Matrix(MatrixKey(str(source.target), is_call(value, TRANSPOSE)), form, value, rows_are_inputs)


def source_of(matrix: Node) -> Node | None:
    """Return the parameter of a matrix: itself, its transpose or some rows of it. None if the matrix is computed."""
    whole = _whole(matrix)
    source = whole.all_input_nodes[0] if is_call(whole, TRANSPOSE) else whole
    is_parameter = source.op == "get_attr" and not has_real_data(attribute(source.graph.owning_module, source.target))  # type: ignore[arg-type]
    return source if is_parameter else None


def parameter_of(matrix: Node) -> Node | None:
    """Return the parameter whose elements are those of a matrix, or some of them, however they were moved.

    None if the matrix is computed.
    """
    stack = axes_of(_whole(matrix))
    if stack is None or has_real_data(attribute(matrix.graph.owning_module, str(stack.parameter.target))):  # type: ignore[arg-type]
        return None
    return stack.parameter


def _whole(matrix: Node) -> Node:
    """Return the matrix that `matrix` takes rows from, which are rounded one by one, or `matrix` itself."""
    if is_call(matrix, INDEX_SELECT) and matrix.args[1] == 0:
        return matrix.all_input_nodes[0]
    return matrix


class Moments:
    """The second moments of inputs: Σ x · xᵀ over all tokens, float32 [inputs, inputs]."""

    def __init__(self, inputs: int) -> None:
        """Begin with no token."""
        self.sum = torch.zeros(inputs, inputs)

    def add(self, x: Tensor) -> None:
        """Add the inputs x [tokens, inputs]."""
        self.sum.addmm_(x.T, x)

    def add_neurons(self, *operands: Any, **named: Any) -> Tensor:
        """Add the outputs of a block's neurons, those that it keeps alone.

        Takes what `sparse_ffn` takes, and returns nothing. A norm across the neurons, which comes behind down, divides
        each token's outputs as the block's own would.
        """
        block = SparseFfnOperands(*operands, **named)
        kept = block.kept_outputs()
        self.add(kept / neuron_rms(kept, _NORM_EPS) if block.squares else kept)
        return block.x.new_empty(0)


# Keeps silent tokens from dividing by zero; what a norm's own epsilon would change is far below a rounding.
_NORM_EPS = 1e-6
