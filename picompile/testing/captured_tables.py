"""Cosines and sines of rotary embeddings as captured graphs have them: computed, or looked up in a buffer."""

import torch
from torch import Tensor
from torch.fx import Node

from picompile.testing.captured_style import TABLE_ROWS, PositionStyle
from picompile.testing.captured_writer import Writer

_aten = torch.ops.aten

# What looks up rows at positions, not at a slice, has enough of them for any sample that passes take.
_LOOKUP_ROWS = 320


def write_tables(w: Writer, style: PositionStyle, size: int) -> tuple[Node, Node]:
    """Cosines and sines for `size` turning elements: [1, T, n] or [T, n], where n is `size`, or half of it where each
    pair is turned by itself.
    """
    if style.tables == "computed":
        angles = _in_order(w, style, _angles(w, style, size))
        cosine, sine = w.call(_aten.cos.default, angles), w.call(_aten.sin.default, angles)
    else:
        cosine, sine = (_in_order(w, style, table) for table in _looked_up(w, style, size))
    if style.factor != 1.0:
        cosine, sine = (w.call(_aten.mul.Tensor, table, style.factor) for table in (cosine, sine))
    return cosine, sine


def _in_order(w: Writer, style: PositionStyle, half: Node) -> Node:
    """A number for each pair as one for each element, where the style wants that."""
    if style.rotary == "halves":
        return w.call(_aten.cat.default, [half, half], -1)
    if style.rotary == "repeated neighbours":
        return w.call(_aten.repeat_interleave.self_int, half, 2, -1)
    return half


def _angles(w: Writer, style: PositionStyle, size: int) -> Node:
    """position · frequency, [1, T, n/2] or [T, n/2]."""
    places = w.call(_aten.arange.default, w.size()) if style.from_arange else w.positions
    frequencies = _frequencies(w, style, size)
    if style.cast or style.angles != "mul":
        places = w.call(_aten._to_copy.default, places, dtype=torch.float32)
    if style.angles == "outer":
        return w.call(_aten.outer.default, places, frequencies)
    if style.angles == "einsum":
        return w.call(_aten.einsum.default, "i,j->ij", [places, frequencies])
    if w.batched:
        places = w.call(_aten.unsqueeze.default, places, 0)
    if style.angles == "mul":
        return w.call(_aten.mul.Tensor, w.call(_aten.unsqueeze.default, places, -1), frequencies)
    # transformers 4's: [n/2, 1] @ [1, T], transposed.
    column, row = w.call(_aten.unsqueeze.default, frequencies, 1), w.call(_aten.unsqueeze.default, places, -2)
    return w.call(_aten.transpose.int, w.call(_aten.matmul.default, column, row), -1, -2)


def _frequencies(w: Writer, style: PositionStyle, size: int) -> Node:
    """base^(−2i / n), [n/2]."""
    if style.frequencies == "buffer":
        return w.constant("model.rotary_emb.inv_freq", _frequency_values(style, size))
    steps = w.call(_aten.arange.start_step, 0, size, 2, dtype=torch.float32)
    powers = w.call(_aten.pow.Scalar, style.base, w.call(_aten.div.Tensor, steps, float(size)))
    return w.call(_aten.mul.Tensor, w.call(_aten.reciprocal.default, powers), 1.0)


def _frequency_values(style: PositionStyle, size: int) -> Tensor:
    return 1.0 / style.base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)


def _looked_up(w: Writer, style: PositionStyle, size: int) -> list[Node]:
    """The rows of buffers of cosines and sines at the positions."""
    rows = TABLE_ROWS if style.tables == "slice" else _LOOKUP_ROWS
    angles = torch.outer(torch.arange(rows, dtype=torch.float32), _frequency_values(style, size))
    if style.tables == "gather":
        return _gathered(w, torch.cat([angles.cos(), angles.sin()], dim=-1))
    buffers = (("cos_cached", angles.cos()), ("sin_cached", angles.sin()))
    return [_rows_at(w, style, w.constant(f"model.rotary_emb.{name}", table)) for name, table in buffers]


def _rows_at(w: Writer, style: PositionStyle, table: Node) -> Node:
    if style.tables == "slice":
        return w.call(_aten.slice.Tensor, table, 0, 0, w.size())
    places = w.call(_aten.arange.default, w.size()) if style.from_arange else w.positions
    if style.tables == "index_select":
        return w.call(_aten.index_select.default, table, 0, places)
    if w.batched:
        places = w.call(_aten.unsqueeze.default, places, 0)
    return w.call(_aten.index.Tensor, table, [places])


def _gathered(w: Writer, table: Tensor) -> list[Node]:
    """GPT-J's: both tables side by side, gathered and split."""
    columns = table.shape[1]
    places = w.call(_aten.unsqueeze.default, w.positions, -1)
    places = w.call(_aten.expand.default, places, [-1, columns])
    both = w.call(_aten.gather.default, w.constant("model.embed_positions_cached", table), 0, places)
    return [w.call(_aten.slice.Tensor, both, -1, *ends) for ends in ((0, columns // 2), (columns // 2, columns))]
