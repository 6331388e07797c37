"""The built-in weight formats as docs/format.md describes them: which kernels read them, where numbers lie in a row.

Nothing here is computed by `picompile_passes.formats`, so that tests can compare the two.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from picompile_passes.formats import FORMATS

# Kernels of CPUs and GPUs read single rows of these.
ROW_FORMATS = tuple(name for name in FORMATS.builtin if FORMATS[name].rows)
# Kernels of CPUs multiply whole matrices of these, in panels.
PANEL_FORMATS = tuple(name for name in FORMATS.builtin if FORMATS[name].panels)
# Only quantized checkpoints have these, and no kernel reads single rows of them.
STORED_FORMATS = tuple(name for name in FORMATS.builtin if not FORMATS[name].rows)

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]

# Sign, exponent and mantissa of E2M1 ("FP4") in the OCP Microscaling Formats (MX) Specification v1.0, section 5.3.3.
E2M1 = tuple(
    (-1) ** (code >> 3) * (0.5 * (code & 1) if code & 6 == 0 else 2 ** ((code >> 1 & 3) - 1) * (1 + 0.5 * (code & 1)))
    for code in range(16)
)
# `kvalues_iq4nl` of GGML.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Magnitudes of `iq2xxs_grid` and `iq3xxs_grid` of GGML, over the scale of a group; ten codes stand for 0.
IQ2 = (-43 / 8, -25 / 8, -8 / 8, 8 / 8, 25 / 8, 43 / 8, *[0.0] * 10)
IQ3 = tuple(sorted(sign * each / 4 for each in (4, 12, 20, 28, 36, 44, 52, 62) for sign in (-1, 1)))
# -1, 0 and 1 and an eighth more or less.
IQ1 = (-9 / 8, -7 / 8, -1 / 8, 1 / 8, 7 / 8, 9 / 8, *[0.0] * 10)
# E4M3 ("FP8"), section 5.3.1, with the next numbers of the grid in place of NaN; scales of ours are 256 times as large.
E4M3 = tuple(
    (-1) ** (code >> 7) * (2 ** ((code >> 3 & 15) - 7) * (1 + (code & 7) / 8) if code & 120 else (code & 7) / 512) / 256
    for code in range(256)
)
# `create_normal_map` of bitsandbytes: quantiles of a normal distribution, float32.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@dataclass(frozen=True)
class Layout:
    """The numbers of a format.

    Attributes:
        planes: bits of each plane of codes, the low ones first; 8 for int8.
        values: the values of codes over their scale.
        group: weights that share a scale.
        scale: the type of a scale; `int8` is one of whole numbers, times a float16 for each 256 weights.
        zero: the type of a zero or minimum of each group: `16ths` of a code are subtracted from it, `float16` is added
            to weights, and so is `uint8`, times a float16 for each 256 weights.
        rows: whether kernels read rows, which have 64 bytes or multiples of them, and parts that begin at 16.
    """

    planes: tuple[int, ...]
    values: tuple[float, ...]
    group: int = 32
    scale: str = "float16"
    zero: str = ""
    rows: bool = False


LAYOUTS = {
    "q8": Layout((8,), tuple(range(-128, 128)), rows=True),
    "q6": Layout((4, 2), tuple(range(-32, 32)), rows=True),
    "q4m": Layout((4,), tuple(range(16)), zero="16ths", rows=True),
    "q4": Layout((4,), tuple(range(-8, 8)), rows=True),
    "mxfp4": Layout((4,), E2M1, scale="E8M0", rows=True),
    "q4_1": Layout((4,), tuple(range(16)), zero="float16"),
    "q5": Layout((4, 1), tuple(range(-16, 16))),
    "q5_1": Layout((4, 1), tuple(range(32)), zero="float16"),
    "q2_k": Layout((2,), tuple(range(4)), group=16, scale="int8", zero="uint8"),
    "q3_k": Layout((2, 1), tuple(range(-4, 4)), group=16, scale="int8"),
    "q4_k": Layout((4,), tuple(range(16)), scale="int8", zero="uint8"),
    "q5_k": Layout((4, 1), tuple(range(32)), scale="int8", zero="uint8"),
    "q6_k": Layout((4, 2), tuple(range(-32, 32)), group=16, scale="int8"),
    "iq4_nl": Layout((4,), IQ4),
    "iq4_xs": Layout((4,), IQ4, scale="int8"),
    "iq3_xxs": Layout((4,), IQ3, scale="int8"),
    "iq3_s": Layout((4,), tuple(range(-15, 16, 2)), scale="int8"),
    "iq2": Layout((4,), IQ2, group=16, scale="int8"),
    "iq1": Layout((4,), IQ1, group=16, scale="int8"),
    # Scales are 64 times NVFP4's.
    "nvfp4": Layout((4,), tuple(value / 64 for value in E2M1), group=16),
    "fp8": Layout((8,), E4M3),
    "nf4": Layout((4,), NF4),
}
_DTYPES = {"16ths": "u1", "uint8": "u1", "E8M0": "u1", "int8": "i1", "float16": "<f2"}


@dataclass(frozen=True)
class Part:
    """A part of a row: `count` numbers of `item_bytes` bytes from byte `start` on. Codes are bytes, four at a time."""

    name: str
    start: int
    count: int
    item_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.count * self.item_bytes


def row_parts(name: str, columns: int) -> tuple[dict[str, Part], int]:
    """Return the parts of a row by name, `plane 0`, `zeros`, `scales`, `scale factors` and so on, and its bytes."""
    layout, parts = LAYOUTS[name], dict[str, Part]()
    padded = -(-columns // 32) * 32
    end = 0
    for number, bits in enumerate(layout.planes):
        # 32 bytes have a plane's bits of whole groups of 32. Codes of four bits or more need no whole ones.
        size = padded * bits // 8 if bits >= 4 else -(-padded * bits // 256) * 32
        parts[f"plane {number}"] = Part(f"plane {number}", end, size // 4, 4)
        end += size
    numbers = [("zeros", layout.zero, padded // layout.group), ("scales", layout.scale, padded // layout.group)]
    blocks = -(-padded // 256)
    numbers += [("scale factors", "float16", blocks)] * (layout.scale == "int8")
    numbers += [("zero factors", "float16", blocks)] * (layout.zero == "uint8")
    for part, kind, count in numbers:
        if part != "zero factors":
            end = _round_up(end, 16 if layout.rows else 2)
        parts[part] = Part(part, end, count if kind else 0, np.dtype(_DTYPES[kind]).itemsize if kind else 0)
        end = parts[part].end
    return parts, _round_up(end, 64 if layout.rows else 4)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def codes_of_row(name: str, row: Bytes, columns: int) -> NDArray[np.int64]:
    """Return the codes of a row, one for each column: numbers of values in `Layout.values`."""
    parts, _ = row_parts(name, columns)
    codes = np.zeros(columns, np.int64)
    shift = 0
    for number, bits in enumerate(LAYOUTS[name].planes):
        start = parts[f"plane {number}"].start
        for column in range(columns):
            byte, bit = _place_of_code(column, bits)
            codes[column] |= (int(row[start + byte]) >> bit & (1 << bits) - 1) << shift
        shift += bits
    # Codes of q8 are signed bytes.
    return (codes + 128) % 256 if name == "q8" else codes


def _place_of_code(column: int, bits: int) -> tuple[int, int]:
    """Return the byte of a plane and the bit in it at which a column's code begins."""
    group, i = divmod(column, 32)
    if bits == 8:
        return column, 0
    # Two groups beside each other, two halves of a group in one byte, and as many such pairs as fit.
    turns = 8 // (2 * bits)
    block, turn = divmod(group // 2, turns)
    return block * 32 + group % 2 * 16 + i % 16, (2 * turn + i // 16) * bits


def weights_of_row(name: str, row: Bytes, columns: int) -> Floats:
    """Return the weights that a row stands for, float64 [columns]."""
    layout, (parts, _) = LAYOUTS[name], row_parts(name, columns)

    def numbers(part: str, kind: str) -> Floats:
        place = parts[part]
        return row[place.start : place.end].view(_DTYPES[kind]).astype(np.float64)

    def of_groups(part: str, kind: str) -> Floats:
        found = numbers(part, kind)
        if kind == "E8M0":
            return np.where(found == 0, 0.0, np.exp2(found - 127))
        if kind in ("int8", "uint8"):
            found = found * np.repeat(numbers(f"{part[:-1]} factors", "float16"), 256 // layout.group)[: len(found)]
        return found

    values = np.array(layout.values, np.float64)[codes_of_row(name, row, columns)]
    group = np.arange(columns) // layout.group
    if layout.zero == "16ths":
        values = values - of_groups("zeros", "16ths")[group] / 16
    values = values * of_groups("scales", layout.scale)[group]
    return values if layout.zero in ("", "16ths") else values + of_groups("zeros", layout.zero)[group]


def random_rows(rng: np.random.Generator, name: str, rows: int, columns: int) -> Bytes:
    """Return rows of random bytes wherever codes, zeros and scales lie, and of zeros elsewhere: all are finite numbers.

    So each number that a byte can have is there, those that no rounding makes too.
    """
    parts, row_bytes = row_parts(name, columns)
    data = np.zeros((rows, row_bytes), np.uint8)
    for part in parts.values():
        place, size = data[:, part.start : part.end], (rows, part.count * part.item_bytes)
        if part.item_bytes == 2:
            place[...] = rng.uniform(-2, 2, (rows, part.count)).astype("<f2").view(np.uint8)
        elif LAYOUTS[name].scale == "E8M0" and part.name == "scales":
            place[...] = rng.integers(120, 134, size)
        else:
            place[...] = rng.integers(0, 256, size)
    return data


def panels_of(name: str, rows: Bytes, columns: int) -> Bytes:
    """Return the panels of 16 rows: numbers of the same place in each row lie side by side, and codes four by four."""
    parts, _ = row_parts(name, columns)
    # Rows in panels are padded to four bytes.
    end = max(part.start + part.count * part.item_bytes for part in parts.values())
    panels = np.zeros((len(rows) // 16, 16 * (end + -end % 4)), np.uint8)
    for number, row in enumerate(rows):
        panel, place = divmod(number, 16)
        for part in parts.values():
            for i, inside in _bytes_of(part):
                panels[panel, 16 * part.start + (16 * i + place) * part.item_bytes + inside] = row[
                    part.start + i * part.item_bytes + inside
                ]
    return panels


def _bytes_of(part: Part) -> Iterator[tuple[int, int]]:
    return ((i, inside) for i in range(part.count) for inside in range(part.item_bytes))
