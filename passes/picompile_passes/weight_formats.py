"""Sizes of weight formats: how many bytes a row of a matrix takes. This file imports no torch.

`dialect/formats.py` has the layout of a row, and packs and unpacks it.
"""

from dataclasses import dataclass

GROUP = 32
ROW_ALIGNMENT_BYTES = 64


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class WeightFormat:
    """One way to store a matrix: `data_bits` for each weight and `scale_bytes` for each group of 32 weights."""

    name: str
    data_bits: int
    scale_bytes: int

    def padded_columns(self, columns: int) -> int:
        """Return how many columns are stored: a whole number of groups."""
        return _round_up(columns, GROUP)

    def scale_offset_bytes(self, columns: int) -> int:
        """Return the offset of the scales in a row."""
        return self.padded_columns(columns) * self.data_bits // 8

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of one row, padding included: the distance between two rows."""
        groups = self.padded_columns(columns) // GROUP
        return _round_up(self.scale_offset_bytes(columns) + groups * self.scale_bytes, ROW_ALIGNMENT_BYTES)


FORMATS: dict[str, WeightFormat] = {
    "f16": WeightFormat("f16", 16, 0),
    "q8": WeightFormat("q8", 8, 2),
    "q4": WeightFormat("q4", 4, 2),
}
