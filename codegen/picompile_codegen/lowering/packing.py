"""Packed weights: which constants of the graph become which tensors of `weights.safetensors`.

Nothing is read while the table is built; `PackedTensor.produce` evaluates one tensor when its turn to be written comes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import accumulate
from math import prod

import torch
from torch import Tensor
from torch.fx import Node

from picompile_codegen.lowering.layouts import Evaluate, Floats, Interleaved, Panels
from picompile_codegen.lowering.program import Arg, Space
from picompile_codegen.signs import pack_signs, sign_row_bytes
from picompile_codegen.specs.arguments import ITEM_BYTES
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.formats import FORMATS, PANEL_ROWS
from picompile_passes.formats.panels import has_panels, panel_bytes, to_panels
from picompile_passes.graph.nodes import arguments, is_call
from picompile_passes.graph.operands import (
    DEQUANTIZE,
    EMBEDDING,
    INDEX_SELECT,
    LINEAR,
    PREDICT,
    QUANTIZE,
    RESHAPE,
    SPARSE_FFN,
    TRANSPOSE,
)

_SIGNS = ".signs"
_JOINED = ".joined"
VECTOR_MULTIPLE = 16  # 16 float32 are 64 bytes: a tensor's size stays a multiple of the alignment


@dataclass(frozen=True)
class PackedTensor:
    """One tensor of the weight file: uint8 [rows, row_bytes] or float32 [length].

    `nodes` are the constant subgraphs that `produce` evaluates; none where it computes the tensor from other things.
    What is `shared` is no layer's own: lowering makes it for all that need it, as tables of angles.
    """

    name: str
    shape: tuple[int, ...]
    produce: Callable[[Evaluate], Tensor]
    nodes: tuple[Node, ...] = ()
    dtype: str = "uint8"
    shared: bool = False


@dataclass(frozen=True)
class PackedMatrix:
    """A packed matrix as kernels see it: `rows` rows of `row_bytes` bytes in format `format`, or panels of them.

    It is a weight called `name`, or lies in a buffer of that name, from byte `offset` on.
    """

    name: str
    format: str
    rows: int
    row_bytes: int
    panels: bool = False
    space: Space = "weight"
    offset: int = 0

    @property
    def bytes(self) -> int:
        """Size of the whole matrix."""
        return self.rows * self.row_bytes

    def view(self, part: str) -> Arg:
        """Return the argument for kernel parameter `w.data` or `w.scale`: typed views of the same memory."""
        form = FORMATS[self.format]
        dtype = form.scale_dtype if part == "scale" else form.data_dtype
        rows = self.rows // PANEL_ROWS if self.panels else self.rows
        return Arg(
            self.space, self.name, dtype, shape=(rows, self.bytes // rows // ITEM_BYTES[dtype]), offset=self.offset
        )


@dataclass(frozen=True)
class _Part:
    """A tensor is part of the one called `name`, which has `length` rows or elements: it begins at `start`."""

    name: str
    start: int
    length: int
    nodes: tuple[Node, ...]

    def produce(self, evaluate: Evaluate) -> Tensor:
        """Return the whole tensor."""
        return torch.cat([evaluate(node) for node in self.nodes])


# Constants that keep the name of what they are made of: a matrix is packed once, in one format and one direction.
_SAME_NAME = (TRANSPOSE, QUANTIZE, DEQUANTIZE)


def _parameter_name(node: Node) -> str:
    """Return the name of the tensor a constant subgraph is made of, with what tells it from others of that tensor.

    That is the table that selects its rows, if there is one, or a digest of the computation.
    """
    if node.op == "get_attr":
        return str(node.target)
    name = _parameter_name(node.all_input_nodes[0])
    if is_call(node, INDEX_SELECT):
        _, dim, table = node.args
        return f"{name}[{'' if dim == 0 else f'{dim}:'}{table.target}]" if isinstance(table, Node) else name
    if is_call(node, *_SAME_NAME):
        return name
    return f"{name}.{node.target._opname}.{sha256(_computation(node).encode()).hexdigest()[:12]}"  # type: ignore[union-attr]


def _computation(node: Node) -> str:
    """Return a text that is the same for constants that are computed in the same way from the same tensors."""
    if node.op == "get_attr":
        return str(node.target)
    return f"{node.target}({torch.fx.node.map_arg((node.args, node.kwargs), _computation)})"


def _quantized(operand: Node) -> tuple[Node, str, int]:
    """Return (quantize node, format, columns) of a matrix operand, which the quantized stage guarantees to be
    dequantized."""
    values = arguments(operand)
    return values["packed"], values["format"], values["columns"]


def _require_rows(name: str, format_name: str) -> None:
    """Raise `UnsupportedGraphError` for a matrix in a format that kernels only read in panels."""
    if not FORMATS[format_name].rows:
        raise UnsupportedGraphError(
            f"{name}: no kernel reads single rows of {format_name}, only panels of {PANEL_ROWS}"
        )


def is_whole_block(node: Node) -> bool:
    """Return whether `node` is a block whose down matrix is packed by outputs: it computes every neuron."""
    return is_call(node, SPARSE_FFN) and is_call(arguments(node)["down"], TRANSPOSE, RESHAPE)


def name_and_format(operand: Node) -> tuple[str, str]:
    """Return what a matrix operand is called when it is packed on its own, and its format."""
    packed, format_name, _ = _quantized(operand)
    return _parameter_name(packed), format_name


@dataclass
class WeightTable:
    """All packed tensors of a program, each once, however many calls use it.

    With `panels`, those that are only multiplied with whole are stored in panels, where they can be; without it, only
    those whose format has no rows, and those of whole blocks. `in_rows` names the others. Matrices and vectors that
    were joined are `parts` of other tensors.
    """

    panels: bool = False
    tensors: dict[str, PackedTensor] = field(default_factory=dict)
    in_rows: set[str] = field(default_factory=set)
    parts: dict[str, "_Part"] = field(default_factory=dict)

    def _add(self, tensor: PackedTensor) -> None:
        self.tensors.setdefault(tensor.name, tensor)

    def find_layouts(self, nodes: Iterable[Node]) -> None:
        """Note which matrices some of `nodes` read by rows, before any is added."""
        for node in nodes:
            if not is_call(node, LINEAR, PREDICT, EMBEDDING):
                # A transpose is that of a matrix which is multiplied with whole.
                matrices = (
                    [] if is_whole_block(node) else [each for each in node.all_input_nodes if is_call(each, DEQUANTIZE)]
                )
                self.in_rows.update(_parameter_name(_quantized(each)[0]) for each in matrices)

    def formats(self) -> dict[str, str]:
        """Return the format of each packed matrix, by the name of its tensor."""
        return {
            name: arguments(tensor.nodes[0])["format"]
            for name, tensor in self.tensors.items()
            if tensor.nodes and is_call(tensor.nodes[0], QUANTIZE) and not name.endswith(_SIGNS)
        }

    def join(self, matrices: Sequence[Node], vectors: Sequence[Node | None]) -> None:
        """Let matrices of one format and width, and their biases if they have any, lie one behind the other.

        None of them may have been added by now.
        """
        packed = [_quantized(matrix)[0] for matrix in matrices]
        for nodes in (packed, [vector for vector in vectors if vector is not None]):
            names = [_parameter_name(node) for node in nodes]
            lengths = [int(node.meta["val"].shape[0]) for node in nodes]
            starts = [0, *accumulate(lengths)]
            for name, start in zip(names, starts, strict=False):
                self.parts[name] = _Part(f"{names[0]}{_JOINED}", start, starts[-1], tuple(nodes))

    def joined_matrix(self, operand: Node) -> PackedMatrix:
        """Return the whole matrix that `operand` was joined to."""
        packed, format_name, columns = _quantized(operand)
        part, form = self.parts[_parameter_name(packed)], FORMATS[format_name]
        if form.rows:
            row_bytes = form.row_bytes(columns)
            self._add(PackedTensor(part.name, (part.length, row_bytes), part.produce, part.nodes))
            return PackedMatrix(part.name, format_name, part.length, row_bytes)

        def produce(evaluate: Evaluate) -> Tensor:
            return to_panels(part.produce(evaluate), format_name, columns)

        return self._add_panels(part.name, part.nodes, produce, (format_name, part.length, columns))

    def joined_vector(self, node: Node) -> Arg:
        """Return the whole vector that `node` was joined to."""
        part = self.parts[_parameter_name(node)]
        return self.computed(part.name, (part.length,), part.produce, part.nodes, shared=False)

    def matrix(self, operand: Node) -> PackedMatrix:
        """Add a matrix on its own, or as a part of another."""
        name = _parameter_name(_quantized(operand)[0])
        if name not in self.parts:
            return self.bundle(name, [operand])
        whole, start = self.joined_matrix(operand), self.parts[name].start
        return replace(whole, rows=int(operand.meta["val"].shape[0]), offset=start * whole.row_bytes)

    def whole_matrices(self, operands: Sequence[Node], *, block: bool = False, run: int = 0) -> list[PackedMatrix]:
        """Add matrices that a kernel multiplies with whole, of a whole `block` or others: all in panels, where all can
        be.

        Where the last consists of runs of `run` rows, those of experts, no panel has rows of two.
        """
        has_no_rows = any(not FORMATS[name_and_format(operand)[1]].rows for operand in operands)
        in_panels = (self.panels or block or has_no_rows) and all(map(self._has_panels, operands))
        in_panels &= run == 0 or has_panels(name_and_format(operands[-1])[1], run)
        return [self._in_panels(operand) if in_panels else self.matrix(operand) for operand in operands]

    def _has_panels(self, operand: Node) -> bool:
        packed, format_name, _ = _quantized(operand)
        return _parameter_name(packed) not in self.in_rows and has_panels(
            format_name, int(operand.meta["val"].shape[0])
        )

    def _in_panels(self, operand: Node) -> PackedMatrix:
        packed, format_name, columns = _quantized(operand)
        name, rows = _parameter_name(packed), int(packed.meta["val"].shape[0])
        if name in self.parts:
            return self.matrix(operand)
        return self._add_panels(name, (packed,), Panels(packed, format_name, columns), (format_name, rows, columns))

    def _add_panels(
        self, name: str, nodes: tuple[Node, ...], produce: Callable[[Evaluate], Tensor], shape: tuple[str, int, int]
    ) -> PackedMatrix:
        """Add the panels that `produce` returns, of a matrix of `shape`: format, rows and columns."""
        format_name, rows, columns = shape
        form = FORMATS[format_name]
        self._add(PackedTensor(name, (rows // PANEL_ROWS, panel_bytes(form, columns)), produce, nodes))
        return PackedMatrix(name, format_name, rows, form.panel_row_bytes(columns), panels=True)

    def bundle(self, name: str, operands: list[Node]) -> PackedMatrix:
        """Add matrices of equal shape whose rows interleave: row j · len(operands) + i is row j of operand i.

        Raises `UnsupportedGraphError` where they differ in format, or no kernel reads rows of theirs.
        """
        quantized = [_quantized(operand) for operand in operands]
        _, format_name, columns = quantized[0]
        formats = sorted({form for _, form, _ in quantized})
        if len(formats) > 1:
            raise UnsupportedGraphError(f"{name}: matrices that are read together are {' and '.join(formats)}")
        _require_rows(name, format_name)
        row_bytes = FORMATS[format_name].row_bytes(columns)
        rows = int(operands[0].meta["val"].shape[0]) * len(operands)
        nodes = tuple(node for node, _, _ in quantized)
        self._add(PackedTensor(name, (rows, row_bytes), Interleaved(nodes, rows, row_bytes), nodes))
        return PackedMatrix(name, format_name, rows, row_bytes)

    def signs(self, operand: Node) -> Arg:
        """Add a bit for each weight of a matrix: whether it is below zero, once rounded (see `signs.py`)."""
        packed, format_name, columns = _quantized(operand)
        name = f"{_parameter_name(packed)}{_SIGNS}"
        rows, row_bytes = int(operand.meta["val"].shape[0]), sign_row_bytes(columns)

        def produce(evaluate: Evaluate) -> Tensor:
            return pack_signs(evaluate(packed), format_name, columns)

        self._add(PackedTensor(name, (rows, row_bytes), produce, (packed,)))
        return Arg("weight", name, "int32", (rows, row_bytes // 4))

    def numbers(self, node: Node) -> Arg:
        """Add a table of integers, stored as the bytes of int32 and zero-padded to the alignment."""
        count = int(node.meta["val"].shape[0])
        return self.integers(_parameter_name(node), count, lambda evaluate: evaluate(node), (node,))

    def integers(
        self, name: str, count: int, produce: Callable[[Evaluate], Tensor], nodes: tuple[Node, ...] = ()
    ) -> Arg:
        """Add any table of `count` integers, stored in the same way."""
        stored = -(-count // VECTOR_MULTIPLE) * VECTOR_MULTIPLE

        def padded(evaluate: Evaluate) -> Tensor:
            values = torch.zeros(stored, dtype=torch.int32)
            values[:count] = produce(evaluate)
            return values.view(torch.uint8)

        self._add(PackedTensor(name, (stored * 4,), padded, nodes))
        return Arg("weight", name, "int32", (count,))

    def vector(self, node: Node) -> Arg:
        """Add a float32 vector: a bias or the weight of a norm."""
        length = int(node.meta["val"].shape[0])
        name = _parameter_name(node)
        if name in self.parts:
            return replace(self.joined_vector(node), shape=(length,), offset=self.parts[name].start * 4)
        return self._floats(name, length, node)

    def flat(self, node: Node) -> Arg:
        """Add any float32 tensor as a vector of its elements, row by row."""
        size, name = prod(int(size) for size in node.meta["val"].shape), _parameter_name(node)
        return self._floats(name, size, node)

    def _floats(self, name: str, count: int, node: Node) -> Arg:
        stored = -(-count // VECTOR_MULTIPLE) * VECTOR_MULTIPLE
        self._add(PackedTensor(name, (stored,), Floats(node, count, stored), (node,), dtype="float32"))
        return Arg("weight", name, "float32", (count,))

    def computed(
        self,
        name: str,
        shape: tuple[int, ...],
        produce: Callable[[Evaluate], Tensor],
        nodes: tuple[Node, ...] = (),
        *,
        shared: bool = True,
    ) -> Arg:
        """Add any tensor as float32, stored flat and zero-padded to the alignment."""
        count = prod(shape)
        stored = -(-count // VECTOR_MULTIPLE) * VECTOR_MULTIPLE

        def padded(evaluate: Evaluate) -> Tensor:
            values = torch.zeros(stored, dtype=torch.float32)
            values[:count] = produce(evaluate).reshape(-1)
            return values

        self._add(PackedTensor(name, (stored,), padded, nodes, dtype="float32", shared=shared))
        return Arg("weight", name, "float32", shape)
