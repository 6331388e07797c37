"""A weight format as a record: where the bytes of a row lie, what its codes stand for, and what it can be used for.

This file imports no torch. `packing.py` packs and unpacks rows as the record says.
"""

from dataclasses import dataclass
from functools import cached_property

GROUP = 32
ROW_ALIGNMENT_BYTES = 64
# Rows that lie side by side in a panel, where kernels only multiply with whole matrices.
PANEL_ROWS = 16
# A scale of `INT8` is a multiple of a float16 that so many weights of a row share.
BLOCK = 256
# Codes of 6 bits lie in two planes: the low four bits of a row, and then the high two, in blocks of so many columns.
LOW_BITS = 4
HIGH_BLOCK = 4 * GROUP
HIGH_GROUPS = HIGH_BLOCK // GROUP
# A zero of a group's own is a byte, so many of which are one step of the codes.
ZERO_STEPS = 16.0
# Formats of so many bits a weight, or fewer, change what is of 4 to 6 bits already visibly when they round it again.
COARSE_BITS = 4.5
# Where rows are read one by one, scales begin at a multiple of this, so that eight of them are one aligned load.
_SCALE_ALIGNMENT_BYTES = 16
# Panels put sixteen rows side by side, so that their parts and they themselves need no more than this to be aligned.
_PANEL_PART_BYTES = 2
_PANEL_ROW_BYTES = 4


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class ScaleType:
    """A type of scales, or of minima: `item_bytes` bytes for each group, which kernels read as elements of `dtype`.

    Where it is `in_blocks`, the number of a group is a whole one, and it stands for its product with a float16 of its
    block of 256 weights.
    """

    name: str
    dtype: str
    item_bytes: int
    in_blocks: bool = False


FLOAT16 = ScaleType("float16", "float16", 2)
# A power of two as its exponent plus 127, as the OCP Microscaling formats have it. It is read as the exponent of a
# float32, so that 0 stands for 0 and not for 2^-127.
E8M0 = ScaleType("E8M0", "uint8", 1)
# The scales of GGML's K-quants: whole numbers, times a float16 for each 256 weights. Whole numbers of minima have no
# sign: the float16 has it.
INT8 = ScaleType("int8 × float16", "int8", 1, in_blocks=True)
UINT8 = ScaleType("uint8 × float16", "uint8", 1, in_blocks=True)


@dataclass(frozen=True)
class Plane:
    """Some bits of all codes of a row: `bits` of each, which are those from bit `shift` of a code on.

    A plane of 8 bits has a byte for each code. In any other, 32 bytes have the bits of 8 / `bits` groups of 32: byte
    (g mod 2) · 16 + i has those of element i of group g from bit 2 · `bits` · (g div 2) on, and those of element i + 16
    behind them.
    """

    bits: int
    shift: int

    @property
    def groups(self) -> int:
        """Groups of 32 codes that share 32 bytes."""
        return 8 // self.bits

    def size_bytes(self, columns: int) -> int:
        """Return the bytes that `columns` codes take, whole groups of 32."""
        # Two groups of nibbles share bytes of none: the last one may be alone.
        return columns // 2 if self.bits == LOW_BITS else _round_up(columns, GROUP * self.groups) * self.bits // 8


