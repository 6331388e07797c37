"""Positions as captured graphs have them: position embeddings, tables of cosines and sines, and rotary embeddings."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Node

from picompile.testing.captured.ffn import write_alternating, write_parts
from picompile.testing.captured.style import TABLE_ROWS, PositionStyle
from picompile.testing.captured.writer import CaptureWriter

_aten = torch.ops.aten

# Rows of a table that is indexed by positions rather than sliced: enough for any sample that passes take.
_LOOKUP_ROWS = 320


def write_tables(w: CaptureWriter, style: PositionStyle, size: int) -> tuple[Node, Node]:
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


def _in_order(w: CaptureWriter, style: PositionStyle, half: Node) -> Node:
    """A number for each pair as one for each element, where the style wants that."""
    if style.rotary == "halves":
        return w.call(_aten.cat.default, [half, half], -1)
    if style.rotary == "repeated neighbours":
        return w.call(_aten.repeat_interleave.self_int, half, 2, -1)
    return half


def _angles(w: CaptureWriter, style: PositionStyle, size: int) -> Node:
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


def _frequencies(w: CaptureWriter, style: PositionStyle, size: int) -> Node:
    """base^(−2i / n), [n/2]."""
    if style.frequencies == "buffer":
        return w.constant("model.rotary_emb.inv_freq", _frequency_values(style, size))
    steps = w.call(_aten.arange.start_step, 0, size, 2, dtype=torch.float32)
    powers = w.call(_aten.pow.Scalar, style.base, w.call(_aten.div.Tensor, steps, float(size)))
    return w.call(_aten.mul.Tensor, w.call(_aten.reciprocal.default, powers), 1.0)


def _frequency_values(style: PositionStyle, size: int) -> Tensor:
    return 1.0 / style.base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)


def _looked_up(w: CaptureWriter, style: PositionStyle, size: int) -> list[Node]:
    """The rows of buffers of cosines and sines at the positions."""
    rows = TABLE_ROWS if style.tables == "slice" else _LOOKUP_ROWS
    angles = torch.outer(torch.arange(rows, dtype=torch.float32), _frequency_values(style, size))
    if style.tables == "gather":
        return _gathered(w, torch.cat([angles.cos(), angles.sin()], dim=-1))
    buffers = (("cos_cached", angles.cos()), ("sin_cached", angles.sin()))
    return [_rows_at(w, style, w.constant(f"model.rotary_emb.{name}", table)) for name, table in buffers]


def _rows_at(w: CaptureWriter, style: PositionStyle, table: Node) -> Node:
    if style.tables == "slice":
        return w.call(_aten.slice.Tensor, table, 0, 0, w.size())
    places = w.call(_aten.arange.default, w.size()) if style.from_arange else w.positions
    if style.tables == "index_select":
        return w.call(_aten.index_select.default, table, 0, places)
    if w.batched:
        places = w.call(_aten.unsqueeze.default, places, 0)
    return w.call(_aten.index.Tensor, table, [places])


def _gathered(w: CaptureWriter, table: Tensor) -> list[Node]:
    """GPT-J's: both tables side by side, gathered and split."""
    columns = table.shape[1]
    places = w.call(_aten.unsqueeze.default, w.positions, -1)
    places = w.call(_aten.expand.default, places, [-1, columns])
    both = w.call(_aten.gather.default, w.constant("model.embed_positions_cached", table), 0, places)
    return [w.call(_aten.slice.Tensor, both, -1, *ends) for ends in ((0, columns // 2), (columns // 2, columns))]


# Turns a value by cosines and sines.
Turn = Callable[[Node, Node, Node], Node]


def write_position_embedding(w: CaptureWriter, style: PositionStyle, x: Node) -> Node:
    """`x` [1, T, n] or [T, n] plus a row of a table for each position; `x` itself where the style has none."""
    if style.learned == "no":
        return x
    size = int(x.meta["val"].shape[-1])
    rows = TABLE_ROWS + style.offset
    if style.learned.endswith("sinusoid"):
        angles = torch.outer(torch.arange(float(rows)), 0.5 ** torch.arange(1.0, size + 1))
        table = w.constant("model.embed_positions.weights", angles.sin())
    else:
        table = w.parameter("model.embed_positions.weight", rows, size)
    if style.learned.startswith("slice"):
        return w.call(_aten.add.Tensor, x, w.call(_aten.slice.Tensor, table, 0, 0, w.size()))
    places = _places(w, style)
    return w.call(_aten.add.Tensor, x, w.call(_aten.embedding.default, table, places))


def _places(w: CaptureWriter, style: PositionStyle) -> Node:
    """Rows of the table."""
    if style.learned == "cumsum":
        # OPT's: the number of tokens so far that are no padding.
        ones = w.call(_aten.ones.default, [w.size()], dtype=torch.int64)
        places = w.call(_aten.sub.Tensor, w.call(_aten.cumsum.default, ones, 0), 1)
    else:
        places = w.call(_aten.arange.default, w.size()) if style.learned == "arange" else w.positions
    if style.learned != "arange" and w.batched:
        places = w.call(_aten.unsqueeze.default, places, 0)
    return w.call(_aten.add.Tensor, places, style.offset) if style.offset else places


class RotaryWriter:
    """Turns heads of `size` elements, or a part of each."""

    def __init__(self, w: CaptureWriter, style: PositionStyle, size: int) -> None:
        self._w, self._style, self._size = w, style, size
        self._turning = size if style.turning == "all" else 2 * max(1, size // 4)
        self._tables: tuple[Node, Node] | None = None

    @property
    def turning(self) -> int:
        """The number of elements of a head that are turned."""
        return 0 if self._style.rotary == "no" else self._turning

    def turn(self, x: Node) -> Node:
        """`x` […, T, heads, d] or […, heads, T, d], which the style says, turned."""
        if self._style.rotary == "no":
            return x
        if self._turning == self._size:
            return self.turn_all(x)
        still = self._size - self._turning
        if self._style.turning == "first":
            part, rest = write_parts(self._w, "slice", x, (self._turning, still))
            return self._w.call(_aten.cat.default, [self.turn_all(part), rest], -1)
        rest, part = write_parts(self._w, "slice", x, (still, self._turning))
        return self._w.call(_aten.cat.default, [rest, self.turn_all(part)], -1)

    def turn_all(self, x: Node) -> Node:
        """`x`, the elements of heads that are turned, turned."""
        if self._tables is None:
            self._tables = write_tables(self._w, self._style, self._turning)
        dim = -2 if self._style.before_transpose else -3
        cosine, sine = (self._w.call(_aten.unsqueeze.default, table, dim) for table in self._tables)
        turns: dict[str, Turn] = {
            "halves": self._halves,
            "explicit halves": self._explicit_halves,
            "neighbours": self._neighbours,
            "repeated neighbours": self._repeated_neighbours,
        }
        return turns[self._style.rotary](x, cosine, sine)

    def _halves(self, x: Node, cosine: Node, sine: Node) -> Node:
        """transformers' rotate_half: x · cos + cat(−x₂, x₁) · sin."""
        first, second = self._two_halves(x)
        other = self._w.call(
            _aten.cat.default,
            [self._w.call(_aten.neg.default, second), first],
            -1,
        )
        return self._sum(self._product(x, cosine), self._product(other, sine))

    def _explicit_halves(self, x: Node, cosine: Node, sine: Node) -> Node:
        """cat(x₁ · cos − x₂ · sin, x₂ · cos + x₁ · sin)."""
        first, second = self._two_halves(x)
        return self._w.call(_aten.cat.default, self._pairs(first, second, cosine, sine), -1)

    def _neighbours(self, x: Node, cosine: Node, sine: Node) -> Node:
        """Elements 2i and 2i + 1 turn together."""
        way = "strided" if self._style.table_first else "grouped"
        even, odd = self._alternating(x, way)
        stacked = self._w.call(_aten.stack.default, self._pairs(even, odd, cosine, sine), -1)
        return self._w.call(_aten.flatten.using_ints, stacked, -2)

    def _repeated_neighbours(self, x: Node, cosine: Node, sine: Node) -> Node:
        """GPT-J's: x · cos + (−x₁, x₀, −x₃, x₂ …) · sin."""
        even, odd = self._alternating(x, "strided")
        stacked = self._w.call(_aten.stack.default, [self._w.call(_aten.neg.default, odd), even], -1)
        other = self._w.call(_aten.flatten.using_ints, stacked, -2)
        return self._sum(self._product(x, cosine), self._product(other, sine))

    def _pairs(self, first: Node, second: Node, cosine: Node, sine: Node) -> list[Node]:
        difference = self._w.call(_aten.sub.Tensor, self._product(first, cosine), self._product(second, sine))
        return [difference, self._sum(self._product(second, cosine), self._product(first, sine))]

    def _two_halves(self, x: Node) -> list[Node]:
        return write_parts(self._w, "chunk" if self._style.table_first else "slice", x, (self._turning // 2,) * 2)

    def _alternating(self, x: Node, way: str) -> list[Node]:
        if way == "strided":
            return write_alternating(self._w, way, x)
        pairs = self._w.call(_aten.unflatten.int, x, -1, [self._turning // 2, 2])
        return [self._w.call(_aten.select.int, pairs, -1, number) for number in range(2)]

    def _product(self, x: Node, table: Node) -> Node:
        return self._w.call(_aten.mul.Tensor, *((table, x) if self._style.table_first else (x, table)))

    def _sum(self, left: Node, right: Node) -> Node:
        return self._w.call(_aten.add.Tensor, left, right)
