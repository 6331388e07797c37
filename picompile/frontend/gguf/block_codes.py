"""The blocks of GGML's tensor types as codes, scales and minima: what `Codec` calls them, with nothing rounded.

Layouts are those of `ggml-quants.h` (ggml 0.25). A block has 32 weights, 64 (NVFP4) or 256 (K-quants, IQ but IQ4_NL,
TQ). Byte i of 16 has elements i and i + 16, in its low and its high four bits; in K-quants a byte i of 32 has those of
several 32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import gguf.quants
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from picompile_passes.formats import FORMATS, Codec
from picompile_passes.formats.grids import BlockScales, GroupGrid

# Types of blocks, and the format of ours that has their numbers, all of them, in other places.
STORED = {type_name: name for name in FORMATS.builtin for type_name in FORMATS[name].ggml}

# uint8; what numpy's types make of shifts of it is wider.
Bytes = npt.NDArray[Any]
Numbers = npt.NDArray[np.float32] | npt.NDArray[np.int16]


@dataclass(frozen=True)
class BlockParts:
    """Blocks of rows, [rows, blocks, any] each: codes uint8, and float32 scales and minima of their groups.

    Scales that are products with a `scale_factor` float32 [rows, blocks] are int16; so are minima, which have a
    `minimum_factor`.
    """

    codes: Bytes
    scales: Numbers
    minima: Numbers | None = None
    scale_factor: npt.NDArray[np.float32] | None = None
    minimum_factor: npt.NDArray[np.float32] | None = None

    def grid(self, form: Codec) -> tuple[Tensor, GroupGrid]:
        """Return the codes [rows, groups, weights], and the grid of their groups, in the format `form`."""
        rows = len(self.codes)
        scale = _parts(self.scales, self.scale_factor)
        minimum = None if self.minima is None else _parts(self.minima, self.minimum_factor)
        codes = torch.from_numpy(np.ascontiguousarray(self.codes)).view(rows, -1, form.group)
        return codes, GroupGrid.of_parts(form, scale, minimum)


def _parts(values: Numbers, factor: npt.NDArray[np.float32] | None) -> Tensor | BlockScales:
    numbers = torch.from_numpy(np.ascontiguousarray(values).reshape(len(values), -1))
    return numbers if factor is None else BlockScales(numbers, torch.from_numpy(np.ascontiguousarray(factor)))


def _nibbles(data: Bytes) -> Bytes:
    """Return the codes of bytes [..., units, n]: the low four bits of a unit's n, then the high ones."""
    return np.concatenate([data & np.uint8(15), data >> np.uint8(4)], axis=-1)


def _bits(data: Bytes, bits: int, starts: Sequence[int]) -> Bytes:
    """Return `bits` bits of each byte [..., n] from each of `starts` on: [..., starts, n]."""
    return (data[..., None, :] >> np.array(starts, np.uint8)[:, None]) & np.uint8((1 << bits) - 1)


