"""bitsandbytes: 4-bit codes of a table (NF4, FP4), and LLM.int8().

4 bits: `weight`, bytes of two codes each, the first in the high half, of the matrix row by row. A weight is
`quant_map`[code] × `absmax`[block], for blocks of so many weights side by side as the JSON in `quant_state` says. With
double quantization `absmax` are bytes themselves: absmax is `nested_quant_map`[byte] × `nested_absmax`[block] + offset.

LLM.int8(): `weight`, int8 [outputs, inputs], times `SCB`[output] / 127.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from picompile.errors import UnsupportedModelError
from picompile.frontend.stored.blocks import (
    Coded,
    ScaledBlocks,
    codes_of,
    look_up,
    matrix_shape,
    numbers_of,
    pair_table,
)
from picompile.frontend.stored.record import (
    FLOAT_DTYPES,
    Found,
    Method,
    Settings,
    StoredFiles,
    StoredMatrix,
    as_float16,
)
from picompile_passes.formats import FORMATS

_STATE = "weight.quant_state.bitsandbytes__"
_TYPES = ("nf4", "fp4")
_PARTS_4 = (
    *("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
    *(_STATE + kind for kind in _TYPES),
)
_PARTS_8 = ("weight", "SCB", "weight_format")
# The JSON that bitsandbytes writes has some 200 bytes.
_MOST_STATE_BYTES = 1 << 16
_STEPS_8 = 127.0
_NF4 = "nf4"
# Bytes of codes that are looked up at a time.
_BYTES = 1 << 18


def _open(settings: Settings) -> Callable[[StoredFiles], Found]:
    return _find


def _find(files: StoredFiles) -> Found:
    matrices = {module: _matrix_4(files, module) for module in list(files.modules("weight.absmax"))}
    matrices |= {module: _matrix_8(files, module) for module in list(files.modules("SCB"))}
    return Found(matrices)


def _matrix_8(files: StoredFiles, module: str) -> StoredMatrix:
    files.needed(module, "weight", "SCB", ("I8",))
    shape, scale = matrix_shape(files, module, "weight"), files.needed(module, "SCB", "weight", FLOAT_DTYPES)
    if scale.shape != (shape[0],):
        raise UnsupportedModelError(
            f"{scale.file}: {module}.SCB is {list(scale.shape)}, but {list(shape)} needs [{shape[0]}]"
        )
    # Orders of LLM.int8() that only some GPUs have were written with a number of their own.
    if files.part(module, "weight_format") is not None and bool(files.read(module, "weight_format").any()):
        raise UnsupportedModelError(f"{scale.file}: {module}.weight_format is not row: its order is a GPU's own")

    def numbers() -> ScaledBlocks:
        scales = files.scales(module, "SCB").to(torch.float32).view(-1, 1) / _STEPS_8
        numbers = numbers_of(files, module, "weight")
        return ScaledBlocks(numbers, shape, scales, (1, shape[1]), coded=codes_of(files, module))

    return files.matrix(module, _PARTS_8, shape, numbers)


@dataclass(frozen=True)
class _State:
    """The contents of `quant_state`: `shape` [outputs, inputs], weights of a block, and double quantization's."""

    shape: tuple[int, int]
    block: int
    nested_block: int
    offset: float


def _matrix_4(files: StoredFiles, module: str) -> StoredMatrix:
    kinds = [kind for kind in _TYPES if files.part(module, _STATE + kind) is not None]
    file = files.headers[f"{module}.weight.absmax"].file
    if len(kinds) != 1:
        raise UnsupportedModelError(f"{file}: {module} needs one of {' and '.join(_STATE + kind for kind in _TYPES)}")
    state = _read_state(files, module, _STATE + kinds[0])
    _check_4(files, module, state)
    return files.matrix(module, _PARTS_4, state.shape, lambda: _Coded(files, module, state))


def _read_state(files: StoredFiles, module: str, part: str) -> _State:
    header = files.headers[f"{module}.{part}"]
    bad = UnsupportedModelError(f"{header.file}: {module}.{part} has no JSON of bitsandbytes with shape and blocksize")
    if header.dtype != "U8" or len(header.shape) != 1 or header.shape[0] > _MOST_STATE_BYTES:
        raise bad
    try:
        content: Any = json.loads(bytes(files.read(module, part).tolist()))
        shape, block = content["shape"], content["blocksize"]
        nested, offset = content.get("nested_blocksize", 1), float(content.get("nested_offset", 0.0))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise bad from error
    sizes = [*shape, block, nested] if isinstance(shape, list) and len(shape) == 2 else [0]
    if any(type(size) is not int or not 1 <= size < 1 << 31 for size in sizes) or not math.isfinite(offset):
        raise bad
    return _State((shape[0], shape[1]), block, nested, offset)


