"""Random matrices of FP8, FP4, INT8 and tables, as checkpoints hold them, and the numbers they stand for, in float64.

Numbers of few bits are decoded by their definitions: sign, exponent and fraction. All values but those of NF4 are
numbers of float16.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helpers.quantized_files import Integers, Maker, stream
from helpers.weight_formats import NF4


@dataclass(frozen=True)
class Kind:
    """A kind of stored matrix: its quantization config, and what makes one."""

    config: Mapping[str, Any]
    make: Maker


def decode(codes: Integers, exponent_bits: int, fraction_bits: int) -> Tensor:
    """Return what numbers of 1 + exponent + fraction bits stand for, float64, without infinities and NaN."""
    bias = 2 ** (exponent_bits - 1) - 1
    sign = np.where(codes >> (exponent_bits + fraction_bits) & 1, -1.0, 1.0)
    exponent = codes >> fraction_bits & (2**exponent_bits - 1)
    fraction = (codes & (2**fraction_bits - 1)) / 2**fraction_bits
    normal, subnormal = (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias)
    return torch.from_numpy(sign * np.where(exponent > 0, normal, subnormal))


def spread(scales: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """Return the scale of each weight of a matrix, float64 [outputs, inputs]."""
    rows, columns = (torch.arange(size) // size_of for size, size_of in zip(shape, block, strict=True))
    return scales.double()[rows][:, columns]


def _scales(draw: np.random.Generator, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    grid = tuple(-(-size // of) for size, of in zip(shape, block, strict=True))
    return torch.from_numpy(draw.integers(1, 16, grid) / 2.0**10).float()


def _whole(block: tuple[int, int], shape: tuple[int, int]) -> tuple[int, int]:
    return tuple(size if of == -1 else of for size, of in zip(shape, block, strict=True))  # type: ignore[return-value]


def fp8(block: tuple[int, int], name: str = "weight_scale_inv", flat: bool = False, power: bool = False) -> Maker:
    """E4M3 numbers and a scale for each block, -1 for all of a side; `flat` takes its sizes of 1 away."""

    def make(outputs: int, inputs: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        draw, shape = np.random.default_rng(seed), (outputs, inputs)
        codes = draw.integers(0, 2, shape) * 128 + draw.integers(0, 120, shape)
        scales = _scales(draw, shape, _whole(block, shape)) / 16
        if power:
            scales = torch.exp2(torch.log2(scales).floor())
        weight = decode(codes, 4, 3) * spread(scales, shape, _whole(block, shape))
        stored = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)
        kept = scales.squeeze() if flat else scales
        return {"weight": stored, name: kept.to(torch.float8_e8m0fnu) if power else kept}, weight

    return make


def int8(block: tuple[int, int], zeros: bool = False) -> Maker:
    """INT8 numbers, a scale for each block and, with `zeros`, a zero."""

    def make(outputs: int, inputs: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        draw, shape = np.random.default_rng(seed), (outputs, inputs)
        codes = torch.from_numpy(draw.integers(-128, 128, shape))
        scales = _scales(draw, shape, _whole(block, shape)) / 16
        tensors = {"weight": codes.to(torch.int8), "weight_scale": scales}
        zero = torch.from_numpy(draw.integers(-9, 9, tuple(scales.shape)))
        if zeros:
            tensors["weight_zero_point"] = zero.to(torch.int8)
        size = _whole(block, shape)
        return tensors, (codes - spread(zero, shape, size) * zeros) * spread(scales, shape, size)

    return make


def llm_int8(outputs: int, inputs: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return bitsandbytes' INT8 numbers with the largest weight of each row."""
    draw = np.random.default_rng(seed)
    codes = torch.from_numpy(draw.integers(-127, 128, (outputs, inputs)))
    largest = torch.from_numpy(draw.integers(1, 16, outputs) * 127 / 2.0**14).float()
    tensors = {"weight": codes.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes * largest.double().view(-1, 1) / 127


def packed(bits: int, group: int, zeros: bool = False, ordered: bool = False, plain: bool = False) -> Maker:
    """Integers of compressed-tensors less half their range, packed, and a scale for each group of inputs.

    Zeros are packed too, but for those that are `plain`.
    """

    def make(outputs: int, inputs: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        draw, size = np.random.default_rng(seed), inputs if group == -1 else group
        codes, index = draw.integers(0, 2**bits, (outputs, inputs)), np.arange(inputs) // size
        zero = np.full((outputs, index[-1] + 1), 2 ** (bits - 1))
        tensors = {"weight_packed": stream(codes, bits), "weight_shape": torch.tensor([outputs, inputs])}
        if zeros:
            zero = draw.integers(0, 2**bits, zero.shape)
            own = torch.from_numpy(zero - 2 ** (bits - 1)).to(torch.int8)
            tensors["weight_zero_point"] = own if plain else stream(zero.T, bits).T
        if ordered:
            index = draw.permutation(index)
            tensors["weight_g_idx"] = torch.from_numpy(index.astype(np.int32))
        scales = torch.from_numpy(draw.integers(1, 64, zero.shape) / 2.0**11).to(torch.bfloat16)
        weight = torch.from_numpy(codes - zero[:, index]) * scales.double()[:, index]
        return {**tensors, "weight_scale": scales}, weight

    return make


def fp4(nvidia: bool) -> Maker:
    """E2M1 numbers, and scales of 16 inputs in E4M3, over one of the matrix, or of 32 as powers of two."""

    def make(outputs: int, inputs: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        draw, size = np.random.default_rng(seed), 16 if nvidia else 32
        codes = draw.integers(0, 16, (outputs, inputs))
        pairs = torch.from_numpy((codes[:, ::2] + (codes[:, 1::2] << 4)).astype(np.uint8))
        grid = (outputs, inputs // size)
        exponents = draw.integers(116, 122, grid)
        factors = torch.from_numpy(draw.integers(8, 16, grid) / 8.0) if nvidia else torch.ones(grid)
        scales = torch.from_numpy(2.0 ** (exponents - 127)).double() * factors * (64 if nvidia else 1)
        stored = {"weight_scale": scales.to(torch.float8_e4m3fn), "weight_global_scale": torch.tensor([64.0])}
        if not nvidia:
            stored = {"weight_scale": torch.from_numpy(exponents.astype(np.uint8))}
        weight = decode(codes, 2, 1) * spread(scales / (64 if nvidia else 1), (outputs, inputs), (1, size))
        return {"weight_packed": pairs, **stored}, weight

    return make


def four_bits(kind: str, nested: bool = False, block: int = 64) -> Maker:
    """bitsandbytes' codes of a table and a largest weight for each block, itself a code of a table with `nested`."""

    def make(outputs: int, inputs: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        draw, count = np.random.default_rng(seed), outputs * inputs
        codes = draw.integers(0, 16, count)
        table = np.array(NF4) if kind == "nf4" else np.sort(draw.permutation(np.arange(-64, 65))[:16]) / 64
        pairs = np.append(codes, [0] * (count % 2))
        largest = 2.0 ** -draw.integers(2, 5, -(-count // block))
        tensors = {"weight": torch.from_numpy((pairs[::2] * 16 + pairs[1::2]).astype(np.uint8)).view(-1, 1)}
        state = {"quant_type": kind, "blocksize": block, "dtype": "float16", "shape": [outputs, inputs]}
        tensors["weight.quant_map"] = torch.from_numpy(table).float()
        tensors["weight.absmax"] = torch.from_numpy(largest).float()
        if nested:
            bytes_, offset = draw.integers(0, 256, len(largest)), 2.0**-3
            scale = torch.from_numpy(2.0 ** -draw.integers(6, 9, -(-len(largest) // 256)))
            second = np.arange(-128, 128) / 32
            largest = second[bytes_] * scale.numpy()[np.arange(len(largest)) // 256] + offset
            tensors["weight.absmax"] = torch.from_numpy(bytes_.astype(np.uint8))
            tensors["weight.nested_absmax"] = scale.float()
            tensors["weight.nested_quant_map"] = torch.from_numpy(second).float()
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        text = json.dumps(state).encode()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
        weight = table[codes] * largest[np.arange(count) // block]
        return tensors, torch.from_numpy(weight).view(outputs, inputs)

    return make


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def _grouped(bits: int, size: int) -> dict[str, Any]:
    return _compressed("pack-quantized", num_bits=bits, strategy="group", group_size=size)


_BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}
_FOUR, _EIGHT = {"quant_method": "bitsandbytes", "load_in_4bit": True}, {"load_in_8bit": True}

KINDS: dict[str, Kind] = {
    "fp8-blocks": Kind(_BLOCKS, fp8((32, 32))),
    "fp8-powers": Kind({**_BLOCKS, "scale_fmt": "ue8m0"}, fp8((32, 32), power=True)),
    "fp8-matrix": Kind({"quant_method": "fp8", "weight_block_size": None}, fp8((-1, -1), "weight_scale", flat=True)),
    "modelopt": Kind({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8((-1, -1), "weight_scale", flat=True)),
    "fbgemm": Kind({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8((1, -1), "weight_scale")),
    "float-channel": Kind(
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"), fp8((1, -1), "weight_scale")
    ),
    "float-block": Kind(
        _compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[32, 64]),
        fp8((32, 64), "weight_scale"),
    ),
    "int-channel": Kind(_compressed("int-quantized", num_bits=8, strategy="channel"), int8((1, -1))),
    "int-zeros": Kind(_compressed("int-quantized", num_bits=8, strategy="channel"), int8((1, -1), zeros=True)),
    "int-tensor": Kind(_compressed("naive-quantized", num_bits=8, strategy="tensor"), int8((-1, -1))),
    "int-group": Kind(_compressed("naive-quantized", num_bits=8, strategy="group", group_size=32), int8((1, 32))),
    "packed-4": Kind(_grouped(4, 32), packed(4, 32)),
    "packed-4-zeros": Kind(_grouped(4, 32), packed(4, 32, zeros=True)),
    "packed-4-plain-zeros": Kind(_grouped(4, 32), packed(4, 32, zeros=True, plain=True)),
    "packed-4-order": Kind(
        _compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, actorder="group"),
        packed(4, 32, ordered=True),
    ),
    "packed-8": Kind(_grouped(8, 32), packed(8, 32)),
    "packed-3-zeros": Kind(_grouped(3, 32), packed(3, 32, zeros=True)),
    "packed-4-channel": Kind(_compressed("pack-quantized", num_bits=4, strategy="channel"), packed(4, -1)),
    "nvfp4": Kind(_compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16), fp4(True)),
    "mxfp4": Kind(_compressed("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32), fp4(False)),
    "nf4": Kind(_FOUR, four_bits("nf4")),
    "nf4-nested": Kind({**_FOUR, "bnb_4bit_use_double_quant": True}, four_bits("nf4", nested=True)),
    "fp4": Kind(_FOUR, four_bits("fp4", block=128)),
    "llm-int8": Kind(_EIGHT, llm_int8),
}
