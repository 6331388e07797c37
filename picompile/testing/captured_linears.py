"""Products with a weight as captured graphs have them, and the parts of fused ones."""

import operator
from collections.abc import Sequence

import torch
from torch.fx import Node

from picompile.testing.captured_style import LinearStyle
from picompile.testing.captured_writer import Writer

_aten = torch.ops.aten
_LARGEST = 2**63 - 1


def write_linear(w: Writer, style: LinearStyle, x: Node, name: str, outputs: int, *, bias: bool = False) -> Node:
    """The product of `x` […, n] with the weight `name`.weight, which is new → […, outputs]."""
    inputs = int(x.meta["val"].shape[-1])
    shape = (inputs, outputs) if style.product == "conv1d" else (outputs, inputs)
    weight = w.parameter(f"{name}.weight", *shape)
    return write_product(w, style, x, weight, w.parameter(f"{name}.bias", outputs) if bias else None)


def write_product(w: Writer, style: LinearStyle, x: Node, weight: Node, bias: Node | None) -> Node:
    """The product of `x` […, n] with `weight` [m, n] → […, m]; with [n, m] for `conv1d`."""
    if style.product == "linear":
        return w.call(_aten.linear.default, x, weight, bias)
    if style.product in ("flattened", "conv1d"):
        return _on_rows(w, style, x, weight, bias)
    if style.product == "linear plus bias":
        product = w.call(_aten.linear.default, x, weight)
    else:
        product = w.call(_aten.matmul.default, x, _transposed(w, style, weight))
    if bias is None:
        return product
    return w.call(_aten.add.Tensor, *((bias, product) if style.bias_first else (product, bias)))


def _on_rows(w: Writer, style: LinearStyle, x: Node, weight: Node, bias: Node | None) -> Node:
    """By `mm` or `addmm`, which take matrices only."""
    rows = w.rows(x)
    matrix = weight if style.product == "conv1d" else _transposed(w, style, weight)
    if bias is None:
        product = w.call(_aten.mm.default, rows, matrix)
    else:
        product = w.call(_aten.addmm.default, bias, rows, matrix)
    return w.like_rows_of(x, product)


def _transposed(w: Writer, style: LinearStyle, weight: Node) -> Node:
    if style.transposed == "permute":
        return w.call(_aten.permute.default, weight, [1, 0])
    if style.transposed == "t":
        return w.call(_aten.t.default, weight)
    return w.call(_aten.transpose.int, weight, -1, -2)


def write_parts(w: Writer, way: str, x: Node, sizes: Sequence[int]) -> list[Node]:
    """The last dimension of `x` in parts of `sizes`, side by side. `chunk` wants them equal."""
    if way == "chunk":
        return _items(w, w.builder.call(_aten.chunk.default, x, len(sizes), -1), len(sizes))
    if way == "split" and len(set(sizes)) == 1:
        return _items(w, w.builder.call(_aten.split.Tensor, x, sizes[0], -1), len(sizes))
    if way == "split":
        return _items(w, w.builder.call(_aten.split_with_sizes.default, x, list(sizes), -1), len(sizes))
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    if way == "narrow":
        return [w.call(_aten.narrow.default, x, -1, start, size) for start, size in zip(starts, sizes, strict=True)]
    ends = [*starts[1:], _LARGEST]
    return [w.call(_aten.slice.Tensor, x, -1, start, end) for start, end in zip(starts, ends, strict=True)]


def write_alternating(w: Writer, way: str, x: Node, count: int = 2) -> list[Node]:
    """Every `count`-th element of the last dimension of `x`, from each of the first `count` on."""
    if way == "strided":
        return [w.call(_aten.slice.Tensor, x, -1, start, _LARGEST, count) for start in range(count)]
    grouped = w.split_last(x, int(x.meta["val"].shape[-1]) // count, count)
    return [w.call(_aten.select.int, grouped, -1, number) for number in range(count)]


def write_unbound(w: Writer, x: Node, dim: int) -> list[Node]:
    """The parts of `x` along `dim`, without it."""
    return _items(w, w.builder.call(_aten.unbind.int, x, dim), int(x.meta["val"].shape[dim]))


def _items(w: Writer, parts: Node, count: int) -> list[Node]:
    return [w.call(operator.getitem, parts, number) for number in range(count)]