def _check_4(files: StoredFiles, module: str, state: _State) -> None:
    weight = files.needed(module, "weight", "weight.absmax", ("U8", "I8", *FLOAT_DTYPES))
    nested = files.part(module, "weight.nested_absmax") is not None
    count = state.shape[0] * state.shape[1]
    blocks = -(-count // state.block)
    sizes = {"weight.absmax": blocks, "weight.quant_map": 16}
    files.needed(module, "weight.absmax", "weight", ("U8",) if nested else ("F32",))
    files.needed(module, "weight.quant_map", "weight.absmax", ("F32",))
    if nested:
        files.needed(module, "weight.nested_absmax", "weight.absmax", ("F32",))
        files.needed(module, "weight.nested_quant_map", "weight.absmax", ("F32",))
        sizes |= {"weight.nested_absmax": -(-blocks // state.nested_block), "weight.nested_quant_map": 256}
    stored = {part: math.prod(files.headers[f"{module}.{part}"].shape) for part in sizes}
    element = {"U8": 1, "I8": 1, "F32": 4}.get(weight.dtype, 2)
    sizes["weight"], stored["weight"] = (count + 1) // 2, math.prod(weight.shape) * element
    for part, size in sizes.items():
        if stored[part] != size and not (part == "weight" and size < stored[part] < size + element):
            raise UnsupportedModelError(
                f"{weight.file}: {module}.{part} has {stored[part]} numbers, but {list(state.shape)} in blocks of "
                f"{state.block} need {size}"
            )


@dataclass(frozen=True)
class _Coded:
    """A matrix of 4-bit codes."""

    files: StoredFiles
    module: str
    state: _State

    def values(self) -> Tensor:
        """Return the weights, float32 [outputs, inputs]."""
        files, module, block = self.files, self.module, self.state.block
        table = pair_table(files.scales(module, "weight.quant_map").view(-1), low_first=False)
        absmax = self._absmax()
        stored = files.read(module, "weight").reshape(-1).view(torch.uint8)
        count = self.state.shape[0] * self.state.shape[1]
        padded = -(-count // block) * block
        values = torch.empty(padded + padded % 2)
        for start in range(0, (count + 1) // 2, _BYTES):
            part = stored[start : min((count + 1) // 2, start + _BYTES)]
            values[2 * start : 2 * (start + len(part))] = look_up(part, table).view(-1)
        values[:padded].view(-1, block).mul_(absmax.view(-1, 1))
        return values[:count].view(self.state.shape)

    def stored_format(self) -> str | None:
        """Return nf4 where the table is NF4's, and blocks are whole groups of a row."""
        return None if self._scales_of_nf4() is None else _NF4

    def packed(self, format_name: str) -> Tensor | None:
        """Return the rows packed as nf4, uint8 [outputs, row bytes]; None for other formats, tables and blocks."""
        scales = self._scales_of_nf4() if format_name == _NF4 else None
        if scales is None:
            return None
        outputs, inputs = self.state.shape
        stored = self.files.read(self.module, "weight").reshape(-1).view(torch.uint8)[: outputs * inputs // 2]
        pairs, table = stored.view(outputs, -1), pair_table(torch.arange(16, dtype=torch.uint8), low_first=False)
        return Coded(_NF4, lambda start, stop: look_up(pairs[start:stop], table)).packed(self.state.shape, scales)

    def _scales_of_nf4(self) -> Tensor | None:
        """Return the scale of each group of a row, float32 [outputs, groups]; None where nf4 has not the weights."""
        form, (outputs, inputs), block = FORMATS[_NF4], self.state.shape, self.state.block
        table = self.files.scales(self.module, "weight.quant_map").view(-1)
        if not torch.equal(table, torch.tensor(form.table)) or block % form.group or inputs % form.group:
            return None
        halves = as_float16(self._absmax())
        if halves is None:
            return None
        of_groups = halves.to(torch.float32).repeat_interleave(block // form.group)
        return of_groups[: outputs * inputs // form.group].view(outputs, -1)

    def _absmax(self) -> Tensor:
        files, module = self.files, self.module
        if files.part(module, "weight.nested_absmax") is None:
            return files.scales(module, "weight.absmax")
        bytes_, table = files.read(module, "weight.absmax").view(-1), files.scales(module, "weight.nested_quant_map")
        nested = files.scales(module, "weight.nested_absmax").view(-1)
        scales = nested.repeat_interleave(self.state.nested_block)[: len(bytes_)]
        return table.view(-1)[bytes_.to(torch.int64)] * scales + self.state.offset


METHOD = Method(
    names=("bitsandbytes",),
    title="bitsandbytes",
    summary="bitsandbytes of 4 bits (nf4, fp4) and 8 bits (LLM.int8())",
    marks=(".SCB", ".weight.absmax"),
    open=_open,
)
