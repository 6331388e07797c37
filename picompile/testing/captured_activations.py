"""Activations as captured graphs have them: the ways in which models write each, by name."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.fx import Node

from picompile.testing.captured_writer import Writer

_aten = torch.ops.aten
_mul, _add, _div = _aten.mul.Tensor, _aten.add.Tensor, _aten.div.Tensor


class Activation(NamedTuple):
    """`write(writer, x, threshold)`; `text` is the dialect's, in which {} stands for the threshold."""

    text: str
    write: Callable[[Writer, Node, float], Node]


def _maximum(w: Writer, x: Node, _: float) -> Node:
    return w.call(_aten.maximum.default, x, w.call(_aten.zeros_like.default, x))


def _max(w: Writer, x: Node, _: float) -> Node:
    return w.call(_aten.max.other, w.call(_aten.zeros_like.default, x), x)


def _where_positive(w: Writer, x: Node, _: float) -> Node:
    zeros = w.call(_aten.zeros_like.default, x)
    return w.call(_aten.where.self, w.call(_aten.gt.Scalar, x, 0), x, zeros)


def _relu(w: Writer, x: Node) -> Node:
    return w.call(_aten.relu.default, x)


def _relu_times_itself(w: Writer, x: Node, _: float) -> Node:
    rectified = _relu(w, x)
    return w.call(_mul, rectified, rectified)


def _minimum_of_six(w: Writer, x: Node, _: float) -> Node:
    return w.call(_aten.clamp_max.default, _relu(w, x), 6.0)


def _times_sigmoid(w: Writer, x: Node, _: float) -> Node:
    return w.call(_mul, x, w.call(_aten.sigmoid.default, x))


def _sigmoid_times(w: Writer, x: Node, _: float) -> Node:
    return w.call(_mul, w.call(_aten.sigmoid.default, x), x)


def _over_exponential(w: Writer, x: Node, _: float) -> Node:
    exponential = w.call(_aten.exp.default, w.call(_aten.neg.default, x))
    return w.call(_div, x, w.call(_add, exponential, 1.0))


def _gelu_by_erf(w: Writer, x: Node, _: float) -> Node:
    """transformers' gelu_python."""
    erf = w.call(_aten.erf.default, w.call(_div, x, 2.0**0.5))
    return w.call(_mul, w.call(_mul, x, 0.5), w.call(_add, erf, 1.0))


def _gelu_by_erf_late(w: Writer, x: Node, _: float) -> Node:
    erf = w.call(_aten.erf.default, w.call(_mul, x, 0.5**0.5))
    return w.call(_div, w.call(_mul, w.call(_add, erf, 1.0), x), 2.0)


def _gelu_tanh(w: Writer, x: Node, _: float) -> Node:
    return w.call(_aten.gelu.default, x, approximate="tanh")


def _gelu_new(w: Writer, x: Node, _: float) -> Node:
    """transformers' gelu_new."""
    cubed = w.call(_mul, w.call(_aten.pow.Tensor_Scalar, x, 3.0), 0.044715)
    inner = w.call(_mul, w.call(_add, x, cubed), 0.7978845608028654)
    outer = w.call(_add, w.call(_aten.tanh.default, inner), 1.0)
    return w.call(_mul, w.call(_mul, x, 0.5), outer)


def _gelu_fast(w: Writer, x: Node, _: float) -> Node:
    """transformers' gelu_fast."""
    factor = w.call(_add, w.call(_mul, w.call(_mul, x, 0.044715), x), 1.0)
    tanh = w.call(_aten.tanh.default, w.call(_mul, w.call(_mul, x, 0.7978845608), factor))
    return w.call(_mul, w.call(_mul, x, 0.5), w.call(_add, tanh, 1.0))


def _quick_gelu(w: Writer, x: Node, _: float) -> Node:
    return w.call(_mul, x, w.call(_aten.sigmoid.default, w.call(_mul, x, 1.702)))


def _fatrelu_by_where(w: Writer, x: Node, threshold: float) -> Node:
    zeros = w.call(_aten.zeros_like.default, x)
    return w.call(_aten.where.self, w.call(_aten.gt.Scalar, x, threshold), x, zeros)


def _fatrelu_by_number(w: Writer, x: Node, threshold: float) -> Node:
    """`torch.where(x > threshold, x, 0.0)`."""
    return w.call(_aten.where.ScalarOther, w.call(_aten.gt.Scalar, x, threshold), x, 0.0)


