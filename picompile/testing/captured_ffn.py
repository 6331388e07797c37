"""Feed-forward blocks as captured graphs have them."""

import torch
from torch.fx import Node

from picompile.testing.captured_activations import ACTIVATIONS
from picompile.testing.captured_linears import write_alternating, write_linear, write_parts
from picompile.testing.captured_style import FfnStyle
from picompile.testing.captured_writer import Writer

_aten = torch.ops.aten


def write_ffn(w: Writer, style: FfnStyle, x: Node, name: str, neurons: int) -> Node:
    """A block of `neurons` neurons on `x` […, n] → […, n]; OPT writes it for rows of tokens, whatever the batch."""
    inner = w.rows(x) if style.flat else x
    hidden = _gated(w, style, inner, name, neurons) if style.gated else _plain(w, style, inner, name, neurons)
    size = int(x.meta["val"].shape[-1])
    result = write_linear(w, style.linear, hidden, f"{name}.down_proj", size, bias=style.down_bias)
    return w.like_rows_of(x, result) if style.flat else result


def _plain(w: Writer, style: FfnStyle, x: Node, name: str, neurons: int) -> Node:
    up = write_linear(w, style.linear, x, f"{name}.up_proj", neurons, bias=style.bias)
    return ACTIVATIONS[style.activation].write(w, up, style.threshold)


def _gated(w: Writer, style: FfnStyle, x: Node, name: str, neurons: int) -> Node:
    gate, up = _gate_and_up(w, style, x, name, neurons)
    gate = ACTIVATIONS[style.activation].write(w, gate, style.threshold)
    up = ACTIVATIONS[style.up_activation].write(w, up, style.threshold)
    return w.call(_aten.mul.Tensor, *((up, gate) if style.up_first else (gate, up)))


def _gate_and_up(w: Writer, style: FfnStyle, x: Node, name: str, neurons: int) -> list[Node]:
    if style.fused == "no":
        names = (f"{name}.gate_proj", f"{name}.up_proj")
        return [write_linear(w, style.linear, x, each, neurons, bias=style.bias) for each in names]
    fused = write_linear(w, style.linear, x, f"{name}.gate_up_proj", 2 * neurons, bias=style.bias)
    if style.fused in ("interleaved", "strided"):
        return write_alternating(w, style.fused, fused)
    return write_parts(w, style.fused, fused, (neurons, neurons))
