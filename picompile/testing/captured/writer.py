"""`CaptureWriter`, which all parts of a captured decoder use: calls with random copies between them, and views."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.values import fake_mode_of

_aten = torch.ops.aten

_COPY_SHARE = 0.12
# Operators that return their argument, with their further arguments.
_COPIES: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = (
    (_aten.clone.default, (), {}),
    (_aten.clone.default, (), {"memory_format": torch.contiguous_format}),
    (_aten.alias.default, (), {}),
    (_aten.detach.default, (), {}),
    (_aten.contiguous.default, (), {}),
    (_aten.dropout.default, (0.1, False), {}),
)
_CASTS: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = (
    (_aten._to_copy.default, (), {"dtype": torch.float32}),
    (_aten.to.dtype, (torch.float32,), {}),
)


class CaptureWriter:
    """A graph builder that writes calls in a given style. With `batched`, values are [1, T, …], not [T, …].

    `views` is how shapes are changed (`view`, `reshape`, or `flatten` and `unflatten` where they can), `count` how the
    token count is given there. With `copies`, the seed of a random generator, some values pass through a copy.
    """

    def __init__(self, *, batched: bool, views: str, count: str, copies: int, max_tokens: int | None) -> None:
        self.builder = GraphBuilder()
        self.tokens, self.positions = self.builder.tokens, self.builder.positions
        self.batched = batched
        self._views, self._count, self._copies = views, count, random.Random(copies) if copies else None
        self._size: Node | None = None
        self._shared: dict[Any, Any] = {}
        mode = fake_mode_of(self.builder.graph)
        # For a graph of a few layers, filling torch's cache takes longer than what it saves: half of the time.
        mode.cache_enabled = False
        if max_tokens is not None:
            with mode:
                torch._check(self.tokens.meta["val"].shape[0] <= max_tokens)  # type: ignore[no-untyped-call]

    def call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Call `op`, and sometimes copy the result."""
        return self._perhaps_copied(self.builder.call(op, *args, **kwargs))

    def parameter(self, name: str, *shape: int) -> Node:
        """A parameter, and sometimes a copy of it."""
        return self._perhaps_copied(self.builder.parameter(name, *shape))

    def constant(self, name: str, tensor: Tensor) -> Node:
        """A buffer."""
        return self.builder.constant(name, tensor)

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` returned when `key` was first asked for."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def size(self) -> Node:
        """The token count."""
        if self._size is None:
            self._size = self.builder.call(_aten.sym_size.int, self.tokens, 0)
        return self._size

    def reshape(self, x: Node, shape: Sequence[Any]) -> Node:
        """`x` in another shape, copied before where its memory does not allow a view."""
        if self._views != "view":
            return self.call(_aten.reshape.default, x, list(shape))
        if x.meta["val"].is_contiguous():
            return self.call(_aten.view.default, x, list(shape))
        copy = self.builder.call(_aten.clone.default, x, memory_format=torch.contiguous_format)
        return self.call(_aten._unsafe_view.default, copy, list(shape))

    def split_last(self, x: Node, *sizes: int) -> Node:
        """The last dimension as several."""
        if self._views == "flatten":
            return self.call(_aten.unflatten.int, x, -1, list(sizes))
        return self.reshape(x, [*self._lead(x), *sizes])

    def merge_last(self, x: Node, count: int = 2) -> Node:
        """The last `count` dimensions as one."""
        if self._views == "flatten":
            return self.call(_aten.flatten.using_ints, x, -count, -1)
        merged = 1
        for size in x.meta["val"].shape[-count:]:
            merged *= int(size)
        return self.reshape(x, [*self._lead(x), merged])

    def rows(self, x: Node) -> Node:
        """`x` [1, T, n] or [T, n] as [T, n]."""
        return self.reshape(x, [-1, int(x.meta["val"].shape[-1])]) if x.meta["val"].dim() == 3 else x

    def like_rows_of(self, x: Node, rows: Node) -> Node:
        """`rows` [T, n] with the leading dimensions of `x`."""
        if x.meta["val"].dim() != 3:
            return rows
        return self.reshape(rows, [*self._lead(x), int(rows.meta["val"].shape[-1])])

    def swapped(self, x: Node, by_permute: bool = False) -> Node:
        """Tokens and heads exchanged: […, a, b, n] → […, b, a, n]."""
        last = x.meta["val"].dim() - 1
        if by_permute:
            return self.call(_aten.permute.default, x, [*range(last - 2), last - 1, last - 2, last])
        return self.call(_aten.transpose.int, x, last - 2, last - 1)

    def _lead(self, x: Node) -> list[Any]:
        """The dimensions that say which token."""
        count = self.size() if self._count == "size" else -1
        return [1, count] if self.batched and x.meta["val"].dim() > 2 else [count]

    def _perhaps_copied(self, node: Node) -> Node:
        value = node.meta["val"]
        if self._copies is None or not isinstance(value, Tensor) or not value.is_floating_point():
            return node
        if self._copies.random() >= _COPY_SHARE:
            return node
        op, args, kwargs = self._copies.choice((*_COPIES, *_CASTS))
        return self.builder.call(op, node, *args, **kwargs)