def _fatrelu_by_float_mask(w: Writer, x: Node, threshold: float) -> Node:
    mask = w.call(_aten._to_copy.default, w.call(_aten.gt.Scalar, x, threshold), dtype=torch.float32)
    return w.call(_mul, x, mask)


def _fatrelu_by_constant(w: Writer, x: Node, threshold: float) -> Node:
    zero = w.shared("zero", lambda: w.constant("model.zero", torch.zeros(())))
    return w.call(_aten.where.self, w.call(_aten.gt.Scalar, x, threshold), x, zero)


def _fatrelu_by_full(w: Writer, x: Node, threshold: float) -> Node:
    zero = w.call(_aten.full.default, [], 0.0)
    return w.call(_aten.where.self, w.call(_aten.le.Scalar, x, threshold), zero, x)


def _fatrelu_by_mask(w: Writer, x: Node, threshold: float) -> Node:
    return w.call(_mul, x, w.call(_aten.gt.Scalar, x, threshold))


def _fatrelu_by_fill(w: Writer, x: Node, threshold: float) -> Node:
    return w.call(_aten.masked_fill.Scalar, x, w.call(_aten.le.Scalar, x, threshold), 0.0)


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation("relu", lambda w, x, _: _relu(w, x)),
    "clamp_min": Activation("relu", lambda w, x, _: w.call(_aten.clamp_min.default, x, 0)),
    "clamp": Activation("relu", lambda w, x, _: w.call(_aten.clamp.default, x, 0)),
    "maximum": Activation("relu", _maximum),
    "max": Activation("relu", _max),
    "where positive": Activation("relu", _where_positive),
    "relu pow 2": Activation("relu2", lambda w, x, _: w.call(_aten.pow.Tensor_Scalar, _relu(w, x), 2)),
    "relu square": Activation("relu2", lambda w, x, _: w.call(_aten.square.default, _relu(w, x))),
    "relu times itself": Activation("relu2", _relu_times_itself),
    "relu times input": Activation("relu2", lambda w, x, _: w.call(_mul, x, _relu(w, x))),
    "relu6": Activation("relu6", lambda w, x, _: w.call(_aten.relu6.default, x)),
    "hardtanh": Activation("relu6", lambda w, x, _: w.call(_aten.hardtanh.default, x, 0.0, 6.0)),
    "clamp to 6": Activation("relu6", lambda w, x, _: w.call(_aten.clamp.default, x, 0, 6)),
    "relu clamp_max": Activation("relu6", _minimum_of_six),
    "silu": Activation("silu", lambda w, x, _: w.call(_aten.silu.default, x)),
    "times sigmoid": Activation("silu", _times_sigmoid),
    "sigmoid times": Activation("silu", _sigmoid_times),
    "over exponential": Activation("silu", _over_exponential),
    "gelu": Activation("gelu", lambda w, x, _: w.call(_aten.gelu.default, x)),
    "gelu by erf": Activation("gelu", _gelu_by_erf),
    "gelu by erf, halved late": Activation("gelu", _gelu_by_erf_late),
    "gelu tanh": Activation("gelu_tanh", _gelu_tanh),
    "gelu_new": Activation("gelu_tanh", _gelu_new),
    "gelu_fast": Activation("gelu_tanh", _gelu_fast),
    "quick_gelu": Activation("quick_gelu", _quick_gelu),
    "sigmoid": Activation("sigmoid", lambda w, x, _: w.call(_aten.sigmoid.default, x)),
    "tanh": Activation("tanh", lambda w, x, _: w.call(_aten.tanh.default, x)),
    "fatrelu by where": Activation("fatrelu({})", _fatrelu_by_where),
    "fatrelu by constant": Activation("fatrelu({})", _fatrelu_by_constant),
    "fatrelu by full": Activation("fatrelu({})", _fatrelu_by_full),
    "fatrelu by number": Activation("fatrelu({})", _fatrelu_by_number),
    "fatrelu by float mask": Activation("fatrelu({})", _fatrelu_by_float_mask),
    "fatrelu by mask": Activation("fatrelu({})", _fatrelu_by_mask),
    "fatrelu by fill": Activation("fatrelu({})", _fatrelu_by_fill),
    "threshold": Activation("fatrelu({})", lambda w, x, t: w.call(_aten.threshold.default, x, t, 0.0)),
    "identity": Activation("identity", lambda w, x, _: x),
}