def _halves(data: Bytes) -> npt.NDArray[np.float32]:
    """Return float16 [..., bytes] as float32 [..., numbers]."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _high_bit(data: Bytes) -> Bytes:
    """Return the 32 bits of 4 bytes, [..., 4] → [..., 32], each as the fifth bit of a code."""
    return np.unpackbits(data, axis=-1, bitorder="little") << np.uint8(4)


def _flat(codes: Bytes) -> Bytes:
    return codes.reshape(*codes.shape[:2], -1)


def _in_order(data: Bytes, bits: int) -> Bytes:
    """Return codes of `bits` bits, those of a byte one behind the other, the lowest first."""
    return _flat(_bits(data, bits, range(0, 8, bits)).swapaxes(-1, -2))


def _words(data: Bytes, dtype: str) -> Bytes:
    return np.ascontiguousarray(data).view(dtype)


def _q4_0(b: Bytes) -> BlockParts:
    return BlockParts(_nibbles(b[..., 2:]), _halves(b[..., :2]))


def _q4_1(b: Bytes) -> BlockParts:
    return BlockParts(_nibbles(b[..., 4:]), _halves(b[..., :2]), _halves(b[..., 2:4]))


def _q5_0(b: Bytes) -> BlockParts:
    return BlockParts(_nibbles(b[..., 6:]) | _high_bit(b[..., 2:6]), _halves(b[..., :2]))


def _q5_1(b: Bytes) -> BlockParts:
    codes = _nibbles(b[..., 8:]) | _high_bit(b[..., 4:8])
    return BlockParts(codes, _halves(b[..., :2]), _halves(b[..., 2:4]))


def _q8_0(b: Bytes) -> BlockParts:
    return BlockParts(b[..., 2:], _halves(b[..., :2]))


def _q2_k(b: Bytes) -> BlockParts:
    scales, halves = b[..., :16], _halves(b[..., 80:])
    codes = _bits(b[..., 16:80].reshape(*b.shape[:2], 2, 32), 2, (0, 2, 4, 6))
    return _with_minima(codes, scales & 15, scales >> 4, halves)


def _with_minima(codes: Bytes, scales: Bytes, minima: Bytes, halves: npt.NDArray[np.float32]) -> BlockParts:
    """Return parts of blocks with minima; GGML subtracts these, and so the factor is negative."""
    whole = (scales.astype(np.int16), minima.astype(np.int16))
    return BlockParts(_flat(codes), *whole, scale_factor=halves[..., 0], minimum_factor=-halves[..., 1])


def _q3_k(b: Bytes) -> BlockParts:
    low = _bits(b[..., 32:96].reshape(*b.shape[:2], 2, 32), 2, (0, 2, 4, 6))
    high = _bits(b[..., :32], 1, range(8)).reshape(low.shape)
    packed = b[..., 96:108]
    # Low four bits of 16 scales are in the first eight bytes, the high two of each four in the last four bytes.
    scales = _nibbles(packed[..., :8]) | _flat(_bits(packed[..., 8:], 2, (0, 2, 4, 6))) << 4
    whole = scales.astype(np.int16) - 32
    return BlockParts(_flat(low | high << 2), whole, scale_factor=_halves(b[..., 108:])[..., 0])


def _scales_and_minima(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Return eight scales and eight minima of 6 bits each of 12 bytes, as `get_scale_min_k4` does."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=-1)
    return scales, minima


def _q4_k(b: Bytes) -> BlockParts:
    codes = _nibbles(b[..., 16:].reshape(*b.shape[:2], 4, 32))
    return _with_minima(codes, *_scales_and_minima(b[..., 4:16]), _halves(b[..., :4]))


def _q5_k(b: Bytes) -> BlockParts:
    high = _bits(b[..., 16:48], 1, range(8)).reshape(*b.shape[:2], 4, 64)
    codes = _nibbles(b[..., 48:].reshape(*b.shape[:2], 4, 32)) | high << 4
    return _with_minima(codes, *_scales_and_minima(b[..., 4:16]), _halves(b[..., :4]))


def _q6_k(b: Bytes) -> BlockParts:
    low = _nibbles(b[..., :128].reshape(*b.shape[:2], 2, 64))
    high = _bits(b[..., 128:192].reshape(*b.shape[:2], 2, 32), 2, (0, 2, 4, 6)).reshape(low.shape)
    scales = b[..., 192:208].view(np.int8).astype(np.int16)
    return BlockParts(_flat(low | high << 4), scales, scale_factor=_halves(b[..., 208:])[..., 0])


def _iq4_nl(b: Bytes) -> BlockParts:
    return BlockParts(_nibbles(b[..., 2:]), _halves(b[..., :2]))


def _iq4_xs(b: Bytes) -> BlockParts:
    high = _words(b[..., 2:4], "<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = _in_order(b[..., 4:8], 4)
    scales = (low | high << 4).astype(np.int16) - 32
    codes = _nibbles(b[..., 8:].reshape(*b.shape[:2], 8, 16))
    return BlockParts(_flat(codes), scales, scale_factor=_halves(b[..., :2])[..., 0])


def _mxfp4(b: Bytes) -> BlockParts:
    with np.errstate(over="ignore"):  # 255 stands for no number
        scales = np.ldexp(np.float32(1), b[..., :1].astype(np.int32) - 127)
    return BlockParts(_nibbles(b[..., 1:]), scales)


# Scales of nvfp4 are 64 times those of blocks.
_NVFP4_UNIT = 6


def _nvfp4(b: Bytes) -> BlockParts:
    exponent, mantissa = (b[..., :4] >> 3 & 15).astype(np.int32), b[..., :4].astype(np.int32) & 7
    scales = np.ldexp((mantissa + 8 * (exponent > 0)).astype(np.float32), np.maximum(exponent, 1) - 10 + _NVFP4_UNIT)
    scales[b[..., :4] == 0x7F] = 0.0
    return BlockParts(_flat(_nibbles(b[..., 4:].reshape(*b.shape[:2], 4, 8))), scales)


# ---- types whose weights are looked up, several at once, in grids ----


@cache
def _grid(type_name: str) -> Bytes:
    """Return the grid of a type: the codes of each entry, eight as the bytes of a uint64, or four of a uint32."""
    kind = getattr(gguf.quants, type_name)
    kind.init_grid()
    entries = kind.grid.reshape(kind.grid_shape)
    # Entries of IQ1 are -1, 0 and 1, and each stands for the lower one of two codes.
    codes = 2 * (entries + 1) if type_name.startswith("IQ1") else np.searchsorted(_numbers(type_name), entries)
    words: Bytes = codes.astype(np.uint8).view(f"uint{8 * entries.shape[1]}").reshape(-1)
    return words


@cache
def _numbers(type_name: str) -> npt.NDArray[np.float32]:
    """Return the numbers that a type has, in their order: those of the format's table but for zeros behind them."""
    return np.array([value for value in FORMATS[STORED[type_name]].table if value], np.float32)


