"""Positions as captured graphs have them: embeddings of positions, and rotary embeddings of queries and keys."""

from collections.abc import Callable

import torch
from torch.fx import Node

from picompile.testing.captured_linears import write_alternating, write_parts
from picompile.testing.captured_style import TABLE_ROWS, PositionStyle
from picompile.testing.captured_tables import write_tables
from picompile.testing.captured_writer import Writer

_aten = torch.ops.aten

# Turns a value by cosines and sines.
Turn = Callable[[Node, Node, Node], Node]


def write_position_embedding(w: Writer, style: PositionStyle, x: Node) -> Node:
    """`x` [1, T, n] or [T, n] plus a row of a table for each position; `x` itself where the style has none."""
    if style.learned == "no":
        return x
    size = int(x.meta["val"].shape[-1])
    rows = TABLE_ROWS + style.offset
    if style.learned == "sinusoid":
        angles = torch.outer(torch.arange(float(rows)), 0.5 ** torch.arange(1.0, size + 1))
        table = w.constant("model.embed_positions.weights", angles.sin())
    else:
        table = w.parameter("model.embed_positions.weight", rows, size)
    places = _places(w, style)
    return w.call(_aten.add.Tensor, x, w.call(_aten.embedding.default, table, places))


def _places(w: Writer, style: PositionStyle) -> Node:
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

    def __init__(self, w: Writer, style: PositionStyle, size: int) -> None:
        self._w, self._style, self._size = w, style, size
        self._turning = size if style.turning == "all" else 2 * max(1, size // 4)
        self._tables: tuple[Node, Node] | None = None

    def turn(self, x: Node) -> Node:
        """`x` […, T, heads, d] or […, heads, T, d], which the style says, turned."""
        if self._style.rotary == "no":
            return x
        if self._tables is None:
            self._tables = write_tables(self._w, self._style, self._turning)
        dim = -2 if self._style.before_transpose else -3
        cosine, sine = (self._w.call(_aten.unsqueeze.default, table, dim) for table in self._tables)
        if self._turning == self._size:
            return self._turned(x, cosine, sine)
        still = self._size - self._turning
        if self._style.turning == "first":
            part, rest = write_parts(self._w, "slice", x, (self._turning, still))
            return self._w.call(_aten.cat.default, [self._turned(part, cosine, sine), rest], -1)
        rest, part = write_parts(self._w, "slice", x, (still, self._turning))
        return self._w.call(_aten.cat.default, [rest, self._turned(part, cosine, sine)], -1)

    def _turned(self, x: Node, cosine: Node, sine: Node) -> Node:
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
        other = self._w.call(_aten.cat.default, [self._w.call(_aten.neg.default, second), first], -1)
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
