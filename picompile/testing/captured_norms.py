"""Normalizations as captured graphs have them."""

import torch
from torch.fx import Node

from picompile.testing.captured_style import NormStyle
from picompile.testing.captured_writer import Writer

_aten = torch.ops.aten


def write_norm(w: Writer, style: NormStyle, x: Node, name: str) -> Node:
    """The normalization of `x` over its last dimension; its parameters are `name`.weight and `name`.bias."""
    size = int(x.meta["val"].shape[-1])
    weight = None if style.affine == "none" else w.parameter(f"{name}.weight", size)
    if style.kind == "layer":
        bias = w.parameter(f"{name}.bias", size) if style.affine == "weight and bias" else None
        return w.call(_aten.layer_norm.default, x, [size], weight, bias, style.eps)
    if style.writing.startswith("operator"):
        eps = None if style.writing == "operator without eps" else style.eps
        return w.call(_aten.rms_norm.default, x, [size], weight, eps)
    normed = _over_root(w, style, x)
    if weight is None:
        return normed
    return w.call(_aten.mul.Tensor, *((weight, normed) if style.weight_first else (normed, weight)))


def _over_root(w: Writer, style: NormStyle, x: Node) -> Node:
    """x / sqrt(mean(x²) + eps)."""
    mean = w.call(_aten.mean.dim, _square(w, style.square, x), [-1], True)
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


def _square(w: Writer, kind: str, x: Node) -> Node:
    if kind == "pow":
        return w.call(_aten.pow.Tensor_Scalar, x, 2)
    return w.call(_aten.mul.Tensor, x, x) if kind == "mul" else w.call(_aten.square.default, x)