# The eight signs of each byte, as bytes of ones. Seven bits stand for a byte with an even number of signs.
_SIGNS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_SIGN_MASKS = (_SIGNS * np.uint8(255)).view("<u8")[:, 0]
_EVEN_SIGNS = np.frombuffer(gguf.quants.IQ2_XXS.ksigns, np.uint8)
_ONE_EACH = np.uint64(0x0101010101010101)


def _of_grid(type_name: str, indices: Bytes, signs: Bytes, scales: Bytes, halves: Bytes) -> BlockParts:
    """Return parts of blocks whose weights are (entry of the grid, with its sign) · (2 · scale + 1) · float16.

    Eight weights share one or two of the grid's entries, by `indices`, and a byte of `signs`. All are [rows, blocks,
    any].
    """
    codes = _grid(type_name)[indices].view(np.uint64)
    masks = _SIGN_MASKS[signs.reshape(codes.shape)]
    # The negative of a number is as far from the last one as that is from the first.
    last = np.uint64(len(_numbers(type_name)) - 1) * _ONE_EACH
    signed = codes ^ ((codes ^ (last - codes)) & masks)
    return _scaled(signed, scales, _halves(halves)[..., 0])


def _scaled(codes: Bytes, scales: Bytes, factor: npt.NDArray[np.float32]) -> BlockParts:
    whole = 2 * scales.astype(np.int16) + 1
    return BlockParts(codes.view(np.uint8), whole, scale_factor=factor)


def _even_signs(words: Bytes) -> Bytes:
    """Return four bytes of signs for each uint32, which has seven bits of each."""
    return _EVEN_SIGNS[_flat(words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & 127)]


