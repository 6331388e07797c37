"""Values of each head, [1, H, T, d] or [1, T, H, d], as values of all features of a token, [1, T, H · d], and back."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

# call(operator, arguments …): makes a node in its place in the graph.
Call = Callable[..., Node]

_aten = torch.ops.aten


@dataclass(frozen=True)
class HeadLayout:
    """The dimensions of a value that has heads: `tokens` is that of the tokens, `heads` those of the heads.

    `shape` is the value's, and `order` the permutation that puts the heads next to the last dimension.
    """

    shape: tuple[Any, ...]
    tokens: int
    heads: tuple[int, ...]

    @classmethod
    def of(cls, node: Node) -> "HeadLayout | None":
        """Return the layout of the value of `node`, None where each token has one row, as it should have."""
        shape = tuple(node.meta["val"].shape)
        tokens = [dim for dim, size in enumerate(shape) if not isinstance(size, int)]
        heads = tuple(dim for dim, size in enumerate(shape[:-1]) if isinstance(size, int) and size > 1)
        return cls(shape, tokens[0], heads) if heads and len(tokens) == 1 and tokens[0] < len(shape) - 1 else None

    @property
    def groups(self) -> int:
        """Return the number of heads."""
        return math.prod(self.shape[dim] for dim in self.heads)

    @property
    def width(self) -> int:
        """The elements of a head."""
        return int(self.shape[-1])

    @property
    def order(self) -> list[int]:
        """The dimensions, those of the heads behind the tokens'."""
        last = len(self.shape) - 1
        others = [dim for dim in range(last) if dim not in (self.tokens, *self.heads)]
        return [*others, self.tokens, *self.heads, last]

    def flat(self, call: Call, x: Node) -> Node:
        """Return x, of this shape or one that is broadcast to it, as [1, T, H · d]."""
        if not _same_sizes(x.meta["val"].shape, self.shape):
            x = call(_aten.expand.default, x, [-1 if not isinstance(size, int) else size for size in self.shape])
        return call(_aten.flatten.using_ints, call(_aten.permute.default, x, self.order), -len(self.heads) - 1, -1)

    def vector(self, call: Call, constant: Node) -> Node:
        """Return a constant that is broadcast to the heads and elements of a value as a vector [H · d]."""
        sizes = [self.shape[dim] for dim in self.heads]
        shape = tuple(constant.meta["val"].shape)
        padded = (1,) * (len(self.shape) - len(shape)) + shape
        own = [padded[dim] for dim in (*self.heads, len(self.shape) - 1)]
        wide = call(_aten.expand.default, call(_aten.reshape.default, constant, own), [*sizes, self.width])
        return call(_aten.reshape.default, wide, [self.groups * self.width])

    def restored(self, call: Call, flat: Node) -> Node:
        """Return a value [1, T, H · d] in this layout."""
        sizes = [*(self.shape[dim] for dim in self.heads), self.width]
        parts = call(_aten.unflatten.int, flat, -1, sizes)
        return call(_aten.permute.default, parts, [self.order.index(dim) for dim in range(len(self.shape))])


def _same_sizes(left: Any, right: Any) -> bool:
    """Return whether two shapes are equal, token counts included, without fixing these."""
    known = [[size if isinstance(size, int) else None for size in shape] for shape in (left, right)]
    return known[0] == known[1]
