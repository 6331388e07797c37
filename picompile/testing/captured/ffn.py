"""Feed-forward blocks, linears with the parts of fused ones, and norms, as captured graphs have them."""

import operator
from collections.abc import Sequence

import torch
from torch.fx import Node

from picompile.testing.captured.style import ACTIVATIONS, FfnStyle, LinearStyle, NormStyle
from picompile.testing.captured.writer import CaptureWriter

_aten = torch.ops.aten
_LARGEST = 2**63 - 1


def write_ffn(w: CaptureWriter, style: FfnStyle, x: Node, name: str, neurons: int) -> Node:
    """A block of `neurons` neurons on `x` […, n] → […, n]; OPT writes it for rows of tokens, whatever the batch."""
    inner = w.rows(x) if style.flat else x
    hidden = (
        _gated(w, style, x=inner, name=name, neurons=neurons)
        if style.gated
        else _plain(w, style, x=inner, name=name, neurons=neurons)
    )
    size = int(x.meta["val"].shape[-1])
    result = write_linear(w, style=style.linear, x=hidden, name=f"{name}.down_proj", outputs=size, bias=style.down_bias)
    return w.like_rows_of(x, result) if style.flat else result


def _plain(w: CaptureWriter, style: FfnStyle, x: Node, name: str, neurons: int) -> Node:
    up = write_linear(w, style=style.linear, x=x, name=f"{name}.up_proj", outputs=neurons, bias=style.bias)
    return ACTIVATIONS[style.activation].write(w, up, style.threshold)


def _gated(w: CaptureWriter, style: FfnStyle, x: Node, name: str, neurons: int) -> Node:
    gate, up = _gate_and_up(w, style, x, name, neurons)
    gate = ACTIVATIONS[style.activation].write(w, gate, style.threshold)
    up = ACTIVATIONS[style.up_activation].write(w, up, style.threshold)
    return w.call(_aten.mul.Tensor, *((up, gate) if style.up_first else (gate, up)))


def _gate_and_up(w: CaptureWriter, style: FfnStyle, x: Node, name: str, neurons: int) -> list[Node]:
    if style.fused == "no":
        names = (f"{name}.gate_proj", f"{name}.up_proj")
        return [write_linear(w, style=style.linear, x=x, name=each, outputs=neurons, bias=style.bias) for each in names]
    fused = write_linear(w, style=style.linear, x=x, name=f"{name}.gate_up_proj", outputs=2 * neurons, bias=style.bias)
    if style.fused in ("interleaved", "strided"):
        return write_alternating(w, style.fused, fused)
    return write_parts(w, style.fused, fused, (neurons, neurons))


def write_linear(w: CaptureWriter, style: LinearStyle, x: Node, name: str, outputs: int, *, bias: bool = False) -> Node:
    """The product of `x` […, n] with the weight `name`.weight, which is new → […, outputs]."""
    inputs = int(x.meta["val"].shape[-1])
    shape = (inputs, outputs) if style.product == "conv1d" else (outputs, inputs)
    weight = w.parameter(f"{name}.weight", *shape)
    return write_product(w, style, x, weight, bias=w.parameter(f"{name}.bias", outputs) if bias else None)


def write_product(w: CaptureWriter, style: LinearStyle, x: Node, weight: Node, bias: Node | None) -> Node:
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


def _on_rows(w: CaptureWriter, style: LinearStyle, x: Node, weight: Node, bias: Node | None) -> Node:
    """Multiply by `mm` or `addmm`, which take matrices only."""
    rows = w.rows(x)
    matrix = weight if style.product == "conv1d" else _transposed(w, style, weight)
    if bias is None:
        product = w.call(_aten.mm.default, rows, matrix)
    else:
        product = w.call(_aten.addmm.default, bias, rows, matrix)
    return w.like_rows_of(x, product)


