"""MXFP4 of gpt-oss: the matrices of all experts of a layer as one tensor of blocks.

`gate_up_proj_blocks` and `down_proj_blocks` are uint8 [experts, rows, blocks, 16]: 32 FP4 numbers in a block.
`..._scales` [experts, rows, blocks] have the exponent of a power of two for each. The parameter of transformers' class
is [experts, inputs, rows], the transpose of each expert's matrix; other matrices are plain.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from picompile.errors import UnsupportedModelError
from picompile.frontend.stored.blocks import ScaledBlocks
from picompile.frontend.stored.fp4 import fp4_blocks
from picompile.frontend.stored.record import Found, Method, Settings, StoredFiles, StoredMatrix
from picompile.frontend.tensor_file import TensorHeader
from picompile_passes.graph.weight_source import take_rows

_STACKS = ("gate_up_proj", "down_proj", "up_proj")
_BLOCK, _BLOCK_BYTES = 32, 16


@dataclass(frozen=True)
class _Transposes:
    """The matrices of `experts` experts, as the stack of their transposes.

    `codes` uint8 [rows of all experts, inputs / 2] are pairs of FP4 numbers, `exponents` those of their blocks.
    """

    codes: Tensor
    exponents: Tensor
    experts: int
    some_rows: bool = True

    def values(self) -> Tensor:
        """Return the weights, float32 [experts, inputs, rows]; a view."""
        return self._turned(0, self.experts)

    def values_of(self, rows: Tensor) -> Tensor:
        """Return `rows` of the weights, counted over all experts: float32 [n, rows of an expert's matrix]."""
        inputs = self.codes.shape[1] * 2
        first, last = (int(end) // inputs for end in torch.aminmax(rows))
        return take_rows(self._turned(first, last + 1), rows - first * inputs)

    def _turned(self, first: int, last: int) -> Tensor:
        """Return the weights of the experts from `first` to before `last`."""
        height = len(self.codes) // self.experts
        values = self._rows(slice(first * height, last * height)).values()
        return values.view(last - first, height, -1).transpose(1, 2)

    def stored_format(self) -> str | None:
        """Return the format that has the weights, row by row; None where there is none."""
        return self._rows(None).stored_format()

    def packed(self, format_name: str, rows: Tensor | None = None) -> Tensor | None:
        """Return rows of all experts packed, all without `rows`, where the format has all weights; else None."""
        return self._rows(rows).packed(format_name)

    def _rows(self, rows: Tensor | slice | None) -> ScaledBlocks:
        codes, exponents = (each if rows is None else each[rows] for each in (self.codes, self.exponents))
        return fp4_blocks(codes, exponents, _BLOCK, "mxfp4")


def _open(settings: Settings) -> Callable[[StoredFiles], Found]:
    def find(files: StoredFiles) -> Found:
        names = [(module, name) for name in _STACKS for module in files.modules(f"{name}_blocks")]
        # Which module is which parameter is known from the whole name.
        return Found({f"{module}.{name}": _stack(files, module, name) for module, name in names})

    return find


def _stack(files: StoredFiles, module: str, name: str) -> StoredMatrix:
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    header = files.needed(module, blocks, blocks, ("U8",))
    beside = files.needed(module, scales, blocks, ("U8",))
    if len(header.shape) != 4 or header.shape[-1] != _BLOCK_BYTES or 0 in header.shape:
        raise UnsupportedModelError(
            f"{header.file}: {module}.{blocks} is {list(header.shape)}; blocks of {_BLOCK_BYTES} bytes are read, "
            "[experts, rows, blocks, bytes]"
        )
    if beside.shape != header.shape[:-1]:
        raise UnsupportedModelError(
            f"{beside.file}: {module}.{scales} is {list(beside.shape)}, but {list(header.shape)} needs "
            f"{list(header.shape[:-1])}"
        )
    experts, rows, groups = beside.shape

    def numbers() -> _Transposes:
        stored = files.read(module, blocks).reshape(experts * rows, groups * _BLOCK_BYTES)
        exponents = files.read(module, scales).reshape(experts * rows, groups)
        return _Transposes(stored, exponents, experts)

    shape = (experts, groups * _BLOCK, rows)
    stack = TensorHeader(header.file, "F32", shape, f"{module}.{name}", quantized=True)
    return StoredMatrix(stack, frozenset((f"{module}.{blocks}", f"{module}.{scales}")), numbers, turned=True)


METHOD = Method(
    names=("mxfp4",),
    title="MXFP4",
    summary="mxfp4 (gpt-oss)",
    marks=("_proj_blocks", "_proj_scales"),
    open=_open,
)
