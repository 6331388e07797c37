"""compressed-tensors: what llm-compressor writes, of integers, FP8 and FP4.

Which module is stored how is known from its tensors: `weight_packed` of int32 are integers of 1 to 8 bits less half
their range, as one stream of bits along inputs (zeros lie so along outputs, or are int8); of bytes, two FP4 numbers
each, the first in the low half. A `weight` of int8 or float8 has a number in each element. `weight_scale`, and
`weight_zero_point` where there is one, have a place for each group of inputs, row, block or matrix.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from picompile.errors import UnsupportedModelError
from picompile.frontend.stored.blocks import (
    F8_DTYPES,
    ScaledBlocks,
    codes_of,
    fitting_block,
    grid_shape,
    matrix_shape,
    numbers_of,
)
from picompile.frontend.stored.fp4 import fp4_blocks
from picompile.frontend.stored.fp8 import left_out
from picompile.frontend.stored.integers import IntegerMatrix
from picompile.frontend.stored.record import (
    FLOAT_DTYPES,
    Found,
    Method,
    Settings,
    StoredFiles,
    StoredMatrix,
    activation_scales,
)
from picompile.frontend.stored.words import unpack, words_of

_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "dense"),
)
_PARTS = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
_PARTS_FP4 = ("weight_packed", "weight_scale", "weight_global_scale")
# Inputs of a block of FP4 numbers: of NVFP4, whose scales are float8 and which has one for the matrix too, and MXFP4.
_NVFP4, _MXFP4 = 16, 32


@dataclass(frozen=True)
class _Weights:
    """The settings of a group of modules: bits, and weights of a block, -1 for all of a side.

    `ordered` is whether blocks are not of inputs side by side, so that each matrix needs its `weight_g_idx`.
    """

    bits: int
    block: tuple[int, int]
    ordered: bool = False


def _open(settings: Settings) -> Callable[[StoredFiles], Found]:
    groups = settings.get("config_groups", default={})
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        settings.refuse(f"with config_groups {groups!r:.40}")
    for form in (settings.get("format", default="dense"), *(group.get("format") for group in groups.values())):
        if form is not None and form not in _FORMATS:
            settings.refuse(f"in the format {form!r:.40}")
    sparsity = settings.get("sparsity_config", default={})
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        settings.refuse(f"with sparsity_config {sparsity!r:.60}")
    transforms = settings.get("transform_config", default={})
    if transforms and (not isinstance(transforms, dict) or transforms.get("config_groups", True)):
        settings.refuse(f"with transform_config {transforms!r:.60}")
    # A matrix without settings is refused where it is found.
    weights = [_weights(settings, group["weights"]) for group in groups.values() if group.get("weights") is not None]

    def find(files: StoredFiles) -> Found:
        matrices = {module: _packed_matrix(files, module, weights) for module in list(files.modules("weight_packed"))}
        plain = [module for module in files.modules("weight") if _is_number(files.headers[f"{module}.weight"].dtype)]
        matrices |= {module: _plain_matrix(files, module, weights) for module in plain if module not in matrices}
        unused = activation_scales(files)
        return Found(matrices, unused, left_out(unused))

    return find


def _is_number(dtype: str) -> bool:
    return dtype == "I8" or dtype in F8_DTYPES


def _weights(settings: Settings, weights: Any) -> _Weights:
    if not isinstance(weights, dict):
        settings.refuse(f"with weights {weights!r:.40}")
    own = Settings(settings.method, weights)
    bits = own.whole("with %s bits", own.get("num_bits", default=8), lambda value: 1 <= value <= 8)
    strategy = own.get("strategy", default="group" if own.get("group_size") else "tensor")
    if strategy in ("group", "tensor_group"):
        size = own.whole("with groups of %s", own.get("group_size"), lambda value: value == -1 or 1 <= value <= 1 << 20)
        return _Weights(bits, (1, size), ordered=own.get("actorder") in (True, "group", "dynamic"))
    if strategy == "block":
        sizes = own.get("block_structure")
        if not isinstance(sizes, (list, tuple)) or len(sizes) != 2:
            own.refuse(f"with block_structure {sizes!r:.40}")
        rows, columns = (own.whole("with blocks of %s", size, lambda value: 1 <= value <= 1 << 20) for size in sizes)
        return _Weights(bits, (rows, columns))
    if strategy not in ("channel", "tensor"):
        own.refuse(f"with the strategy {strategy!r:.40}")
    return _Weights(bits, (1, -1) if strategy == "channel" else (-1, -1))


def _packed_matrix(files: StoredFiles, module: str, weights: list[_Weights]) -> StoredMatrix:
    header = files.headers[f"{module}.weight_packed"]
    if header.dtype == "U8":
        return _fp4_matrix(files, module)
    if header.dtype != "I32":
        raise UnsupportedModelError(f"{header.file}: {module}.weight_packed is {header.dtype}; I32 or U8 is read")
    files.needed(module, "weight_scale", "weight_packed", FLOAT_DTYPES)
    files.needed(module, "weight_shape", "weight_packed", ("I64", "I32"))
    sizes = files.read(module, "weight_shape").tolist()
    stored = matrix_shape(files, module, "weight_packed")
    bits = [own.bits for own in weights if len(sizes) == 2 and stored == (sizes[0], words_of(sizes[1], own.bits))]
    if not bits:
        asked = " or ".join(sorted({str(own.bits) for own in weights})) or "no"
        raise UnsupportedModelError(
            f"{header.file}: {module}.weight_packed is {list(stored)}, which are no {sizes} integers of {asked} bits"
        )
    return _integers(files, module, (sizes[0], sizes[1]), [own for own in weights if own.bits == bits[0]])


def _integers(files: StoredFiles, module: str, shape: tuple[int, int], weights: list[_Weights]) -> StoredMatrix:
    """Return a matrix of packed integers; the zeros of 4 bits, for one, are 8 where it has none of its own."""
    outputs, inputs = shape
    bits = weights[0].bits
    block = fitting_block(files, module, shape, "weight_scale", [own.block for own in weights])
    groups = grid_shape(shape, (1, block[1]))[1]
    file = files.headers[f"{module}.weight_packed"].file
    if all(own.ordered for own in weights) and files.part(module, "weight_g_idx") is None:
        raise UnsupportedModelError(f"{file}: no {module}.weight_g_idx, which actorder in quantization_config asks for")
    if block[0] not in (1, outputs):
        raise UnsupportedModelError(f"{file}: {module}.weight_packed has blocks of {block[0]} rows, which are not read")
    if (zeros := files.part(module, "weight_zero_point")) is not None:
        # Early versions did not pack them.
        files.needed(module, "weight_zero_point", "weight_packed", ("I32", "I8"))
        needed = (outputs if zeros.dtype == "I8" else words_of(outputs, bits), groups)
        if zeros.shape != needed:
            raise UnsupportedModelError(
                f"{zeros.file}: {module}.weight_zero_point is {list(zeros.shape)}; {list(shape)} needs {list(needed)}"
            )

    def numbers() -> IntegerMatrix:
        words, middle = files.read(module, "weight_packed"), 1 << (bits - 1)
        zeros = torch.full((groups, outputs), middle, dtype=torch.int16)
        if files.part(module, "weight_zero_point") is not None:
            stored = files.read(module, "weight_zero_point")
            zeros = unpack(stored, bits, outputs).T if stored.dtype == torch.int32 else stored.T.short() + middle

        def codes(start: int, stop: int) -> Tensor:
            return unpack(words[:, words_of(start, bits) : words_of(stop, bits)].T, bits, stop - start)

        scales = files.scales(module, "weight_scale").view(grid_shape(shape, block))
        of_inputs = _groups_of(files, module, inputs, block[1])
        return IntegerMatrix(bits, codes, zeros, scales.expand(outputs, -1).T, of_inputs)

    return files.matrix(module, ("weight_packed", *_PARTS), shape, numbers)


def _groups_of(files: StoredFiles, module: str, inputs: int, size: int) -> Tensor:
    """Return the group of each input, int64 [inputs]: `weight_g_idx`, or side by side where it has -1 or is missing."""
    side_by_side = torch.arange(inputs) // size
    if files.part(module, "weight_g_idx") is None:
        return side_by_side
    header, groups = files.headers[f"{module}.weight_g_idx"], files.read(module, "weight_g_idx").to(torch.int64)
    if bool((groups == -1).any()):
        return side_by_side
    if groups.shape != (inputs,) or not bool(((groups >= 0) & (groups <= side_by_side[-1])).all()):
        raise UnsupportedModelError(f"{header.file}: {module}.weight_g_idx names groups that there are not")
    return groups


def _fp4_matrix(files: StoredFiles, module: str) -> StoredMatrix:
    rows, columns = matrix_shape(files, module, "weight_packed")
    shape = (rows, 2 * columns)
    is_nvfp4 = files.part(module, "weight_global_scale") is not None
    files.needed(module, "weight_scale", "weight_packed", F8_DTYPES[:1] if is_nvfp4 else ("U8", "F8_E8M0"))
    if is_nvfp4:
        header = files.needed(module, "weight_global_scale", "weight_packed", ("F32",))
        if header.shape not in ((), (1,)):
            raise UnsupportedModelError(f"{header.file}: {module}.weight_global_scale is {list(header.shape)}")
    block = fitting_block(files, module, shape, "weight_scale", [(1, _NVFP4 if is_nvfp4 else _MXFP4)])

    def numbers() -> ScaledBlocks:
        stored = files.read(module, "weight_packed")
        scales = files.scales(module, "weight_scale").view(grid_shape(shape, block))
        if not is_nvfp4:
            return fp4_blocks(stored, scales, block[1], "mxfp4")
        scales = scales.to(torch.float32) / files.scales(module, "weight_global_scale").to(torch.float32)
        return fp4_blocks(stored, scales, block[1], "nvfp4", unit=64.0)

    return files.matrix(module, _PARTS_FP4, shape, numbers)


def _plain_matrix(files: StoredFiles, module: str, weights: list[_Weights]) -> StoredMatrix:
    shape = matrix_shape(files, module, "weight")
    files.needed(module, "weight_scale", "weight", FLOAT_DTYPES)
    block = fitting_block(files, module, shape, "weight_scale", [own.block for own in weights])
    grid = grid_shape(shape, block)
    has_zeros = files.part(module, "weight_zero_point") is not None
    if has_zeros:
        header = files.needed(module, "weight_zero_point", "weight", ("I8", *F8_DTYPES, *FLOAT_DTYPES))
        if header.shape != files.headers[f"{module}.weight_scale"].shape:
            raise UnsupportedModelError(f"{header.file}: {module}.weight_zero_point is unlike its scales")
    if files.part(module, "weight_g_idx") is not None and not bool((files.read(module, "weight_g_idx") == -1).any()):
        file = files.headers[f"{module}.weight"].file
        raise UnsupportedModelError(f"{file}: {module}.weight_g_idx is read of packed integers alone")

    def numbers() -> ScaledBlocks:
        scales = files.scales(module, "weight_scale").to(torch.float32).view(grid)
        zeros = files.scales(module, "weight_zero_point").to(torch.float32).view(grid) if has_zeros else None
        return ScaledBlocks(numbers_of(files, module, "weight"), shape, scales, block, zeros, codes_of(files, module))

    return files.matrix(module, ("weight", *_PARTS), shape, numbers)


METHOD = Method(
    names=("compressed-tensors",),
    title="compressed-tensors",
    summary="compressed-tensors (pack-, int-, float- and naive-quantized, nvfp4 and mxfp4)",
    marks=(".weight_packed", ".weight_scale"),
    open=_open,
)