def _transposed(w: CaptureWriter, style: LinearStyle, weight: Node) -> Node:
    if style.transposed == "permute":
        return w.call(_aten.permute.default, weight, [1, 0])
    if style.transposed == "t":
        return w.call(_aten.t.default, weight)
    return w.call(_aten.transpose.int, weight, -1, -2)


def write_parts(w: CaptureWriter, way: str, x: Node, sizes: Sequence[int]) -> list[Node]:
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


def write_alternating(w: CaptureWriter, way: str, x: Node, count: int = 2) -> list[Node]:
    """Every `count`-th element of the last dimension of `x`, from each of the first `count` on."""
    if way == "strided":
        return [w.call(_aten.slice.Tensor, x, -1, start, _LARGEST, count) for start in range(count)]
    grouped = w.split_last(x, int(x.meta["val"].shape[-1]) // count, count)
    return [w.call(_aten.select.int, grouped, -1, number) for number in range(count)]


def write_unbound(w: CaptureWriter, x: Node, dim: int) -> list[Node]:
    """The parts of `x` along `dim`, without it."""
    return _items(w, w.builder.call(_aten.unbind.int, x, dim), int(x.meta["val"].shape[dim]))


def _items(w: CaptureWriter, parts: Node, count: int) -> list[Node]:
    return [w.call(operator.getitem, parts, number) for number in range(count)]


def write_norm(w: CaptureWriter, style: NormStyle, x: Node, name: str) -> Node:
    """The normalization of `x` over its last dimension; its parameters are `name`.weight and `name`.bias."""
    size = int(x.meta["val"].shape[-1])
    weight = None if style.affine == "none" else w.parameter(f"{name}.weight", size)
    if weight is not None and style.one_more:
        weight = w.call(_aten.add.Tensor, weight, 1.0)
    if style.kind == "layer":
        bias = w.parameter(f"{name}.bias", size) if style.affine == "weight and bias" else None
        return w.call(_aten.layer_norm.default, x, [size], weight, bias, style.eps)
    if style.writing.startswith("operator") and style.kind == "rms":
        eps = None if style.writing == "operator without eps" else style.eps
        return w.call(_aten.rms_norm.default, x, [size], weight, eps)
    normed = _over_root(w, style, x)
    if weight is None:
        return normed
    return w.call(_aten.mul.Tensor, *((weight, normed) if style.weight_first else (normed, weight)))


def _over_root(w: CaptureWriter, style: NormStyle, x: Node) -> Node:
    """x / sqrt(mean(x²) + eps), x less its mean where that is centered."""
    inner = _centered(w, x) if style.kind == "centered twice" else x
    x = x if style.kind == "rms" else _centered(w, x)
    inner = x if style.kind == "centered" else inner
    mean = w.call(_aten.mean.dim, _square(w, style.square, inner), [-1], True)
    shifted = w.call(_aten.add.Tensor, mean, style.eps)
    if style.writing == "sqrt":
        return w.call(_aten.div.Tensor, x, w.call(_aten.sqrt.default, shifted))
    if style.writing == "rsqrt":
        inverse = w.call(_aten.rsqrt.default, shifted)
    else:
        inverse = w.call(_aten.reciprocal.default, w.call(_aten.sqrt.default, shifted))
    if style.writing == "one over sqrt":
        inverse = w.call(_aten.mul.Tensor, inverse, 1.0)
    return w.call(_aten.mul.Tensor, *((inverse, x) if style.inverse_first else (x, inverse)))


def _centered(w: CaptureWriter, x: Node) -> Node:
    return w.call(_aten.sub.Tensor, x, w.call(_aten.mean.dim, x, [-1], True))


def _square(w: CaptureWriter, kind: str, x: Node) -> Node:
    if kind == "pow":
        return w.call(_aten.pow.Tensor_Scalar, x, 2)
    return w.call(_aten.mul.Tensor, x, x) if kind == "mul" else w.call(_aten.square.default, x)
