"""Packed matrices without picompile: the formats of `picompile_passes/dialect/formats.py` in numpy.

A row is its data, its scales (a float16 for each 32 columns, not in f16), and zeros up to a multiple of 64 bytes. A
byte of q4 has column i of its group of 32 in its low and column i + 16 in its high four bits, each 8 more than the
value.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

GROUP = 32
_ROW_BYTES = 64
_DATA_BITS = {"f16": 16, "q8": 8, "q4": 4}
# Different rows of a random matrix: so many elements. Drawing more takes minutes where a matrix has billions.
_BLOCK_ELEMENTS = 2**22


def padded(columns: int) -> int:
    """Columns as stored."""
    return -(-columns // GROUP) * GROUP


def scale_offset(form: str, columns: int) -> int:
    """Where in a row the scales begin."""
    return padded(columns) * _DATA_BITS[form] // 8


def row_bytes(form: str, columns: int) -> int:
    """Bytes from one row to the next."""
    size = scale_offset(form, columns) + (0 if form == "f16" else padded(columns) // GROUP * 2)
    return -(-size // _ROW_BYTES) * _ROW_BYTES


def pack(weights: Array, form: str) -> NDArray[np.uint8]:
    """float32 [rows, columns] → uint8 [rows, row bytes]."""
    rows, columns = weights.shape
    values = np.zeros((rows, padded(columns)), np.float32)
    values[:, :columns] = weights
    packed = np.zeros((rows, row_bytes(form, columns)), np.uint8)
    end = scale_offset(form, columns)
    if form == "f16":
        packed[:, :end] = values.astype(np.float16).view(np.uint8)
        return packed
    groups = values.reshape(rows, -1, GROUP)
    place = np.abs(groups).argmax(-1, keepdims=True)
    extreme = np.take_along_axis(groups, place, -1)[..., 0]
    scale = (np.abs(extreme) / 127 if form == "q8" else extreme / -8).astype(np.float16)
    wide = scale.astype(np.float32)[..., None]
    numbers = np.rint(np.divide(groups, wide, out=np.zeros_like(groups), where=wide != 0))
    if form == "q8":
        data = np.clip(numbers, -127, 127).astype(np.int8).view(np.uint8)
    else:
        nibbles = (np.clip(numbers, -8, 7) + 8).astype(np.uint8)
        data = nibbles[..., : GROUP // 2] | (nibbles[..., GROUP // 2 :] << 4)
    packed[:, :end] = data.reshape(rows, -1)
    packed[:, end : end + 2 * scale.shape[1]] = scale.view(np.uint8)
    return packed


def unpack(packed: NDArray[np.uint8], form: str, columns: int) -> NDArray[np.float32]:
    """uint8 [rows, row bytes] → the float32 [rows, columns] that it stands for."""
    rows, end = len(packed), scale_offset(form, columns)
    data = np.ascontiguousarray(packed[:, :end])
    if form == "f16":
        return data.view(np.float16).astype(np.float32)[:, :columns]
    groups = padded(columns) // GROUP
    scale = np.ascontiguousarray(packed[:, end : end + 2 * groups]).view(np.float16).astype(np.float32)[..., None]
    if form == "q8":
        values = data.view(np.int8).reshape(rows, groups, GROUP).astype(np.float32)
    else:
        pairs = data.reshape(rows, groups, GROUP // 2)
        values = np.concatenate([pairs & 15, pairs >> 4], -1).astype(np.float32) - 8
    return (values * scale).reshape(rows, -1)[:, :columns]


def block_rows(rows: int, columns: int, parts: int = 1) -> int:
    """How many rows of a random matrix differ: an odd number times `parts`, so that no power of two repeats them."""
    return min(rows, max(1, _BLOCK_ELEMENTS // columns // parts - 1 | 1) * parts)


def random_block(
    rng: np.random.Generator, form: str, rows: int, columns: int, deviations: tuple[float, ...] = (1.0,)
) -> NDArray[np.uint8]:
    """The rows that differ of a random packed matrix of so many rows, uint8 [block_rows(rows, …), row bytes].

    Row i is of normal numbers with a deviation of deviations[i % len] / sqrt(columns); a negative one stands for their
    absolute values.
    """
    count = block_rows(rows, columns, len(deviations))
    block = rng.standard_normal((count, columns), np.float32)
    for part, deviation in enumerate(deviations):
        of_part = block[part :: len(deviations)]
        of_part *= abs(deviation) / columns**0.5
        if deviation < 0:
            np.abs(of_part, out=of_part)
    return pack(block, form)


def repeated(block: NDArray[np.uint8], rows: int) -> NDArray[np.uint8]:
    """The rows of `block`, again and again, up to `rows` of them."""
    if len(block) == rows:
        return block
    whole = np.empty((rows, block.shape[1]), np.uint8)
    for start in range(0, rows, len(block)):
        part = whole[start : start + len(block)]
        part[:] = block[: len(part)]
    return whole
