"""Where a model jumps: the smallest change of a value makes a neuron fire that was silent.

FATReLU jumps at its threshold, and so does a block whose predictor compares with one. Two right ways to compute one
model may then differ, because a float32 rounding brought a value to the other side.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.nn import functional as F

from picompile_passes.dialect import parse_activation
from picompile_passes.nodes import arguments, is_call
from picompile_passes.operands import FFN, PREDICT, SPARSE_FFN
from picompile_passes.predictors import predictor_kind

# Far more than float32 rounds the values of a small model by.
_NEAR = 1e-5

_aten = torch.ops.aten
_COMPARISONS = tuple(
    getattr(op, form) for op in (_aten.gt, _aten.ge, _aten.lt, _aten.le) for form in ("Scalar", "Tensor")
)


def near_jump(graph_module: GraphModule, tokens: Tensor) -> bool:
    """Whether a neuron of `graph_module`, which must have real weights, lies next to a jump for `tokens` int64 [T]."""
    values = node_values(graph_module, tokens)
    return any(_is_near_jump(node, values) for node in graph_module.graph.nodes)


def node_values(graph_module: GraphModule, tokens: Tensor) -> dict[str, Any]:
    """The value of every node, by its name, of `graph_module`, which must have real weights, for `tokens` int64 [T]."""
    values: dict[str, Any] = {}

    class Notes(Interpreter):
        def run_node(self, n: Node) -> Any:
            values[n.name] = super().run_node(n)
            return values[n.name]

    with torch.no_grad():
        Notes(graph_module).run(tokens, torch.arange(len(tokens)))
    return values


def _is_near_jump(node: Node, values: dict[str, Any]) -> bool:
    if not is_call(node, FFN, SPARSE_FFN, PREDICT, _aten.threshold.default, *_COMPARISONS):
        return False
    known = {name: map_arg(value, lambda read: values[read.name]) for name, value in arguments(node).items()}
    if is_call(node, FFN, SPARSE_FFN):
        return _block_is_near(known)
    if is_call(node, PREDICT):
        return _predictor_is_near(known)
    x, threshold, *_ = known.values()
    return _compares_near(x, threshold)


def _block_is_near(values: dict[str, Any]) -> bool:
    side = "up" if values["gate"] is None else "gate"
    threshold = parse_activation(values["activation"]).threshold
    return _compares_near(F.linear(values["x"], values[side], values[f"{side}_bias"]), threshold)


def _predictor_is_near(values: dict[str, Any]) -> bool:
    if values["kind"] == "exact":
        # It jumps where its block does.
        return False
    evaluate, x, threshold = predictor_kind(values["kind"]).evaluate, values["x"], values["threshold"]
    # Sums of large values are rounded by as much more.
    near = _NEAR * max(1.0, float(x.abs().max()))
    # A rounding moves what is compared with the threshold; where signs are counted, it moves x past 0.
    dx, dt = (near, 0.0) if values["kind"] == "sign" else (0.0, near)
    below, above = (evaluate(x + side * dx, values["weights"], threshold + side * dt) for side in (-1, 1))
    return not torch.equal(below, above)


def _compares_near(x: Any, threshold: Any) -> bool:
    """Whether a value of `x` is next to the threshold of a jump: at 0 there is none, the value is 0 on both sides."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return False
    distance = (x - threshold).abs()
    return bool(((distance < _NEAR) & (torch.as_tensor(threshold) != 0)).any())
