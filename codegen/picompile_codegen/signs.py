"""The signs of a packed matrix, a bit each, as `cpu/predict.py` reads them."""

import torch
from torch import Tensor

from picompile_passes.dialect import dequantize_rows
from picompile_passes.formats import ROW_ALIGNMENT_BYTES

_LANES, _WORD_BITS = 8, 32
BLOCK_COLUMNS = _LANES * _WORD_BITS

# A block of rows at a time, so that packing needs a few MB beside its input and its output whatever their size.
_BLOCK_ELEMENTS = 1 << 21


def sign_row_bytes(columns: int) -> int:
    """Return the bytes of the signs of one row: whole blocks of 256 columns, and whole cache lines."""
    blocks = -(-columns // BLOCK_COLUMNS)
    return -(-blocks * BLOCK_COLUMNS // 8 // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES


def pack_signs(packed: Tensor, format_name: str, columns: int) -> Tensor:
    """Return which weights of the matrix `packed` uint8 [rows, …] are below zero, as bits: uint8 [rows, row bytes].

    Bit i of int32 word l of a block of 256 columns is its column 8 · i + l; what is past the last column is 0.
    """
    rows = packed.shape[0]
    signs = torch.zeros(rows, sign_row_bytes(columns), dtype=torch.uint8)
    step = max(1, _BLOCK_ELEMENTS // columns)
    for start in range(0, rows, step):
        weights = dequantize_rows(packed[start : start + step], format_name, columns)
        _pack_block(weights < 0, signs[start : start + step])
    return signs


def _pack_block(negative: Tensor, signs: Tensor) -> None:
    rows, columns = negative.shape
    bits = torch.zeros(rows, signs.shape[1] * 8, dtype=torch.uint8)
    bits[:, :columns] = negative
    # [block, bit, word] → [block, word, byte of the word, bit of the byte]
    words = bits.view(rows, -1, _WORD_BITS, _LANES).transpose(2, 3).reshape(rows, -1, 8)
    signs[:] = (words << torch.arange(8, dtype=torch.uint8)).sum(dim=-1, dtype=torch.uint8)
