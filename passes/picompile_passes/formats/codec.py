"""A weight format as a record: where the bytes of a row lie, what its codes stand for, and what it can be used for.

This file imports no torch. `packing.py` packs and unpacks rows as the record says.
"""

from dataclasses import dataclass

GROUP = 32
ROW_ALIGNMENT_BYTES = 64
# Codes of 6 bits lie in two planes: the low four bits of a row, and then the high two, in blocks of so many columns.
LOW_BITS = 4
HIGH_BLOCK = 4 * GROUP
HIGH_GROUPS = HIGH_BLOCK // GROUP
# A zero of a group's own is a byte, so many of which are one step of the codes.
ZERO_STEPS = 16.0
# Formats of so many bits a weight, or fewer, change what is of 4 to 6 bits already visibly when they round it again.
COARSE_BITS = 4.5
# Scales begin at a multiple of this, so that eight of them are one aligned load.
_SCALE_ALIGNMENT_BYTES = 16


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class ScaleType:
    """A type of scales: `item_bytes` bytes for each group, which kernels read as elements of `dtype`."""

    name: str
    dtype: str
    item_bytes: int


FLOAT16 = ScaleType("float16", "float16", 2)
# A power of two as its exponent plus 127, as the OCP Microscaling formats have it. It is read as the exponent of a
# float32, so that 0 stands for 0 and not for 2^-127.
E8M0 = ScaleType("E8M0", "uint8", 1)


@dataclass(frozen=True)
class Codec:
    """One weight format.

    A group is 32 consecutive weights of a row. It has `data_bits` for each weight, and, where there is a `scale`, one
    scale of that type. Codes of integers are from `lowest` to `highest`, and a weight is

        (code - zero) · scale              without a table
        table[code] · table_step · scale   with one

    Attributes:
        name: What `--quant` calls it.
        data_bits: 16 for float16; 8 for int8; 4 for two codes a byte; 6 for those in two planes.
        scale: The type of scales; None where data are the weights.
        lowest: The least code.
        highest: The greatest code.
        zero: The code of 0 in all groups; None where each group has a zero of its own, a byte of 16ths of a code.
        table: Whole numbers from -127 to 127, one for each code.
        table_step: What a 1 in the table stands for.
        panels: Whether matrices that are multiplied whole lie in panels.
        calibrated: Whether it rounds so coarsely that calibration is worth its time.
        budget: Whether budgets of bits choose from it.
        cache: Whether keys and values can be stored in it.
        spread_cache: Whether they are stored as the product of each group, which is whole, and the orthogonal Hadamard
            matrix, so that one large element does not coarsen the other codes.
        finer: Formats that lose less, the smallest first.
        head: The format of the output head and of embeddings; its own without.
        predictors: The format of predictors' own matrices; its own without.
        ggml: The type of GGML's blocks whose arithmetic it has: the same numbers in other places.
        summary: One line about it, for help and documents.
    """

    name: str
    data_bits: int
    scale: ScaleType | None = None
    lowest: int = 0
    highest: int = 0
    zero: float | None = 0.0
    table: tuple[int, ...] = ()
    table_step: float = 1.0
    panels: bool = False
    calibrated: bool = False
    budget: bool = False
    cache: bool = False
    spread_cache: bool = False
    finer: tuple[str, ...] = ()
    head: str = ""
    predictors: str = ""
    ggml: str = ""
    summary: str = ""

    @property
    def data_dtype(self) -> str:
        """The dtype that kernels read data as."""
        return {16: "float16", 8: "int8"}.get(self.data_bits, "uint8")

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of a group, 0 where it has none."""
        return self.scale.item_bytes if self.scale else 0

    @property
    def zero_bytes(self) -> int:
        """Bytes of the zero of a group, 0 where it has none of its own."""
        return 1 if self.zero is None else 0

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