@dataclass(frozen=True)
class Codec:
    """One weight format.

    A group is `group` consecutive weights of a row, 32 or 16. It has `data_bits` for each weight, and, where there is a
    `scale`, one scale of that type. Codes of integers are from `lowest` to `highest`, and a weight is

        (code - zero) · scale              without a table
        code · scale + minimum             with a minimum for each group
        table[code] · table_step · scale   with a table

    Attributes:
        name: What `--quant` calls it.
        data_bits: 16 for float16; 8 for int8; 4 for two codes a byte; others for codes in `planes`.
        scale: The type of scales; None where data are the weights.
        lowest: The least code.
        highest: The greatest code.
        zero: The code of 0 in all groups; None where each group has a zero of its own, a byte of 16ths of a code.
        minimum: The type of the minima of groups, which are added to all of their weights; None for no minima.
        table: Numbers, one for each code: whole ones from -127 to 127, or float32 (`has_floats`).
        table_step: What a 1 in the table stands for.
        group: Weights that share a scale.
        panels: Whether matrices that are multiplied whole lie in panels.
        rows: Whether kernels can read single rows, as those of neurons. Others are read in panels.
        calibrated: Whether it rounds so coarsely that calibration is worth its time.
        budget: Whether budgets of bits choose from it.
        cache: Whether keys and values can be stored in it.
        spread_cache: Whether they are stored as the product of each group, which is whole, and the orthogonal Hadamard
            matrix, so that one large element does not coarsen the other codes.
        finer: Formats that lose less, the smallest first.
        head: The format of the output head and of embeddings; its own without.
        predictors: The format of predictors' own matrices; its own without.
        ggml: Types of GGML's blocks whose numbers it has, all of them, in other places.
        summary: One line about it, for help and documents.
    """

    name: str
    data_bits: int
    scale: ScaleType | None = None
    lowest: int = 0
    highest: int = 0
    zero: float | None = 0.0
    minimum: ScaleType | None = None
    table: tuple[float, ...] = ()
    table_step: float = 1.0
    group: int = GROUP
    panels: bool = False
    rows: bool = True
    calibrated: bool = False
    budget: bool = False
    cache: bool = False
    spread_cache: bool = False
    finer: tuple[str, ...] = ()
    head: str = ""
    predictors: str = ""
    ggml: tuple[str, ...] = ()
    summary: str = ""

    @property
    def fitted(self) -> bool:
        """Whether groups get the scales, and zeros or minima, that leave the least error, and not those of their span.

        In 8 bits that changes next to nothing, and tables have no scale of least squares for the codes of a span.
        """
        return self.scale is not None and self.scale != E8M0 and self.data_bits < 8 and not self.table

    @property
    def has_floats(self) -> bool:
        """Whether codes stand for numbers that are no bytes, so that kernels multiply float32.

        Those of 4 bits are looked up; those of 8 are E4M3, which kernels make float32 of by moving bits.
        """
        return any(value % 1 != 0 for value in self.table)

    @property
    def least_code(self) -> int:
        """The least code that kernels read. Rounding to bytes leaves out -128, so that each weight has a negative."""
        return -128 if self.data_bits == 8 and not self.table else self.lowest

    @property
    def data_dtype(self) -> str:
        """The dtype that kernels read data as."""
        return {16: "float16", 8: "int8"}.get(self.data_bits, "uint8")

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of a group, 0 where it has none."""
        return self.scale.item_bytes if self.scale else 0

    @property
    def scale_dtype(self) -> str:
        """The dtype of the view of a matrix that kernels read its scales by, or the float16 of their blocks."""
        if self.scale is None:
            return self.data_dtype
        return FLOAT16.dtype if self.scale.in_blocks else self.scale.dtype

    @property
    def zero_bytes(self) -> int:
        """Bytes of the zero or the minimum of a group, 0 where it has none of its own."""
        if self.minimum is not None:
            return self.minimum.item_bytes
        return 1 if self.zero is None else 0

    @property
    def factor_bytes(self) -> int:
        """Bytes of the float16 of a block of 256 weights: of its scales, and of its minima behind them."""
        return sum(2 for each in (self.scale, self.minimum) if each is not None and each.in_blocks)

    @property
    def has_zeros(self) -> bool:
        """Whether each group has a zero or a minimum of its own."""
        return self.zero is None or self.minimum is not None

    @property
    def has_planes(self) -> bool:
        """Whether the bits of a code lie in several places, or four codes in a byte."""
        return self.data_bits < LOW_BITS or LOW_BITS < self.data_bits < 8

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """The planes of codes that are less than a byte, in their order in a row: the low bits first."""
        low = LOW_BITS if self.data_bits >= LOW_BITS else 2
        sizes = (low, *(1 << i for i in (1, 0) if (self.data_bits - low) >> i & 1))
        return tuple(Plane(bits, sum(sizes[:i])) for i, bits in enumerate(sizes))

    def has_panels(self, rows: int) -> bool:
        """Return whether a matrix of so many rows can lie in panels: whole ones."""
        return self.panels and rows % PANEL_ROWS == 0

    @property
    def bits(self) -> float:
        """Bits a weight, with its share of scale and zero, but without the padding of rows."""
        return self.data_bits + 8 * (self.scale_bytes + self.zero_bytes) / self.group + 8 * self.factor_bytes / BLOCK

    def padded_columns(self, columns: int) -> int:
        """Return how many columns are stored: a whole number of 32."""
        return _round_up(columns, GROUP)

    def groups(self, columns: int) -> int:
        """Return how many groups a row of `columns` has, those of padding included."""
        return self.padded_columns(columns) // self.group

    def blocks(self, columns: int) -> int:
        """Return how many blocks of 256 a row has; the last may be less than whole."""
        return _round_up(columns, BLOCK) // BLOCK

    def plane_offset_bytes(self, plane: Plane, columns: int) -> int:
        """Return the offset of a plane in a row: planes follow one another."""
        padded = self.padded_columns(columns)
        return sum(each.size_bytes(padded) for each in self.planes if each.shift < plane.shift)

    def high_offset_bytes(self, columns: int) -> int:
        """Return the offset of the high bits in a row whose data has two planes: they follow the low bits."""
        return self.padded_columns(columns) * min(self.data_bits, LOW_BITS) // 8

    def zero_offset_bytes(self, columns: int) -> int:
        """Return the offset of the zeros, or of the minima, in a row: they follow its data."""
        padded = self.padded_columns(columns)
        if self.data_bits >= 8:
            return padded * self.data_bits // 8
        return sum(plane.size_bytes(padded) for plane in self.planes)

    def scale_offset_bytes(self, columns: int) -> int:
        """Return the offset of the scales in a row: they follow its data and zeros."""
        zeros = self.groups(columns) * self.zero_bytes
        return self.zero_offset_bytes(columns) + _round_up(zeros, self._part_bytes)

    def factor_offset_bytes(self, columns: int) -> int:
        """Return the offset of the float16 of blocks in a row: they follow its scales, those of minima behind all
        others."""
        return self.scale_offset_bytes(columns) + _round_up(self.groups(columns) * self.scale_bytes, _PANEL_PART_BYTES)

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of one row, padding included: the distance between two rows."""
        return (
            _round_up(self.panel_row_bytes(columns), ROW_ALIGNMENT_BYTES)
            if self.rows
            else self.panel_row_bytes(columns)
        )

    def panel_row_bytes(self, columns: int) -> int:
        """Return the bytes of a row in a panel, where it needs less padding: a 16th of the panel."""
        end = self.factor_offset_bytes(columns) + self.blocks(columns) * self.factor_bytes
        return _round_up(end, _PANEL_ROW_BYTES)

    @property
    def _part_bytes(self) -> int:
        return _SCALE_ALIGNMENT_BYTES if self.rows else _PANEL_PART_BYTES