def _iq2_xxs(b: Bytes) -> BlockParts:
    words = _words(b[..., 2:], "<u4")
    indices, others = _words(words[..., ::2], "u1"), words[..., 1::2]
    return _of_grid("IQ2_XXS", indices, _even_signs(others), (others >> 28).repeat(2, -1), b[..., :2])


def _iq2_xs(b: Bytes) -> BlockParts:
    words = _words(b[..., 2:66], "<u2")
    return _of_grid("IQ2_XS", words & 511, _EVEN_SIGNS[words >> 9], _in_order(b[..., 66:], 4), b[..., :2])


def _iq2_s(b: Bytes) -> BlockParts:
    high = _in_order(b[..., 66:74], 2)
    indices = b[..., 2:34] | high.astype(np.uint16) << 8
    return _of_grid("IQ2_S", indices, b[..., 34:66], _in_order(b[..., 74:], 4), b[..., :2])


def _iq3_xxs(b: Bytes) -> BlockParts:
    words = _words(b[..., 66:], "<u4")
    return _of_grid("IQ3_XXS", b[..., 2:66], _even_signs(words), words >> 28, b[..., :2])


def _iq3_s(b: Bytes) -> BlockParts:
    high = np.unpackbits(b[..., 66:74], axis=-1, bitorder="little")
    indices = b[..., 2:66] | high.astype(np.uint16) << 8
    return _of_grid("IQ3_S", indices, b[..., 74:106], _in_order(b[..., 106:], 4), b[..., :2])


def _iq1_s(b: Bytes) -> BlockParts:
    words = _words(b[..., 34:], "<u2")
    high = _flat(words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7)
    is_above = ((words >> 15) ^ 1).repeat(4, -1)
    codes = _grid("IQ1_S")[b[..., 2:34] | high << 8] + is_above * _ONE_EACH
    return _scaled(codes, (words >> 12 & 7).repeat(2, -1), _halves(b[..., :2])[..., 0])


def _iq1_m(b: Bytes) -> BlockParts:
    words = _words(b[..., 48:], "<u2")
    bits = _in_order(b[..., 32:48], 4).astype(np.uint16)
    codes = _grid("IQ1_M")[b[..., :32] | (bits & 7) << 8] + ((bits >> 3) ^ 1) * _ONE_EACH
    scales = _flat(words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7)
    # The float16 of a block is in the high four bits of its words.
    half = (words >> 12 << np.array([0, 4, 8, 12], np.uint16)).sum(axis=-1, dtype=np.uint16)
    return _scaled(codes, scales, half.view(np.float16).astype(np.float32))


# ---- -1, 0 and 1 ----


def _trits(b: Bytes, type_name: str) -> BlockParts:
    """Return parts of blocks of TQ, whose last two bytes are a float16."""
    data, half = b.copy(), _halves(b[..., -2:])[..., 0]
    data[..., -2:] = np.array([1], np.float16).view(np.uint8)
    # A call unpacks a few rows at a time, so that rows should not be as short as a block.
    values = dequantize(data.reshape(len(b), -1), GGMLQuantizationType[type_name])
    ones = np.ones((*b.shape[:2], 16), np.uint8)
    codes = (values + 1).astype(np.uint8).reshape(*b.shape[:2], -1)
    return _with_minima(codes, ones, ones, np.stack([half, half], -1))


_READERS: dict[str, Callable[[Bytes], BlockParts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "TQ1_0": partial(_trits, type_name="TQ1_0"),
    "TQ2_0": partial(_trits, type_name="TQ2_0"),
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}


def read_codes(data: Bytes, type_name: str, size_bytes: int, form: Codec) -> tuple[Tensor, GroupGrid]:
    """Return the codes and the grid of rows of blocks, uint8 [rows, any] of `size_bytes` each, in the format `form`.

    `form` has the numbers of the type, whose name is one of `form.ggml`.
    """
    return _READERS[type_name](data.reshape(len(data), -1, size_bytes)).grid(form)
