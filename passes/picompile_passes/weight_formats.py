"""Sizes of weight formats: how many bytes a row of a matrix takes. This file imports no torch.

`dialect/formats.py` has the layout of a row, and packs and unpacks it.
"""

from dataclasses import dataclass

GROUP = 32
ROW_ALIGNMENT_BYTES = 64
# Codes of 6 bits lie in two planes: the low four bits of a row, and then the high two, in blocks of so many columns.
LOW_BITS = 4
HIGH_BLOCK = 4 * GROUP
# A zero of a group's own is a byte, so many of which are one step of the codes.
ZERO_STEPS = 16.0
# Scales begin at a multiple of this, so that eight of them are one aligned load.
_SCALE_ALIGNMENT_BYTES = 16


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class WeightFormat:
    """One way to store a matrix.

    A group of 32 weights of a row has `data_bits` for each weight, `scale_bytes` for its scale, and `zero_bytes` for
    its zero where it has one of its own. Integers are codes from `lowest` to `highest`, and a weight is
    (code - zero) · scale. `zero` is that of all groups, None where each has its own.
    """

    name: str
    data_bits: int
    scale_bytes: int = 0
    zero_bytes: int = 0
    lowest: int = 0
    highest: int = 0
    zero: float | None = 0.0

    @property
    def has_planes(self) -> bool:
        """Whether the low four bits of a row's codes lie before the high ones."""
        return self.data_bits == LOW_BITS + 2

    @property
    def bits(self) -> float:
        """Bits a weight, with its share of scale and zero, but without the padding of rows."""
        return self.data_bits + 8 * (self.scale_bytes + self.zero_bytes) / GROUP

    def padded_columns(self, columns: int) -> int:
        """Return how many columns are stored: a whole number of groups."""
        return _round_up(columns, GROUP)

    def high_offset_bytes(self, columns: int) -> int:
        """Return the offset of the high bits in a row whose data has two planes: they follow the low bits."""
        return self.padded_columns(columns) * min(self.data_bits, LOW_BITS) // 8

    def zero_offset_bytes(self, columns: int) -> int:
        """Return the offset of the zeros in a row: they follow its data."""
        if not self.has_planes:
            return self.padded_columns(columns) * self.data_bits // 8
        blocks = _round_up(columns, HIGH_BLOCK) // HIGH_BLOCK
        return self.high_offset_bytes(columns) + blocks * HIGH_BLOCK * (self.data_bits - LOW_BITS) // 8

    def scale_offset_bytes(self, columns: int) -> int:
        """Return the offset of the scales in a row: they follow its data and zeros."""
        zeros = self.padded_columns(columns) // GROUP * self.zero_bytes
        return self.zero_offset_bytes(columns) + _round_up(zeros, _SCALE_ALIGNMENT_BYTES)

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of one row, padding included: the distance between two rows."""
        groups = self.padded_columns(columns) // GROUP
        return _round_up(self.scale_offset_bytes(columns) + groups * self.scale_bytes, ROW_ALIGNMENT_BYTES)


FORMATS: dict[str, WeightFormat] = {
    form.name: form
    for form in (
        WeightFormat("f16", 16),
        WeightFormat("q8", 8, 2, lowest=-127, highest=127),
        WeightFormat("q6", 6, 2, highest=63, zero=32.0),
        WeightFormat("q4m", 4, 2, 1, highest=15, zero=None),
        WeightFormat("q4", 4, 2, highest=15, zero=8.0),
    )
}


def head_format(format_name: str) -> str:
    """Return the format of the output head and of embeddings in a model whose other matrices are in `format_name`.

    Where these have 4 bits it is q6: rounding the head to 4 costs more perplexity than all other matrices together.
    """
    return "q6" if FORMATS[format_name].data_bits == 4 else format_name


def predictor_format(format_name: str, wanted: str = "auto") -> str:
    """Return the format of predictors' own matrices in a model whose other matrices are in `format_name`.

    It is the one that is `wanted`. For `auto` it is the model's, or q6 where that has 4 bits: errors of 4 bits move
    scores across the threshold.
    """
    if wanted != "auto":
        return wanted
    return "q6" if FORMATS[format_name].data_bits == 4 else format_name
