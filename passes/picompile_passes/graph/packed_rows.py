"""The rows that a `quantize` packs, read from a weight source in runs of matrices.

The matrices of a layer's experts are one parameter, a stack, of which float32 takes gigabytes: 2.4 GB in a layer of
Qwen3-30B-A3B, 45 GB in one of DeepSeek V3. Rows are packed each by itself. So a run of matrices is read, converted,
rounded and packed before the next one is read: beside the packed rows, memory holds one run.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from picompile_passes.formats.packing import quantize_rows
from picompile_passes.graph.axes import MATRIX_AXES, TRANSPOSED_AXES, axes_of
from picompile_passes.graph.nodes import attribute, has_real_data, is_call
from picompile_passes.graph.operands import INDEX_SELECT, PREDICTORS, QUANTIZE
from picompile_passes.graph.weight_source import WeightSource, as_run, checked_shape, load_rows, take_rows

# A run has so many bytes in float32, or is one matrix.
_RUN_BYTES = 256 << 20


@dataclass(frozen=True)
class PackedRows:
    """Rows of the parameter `name`, a matrix or a stack of matrices, which are packed in the format `form`.

    `expected` has the parameter's shape in the graph. With `transposed`, rows are those of each matrix's transpose.
    `table`, int64, has the numbers of the rows, counted over all matrices; None stands for all of them.
    """

    name: str
    expected: Tensor
    form: str
    transposed: bool = False
    table: Tensor | None = None

    def pack(self, weights: WeightSource) -> Tensor:
        """Return the rows packed, uint8 [rows, row bytes], without rounding where `weights` has their bytes already.

        Raises `PassesError` for a parameter that `weights` lacks or holds in another shape.
        """
        packed: Callable[..., Tensor | None] | None = getattr(weights, "packed", None)
        if packed is not None and not self.name.startswith(PREDICTORS):
            wanted = () if self.table is None else (self.table,)
            known = packed(self.name, self.form, self.transposed, *wanted)
            if known is not None:
                return known
        return self._rounded(weights)

    def _rounded(self, weights: WeightSource) -> Tensor:
        """Return the rows rounded and packed, run by run."""
        shape = checked_shape(weights, self.name, self.expected)
        rows_each, columns = shape[-2:][::-1] if self.transposed else shape[-2:]
        count = math.prod(shape[:-2]) * rows_each if self.table is None else len(self.table)
        result: Tensor | None = None
        for places, rows in self._runs(shape, rows_each):
            packed = quantize_rows(self._values(weights, shape, rows), self.form)
            if len(packed) == count:
                return packed
            if result is None:
                result = torch.empty(count, packed.shape[1], dtype=torch.uint8)
            result[as_run(places)] = packed
        return quantize_rows(torch.empty(0, columns), self.form) if result is None else result

    def _runs(self, shape: tuple[int, ...], rows_each: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows of a run of matrices that are wanted: their places among all that are, and their numbers."""
        matrices, matrix_bytes = math.prod(shape[:-2]), 4 * math.prod(shape[-2:])
        step = max(1, _RUN_BYTES // max(1, matrix_bytes)) * rows_each
        for start in range(0, matrices * rows_each, max(1, step)):
            stop = min(matrices * rows_each, start + step)
            rows = places = torch.arange(start, stop)
            if self.table is not None:
                places = ((self.table >= start) & (self.table < stop)).nonzero().flatten()
                rows = self.table[places]
            if len(rows):
                yield places, rows

    def _values(self, weights: WeightSource, shape: tuple[int, ...], rows: Tensor) -> Tensor:
        """Return the values of rows of a run, [rows, columns]."""
        if not self.transposed:
            return load_rows(weights, self.name, rows)
        height, width = shape[-2:]
        first, last = (int(end) // width for end in torch.aminmax(rows))
        stored = load_rows(weights, self.name, torch.arange(first * height, (last + 1) * height))
        turned = stored.view(-1, height, width).transpose(1, 2)
        return take_rows(turned, rows - first * width)


def packed_rows(graph_module: GraphModule, node: Node) -> PackedRows | None:
    """Return what a `quantize` packs: rows of a parameter, of its transpose, or of a stack of either.

    None for any other node, and where more than that is packed, such as a sum.
    """
    if not is_call(node, QUANTIZE):
        return None
    matrix, form = node.args
    table: Tensor | None = None
    if is_call(matrix, INDEX_SELECT):
        matrix, dim, rows = matrix.args  # type: ignore[union-attr]
        if dim != 0 or not isinstance(rows, Node) or rows.op != "get_attr":
            return None
        table = attribute(graph_module, str(rows.target))
    stack = axes_of(matrix) if isinstance(matrix, Node) else None
    if stack is None or stack.axes not in (*MATRIX_AXES, *TRANSPOSED_AXES):
        return None
    name = str(stack.parameter.target)
    parameter = attribute(graph_module, name)
    if has_real_data(parameter):
        return None
    return PackedRows(name, parameter, str(form), stack.axes in TRANSPOSED_AXES, table)
