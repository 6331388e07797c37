"""Panels: the layout of a packed matrix whose rows are not read one by one, by kernels of CPUs and of GPUs.

A panel is sixteen rows of a matrix. Where a row has four bytes of codes, a panel has those of all its rows side by
side; so it does with scales, zeros and minima. One load gives as many rows as a vector has lanes, and the sums of each
row stay in a lane of its own. A panel takes the bytes of its rows, without most of their padding.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from picompile_passes.formats import FORMATS, PANEL_ROWS, Codec

if TYPE_CHECKING:
    from torch import Tensor

_CODE_BYTES = 4
_FACTOR_BYTES = 2


def has_panels(format_name: str, rows: int) -> bool:
    """Return whether a matrix of `rows` rows can be stored in panels: whole ones, in a format that has them."""
    return FORMATS[format_name].has_panels(rows)


def block_has_panels(formats: Sequence[str], neurons: int, dim: int) -> bool:
    """Return whether the matrices of a feed-forward block can lie in panels, down with a row for each output.

    Args:
        formats: Those of gate, up and down, or of up and down.
        neurons: Its neurons; of experts those of one, since no panel has rows of two.
        dim: The width of x and y.
    """
    *first, down = formats
    return all(has_panels(form, neurons) for form in first) and has_panels(down, dim)


def panel_bytes(form: Codec, columns: int) -> int:
    """Return the bytes of a panel."""
    return PANEL_ROWS * form.panel_row_bytes(columns)


def to_panels(packed: "Tensor", format_name: str, columns: int) -> "Tensor":
    """Lay rows out as panels: uint8 [rows, row bytes] → uint8 [rows / 16, panel bytes]."""
    import torch

    from picompile_passes.formats import compiled, rounding_library

    form = FORMATS[format_name]
    panels = torch.empty(len(packed) // PANEL_ROWS, panel_bytes(form, columns), dtype=torch.uint8)
    ends = (
        form.zero_offset_bytes(columns),
        form.scale_offset_bytes(columns),
        form.factor_offset_bytes(columns) if form.factor_bytes else form.panel_row_bytes(columns),
        form.panel_row_bytes(columns),
    )
    units = (_CODE_BYTES, form.zero_bytes or 1, form.scale_bytes, _FACTOR_BYTES)
    # The bytes of a part of a row, from `start` to `end`, which go `unit` at a time.
    parts = [(start, end, unit) for start, end, unit in zip((0, *ends[:-1]), ends, units, strict=True) if end > start]
    if rounding_library.library() is not None:
        compiled.turn(packed.contiguous(), parts, panels)
        return panels
    for start, end, unit in parts:
        rows = packed[:, start:end].reshape(len(panels), PANEL_ROWS, -1, unit)
        part = panels[:, PANEL_ROWS * start : PANEL_ROWS * end]
        part.view(len(panels), -1, PANEL_ROWS, unit).copy_(rows.transpose(1, 2))
    return panels
