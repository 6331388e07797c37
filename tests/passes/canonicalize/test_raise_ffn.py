from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from helpers.raising import HIDDEN, Write, aten, captured, linear, only, operators, raised
from picompile_passes.dialect import ACTIVATIONS, parse_activation
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.nodes import arguments
from picompile_passes.graph.operands import FFN, LINEAR, RMS_NORM, TRANSPOSE
from picompile_passes.passes.canonicalize.raise_ffn import RaiseFFN, recognize_activation

NEURONS = 40

Act = Write


def _up(b: GraphBuilder, x: Node, name: str = "up", bias: bool = False) -> Node:
    return linear(b, x, name, NEURONS, bias=bias)


def _down(b: GraphBuilder, hidden: Node, bias: bool = False) -> Node:
    return linear(b, hidden, "down", bias=bias)


def _plain(act: Act, bias: bool = False) -> GraphModule:
    return captured(lambda b, x: _down(b, act(b, _up(b, x, bias=bias)), bias))


def _block(graph_module: GraphModule) -> dict:
    return arguments(only(graph_module, FFN))


def _of(op: object, *args: object) -> Act:
    return lambda b, x: b.call(op, x, *args)


def _silu(b: GraphBuilder, x: Node) -> Node:
    return b.call(aten.mul.Tensor, b.call(aten.sigmoid.default, x), x)


def _greater(b: GraphBuilder, x: Node, threshold: float) -> Node:
    return b.call(aten.gt.Scalar, x, threshold)


def _gelu_tanh(b: GraphBuilder, x: Node) -> Node:
    """gelu_new of transformers."""
    cubed = b.call(aten.mul.Tensor, b.call(aten.pow.Tensor_Scalar, x, 3.0), 0.044715)
    inner = b.call(aten.mul.Tensor, b.call(aten.add.Tensor, x, cubed), 0.7978845608028654)
    outer = b.call(aten.add.Tensor, b.call(aten.tanh.default, inner), 1.0)
    return b.call(aten.mul.Tensor, b.call(aten.mul.Tensor, x, 0.5), outer)


def _fatrelu_of_float_mask(b: GraphBuilder, x: Node) -> Node:
    return b.call(aten.mul.Tensor, x, b.call(aten._to_copy.default, _greater(b, x, 0.1), dtype=torch.float32))


def _gelu_special(b: GraphBuilder, x: Node) -> Node:
    erf = b.call(aten.special_erf.default, b.call(aten.div.Tensor, x, 2**0.5))
    return b.call(aten.mul.Tensor, b.call(aten.mul.Tensor, x, 0.5), b.call(aten.add.Tensor, erf, 1.0))


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (_of(aten.relu.default), "relu"),
        (_of(aten.clamp_min.default, 0), "relu"),
        (lambda b, x: b.call(aten.maximum.default, x, b.call(aten.new_zeros.default, x, [])), "relu"),
        (_of(aten.silu.default), "silu"),
        (_silu, "silu"),
        (_of(aten.gelu.default), "gelu"),
        (_gelu_special, "gelu"),
        (_gelu_tanh, "gelu_tanh"),
        (
            lambda b, x: b.call(aten.mul.Tensor, x, b.call(aten.sigmoid.default, b.call(aten.mul.Tensor, x, 1.702))),
            "quick_gelu",
        ),
        (lambda b, x: b.call(aten.pow.Tensor_Scalar, b.call(aten.relu.default, x), 2), "relu2"),
        (_of(aten.hardtanh.default, 0.0, 6.0), "relu6"),
        (_of(aten.sigmoid.default), "sigmoid"),
        (_of(aten.tanh.default), "tanh"),
        (
            lambda b, x: b.call(aten.where.self, _greater(b, x, 0.01), x, b.call(aten.zeros_like.default, x)),
            "fatrelu(0.01)",
        ),
        (
            lambda b, x: b.call(aten.where.self, _greater(b, x, 0.3), x, b.constant("zero", torch.zeros(()))),
            "fatrelu(0.3)",
        ),
        (lambda b, x: b.call(aten.where.ScalarOther, _greater(b, x, 0.1), x, 0.0), "fatrelu(0.1)"),
        (lambda b, x: b.call(aten.where.ScalarSelf, b.call(aten.le.Scalar, x, 0.1), 0.0, x), "fatrelu(0.1)"),
        (_fatrelu_of_float_mask, "fatrelu(0.1)"),
        (_of(aten.threshold.default, 0.25, 0.0), "fatrelu(0.25)"),
    ],
)
def test_activations_are_recognized_by_their_values(act: Act, text: str) -> None:
    result = raised(_plain(act), RaiseFFN())
    assert _block(result)["activation"] == text
    assert operators(result) == {"transpose": 1, "ffn": 1}


def _normed(b: GraphBuilder, hidden: Node, bias: bool = False, groups: int = 1) -> Node:
    width = int(hidden.meta["val"].shape[-1])
    return _down(b, b.call(RMS_NORM, hidden, b.parameter("norm", width), 1e-4, groups), bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_norm_across_neurons_goes_into_the_block(gated: bool, bias: bool) -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        hidden = b.call(aten.relu.default, _up(b, x, "gate", bias))
        return _normed(b, b.call(aten.mul.Tensor, hidden, _up(b, x, bias=bias)) if gated else hidden, bias)

    result = raised(captured(write), RaiseFFN())
    assert operators(result) == {"transpose": 1, "unsqueeze": 1, "mul": 1, "ffn": 1}
    block = _block(result)
    assert (block["activation"], block["norm_eps"], block["gate"] is not None) == ("relu", 1e-4, gated)
    rows, weight = block["down"].args
    assert (rows.target, weight.args[0].target) == (TRANSPOSE, "norm")
    assert (block["down_bias"] is not None) == bias


@pytest.mark.parametrize(
    "write",
    [
        lambda b, x: _normed(b, _up(b, x)),
        lambda b, x: _normed(b, b.call(aten.relu.default, _up(b, x)), groups=4),
        lambda b, x: _normed(b, b.call(aten.add.Tensor, b.call(aten.relu.default, _up(b, x, "gate")), _up(b, x))),
    ],
    ids=["a plain projection", "groups of neurons", "a sum"],
)
def test_norms_of_other_values_stay(write: Act) -> None:
    assert not RaiseFFN()(captured(write)).modified


def test_every_activation_of_the_dialect_is_distinguished_from_the_others() -> None:
    for text in [*ACTIVATIONS, "fatrelu(0.01)", "fatrelu(1.5)"]:
        constants = [parse_activation(text).threshold, 1.0]
        assert recognize_activation(parse_activation(text).function, constants) == text


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.where(x > 0.011, x, torch.zeros_like(x)),
        lambda x: torch.where(x >= 0.01, x, torch.zeros_like(x)),
        lambda x: torch.nn.functional.leaky_relu(x, 1e-3),
        lambda x: x * torch.sigmoid(1.7 * x),
        lambda x: torch.nn.functional.mish(x),
        lambda x: torch.relu(x) * 1.001,
        lambda x: torch.nn.functional.silu(x).clamp(max=20.0),
        lambda x: x.clamp(-16.0, 16.0),
        lambda x: torch.relu(x).clamp(max=500.0),
    ],
)
def test_functions_close_to_an_activation_are_not_recognized(function: Callable[[Tensor], Tensor]) -> None:
    assert recognize_activation(function, [0.01, 1e-3]) is None


def test_down_has_a_row_for_each_neuron() -> None:
    """And the biases of both linears are kept."""
    result = raised(_plain(_of(aten.relu.default), bias=True), RaiseFFN())
    block = _block(result)
    assert block["gate"] is block["gate_bias"] is None
    assert (block["up"].target, block["up_bias"].target, block["down_bias"].target) == ("up", "up_bias", "down_bias")
    assert block["down"] is only(result, TRANSPOSE)
    assert block["down"].meta["val"].shape == (NEURONS, HIDDEN)

    def stored_by_neuron(b: GraphBuilder, x: Node) -> Node:
        weight = b.call(TRANSPOSE, b.parameter("down", NEURONS, HIDDEN), 0, 1)
        return b.call(LINEAR, b.call(aten.relu.default, _up(b, x)), weight, None)

    assert _block(raised(captured(stored_by_neuron), RaiseFFN()))["down"].target == "down"


@pytest.mark.parametrize(
    ("gate", "up", "activations"),
    [
        (_silu, None, ("silu", "identity")),
        (None, _of(aten.silu.default), ("silu", "identity")),
        (_of(aten.relu.default), _of(aten.relu.default), ("relu", "relu")),
    ],
)
def test_the_gate_is_the_factor_with_the_activation(gate: Act | None, up: Act | None, activations: tuple) -> None:
    names = ("gate", "up") if gate else ("up", "gate")

    def write(b: GraphBuilder, x: Node) -> Node:
        factors = [_up(b, x, name, bias=name == "gate") for name in names]
        applied = [act(b, factor) if act else factor for act, factor in zip((gate, up), factors, strict=True)]
        return _down(b, b.call(aten.mul.Tensor, *applied))

    block = _block(raised(captured(write), RaiseFFN()))
    assert (block["gate"].target, block["gate_bias"].target, block["up"].target) == ("gate", "gate_bias", "up")
    assert (block["activation"], block["up_activation"]) == activations


def test_fused_gate_and_up_in_views() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        fused = linear(b, b.call(aten.unsqueeze.default, x, 0), "gate_up", 2 * NEURONS, bias=True)
        gate, up = (b.call(aten.slice.Tensor, fused, -1, *ends) for ends in ((0, NEURONS), (NEURONS, 2 * NEURONS)))
        hidden = b.call(aten.mul.Tensor, b.call(aten.relu.default, gate), up)
        return b.call(aten.squeeze.dim, _down(b, hidden), 0)

    result = raised(captured(write), RaiseFFN())
    block = _block(result)
    assert result.get_buffer(block["up"].args[2].target).tolist() == list(range(NEURONS, 2 * NEURONS))
    assert block["up_bias"].args[0].target == "gate_up_bias"


def _of_two_inputs(b: GraphBuilder, x: Node) -> Node:
    other = _up(b, b.call(aten.relu.default, x), "gate")
    return _down(b, b.call(aten.mul.Tensor, b.call(aten.relu.default, other), _up(b, x)))


def _mixed(b: GraphBuilder, x: Node) -> Node:
    product = b.call(aten.mul.Tensor, _up(b, x, "gate"), _up(b, x))
    return _down(b, b.call(aten.mul.Tensor, product, product))


def _scaled(b: GraphBuilder, x: Node) -> Node:
    product = b.call(aten.mul.Tensor, b.call(aten.relu.default, _up(b, x, "gate")), _up(b, x))
    return _down(b, b.call(aten.mul.Tensor, product, 0.5))


def _by_neuron(b: GraphBuilder, x: Node) -> Node:
    scales = b.constant("scales", torch.arange(float(NEURONS)))
    return _down(b, b.call(aten.relu.default, b.call(aten.add.Tensor, _up(b, x), scales)))


@pytest.mark.parametrize(
    "write",
    [
        lambda b, x: _down(b, _up(b, x)),
        lambda b, x: linear(b, b.call(aten.relu.default, x), "w"),
        lambda b, x: _down(b, b.call(aten.leaky_relu.default, _up(b, x))),
        lambda b, x: _down(b, b.call(aten.add.Tensor, b.call(aten.relu.default, _up(b, x, "gate")), _up(b, x))),
        *(_of_two_inputs, _mixed, _scaled, _by_neuron),
    ],
)
def test_what_is_no_block_or_one_that_ffn_cannot_express_stays(write: Act) -> None:
    assert not RaiseFFN()(captured(write)).modified


def test_an_activation_that_ends_in_a_factor_and_a_view():
    """Found by fuzzing: the factor is no part of what the view, one step later, is a form of."""

    def write(b, x):
        up = b.call(LINEAR, b.call(aten.view.default, x, [-1, HIDDEN]), b.parameter("up.weight", 7, HIDDEN), None)
        up = b.call(aten.unsqueeze.default, up, 0)
        inner = b.call(aten.add.Tensor, b.call(aten.erf.default, b.call(aten.mul.Tensor, up, 0.5**0.5)), 1.0)
        halved = b.call(aten.div.Tensor, b.call(aten.mul.Tensor, inner, up), 2.0)
        return b.call(LINEAR, b.call(aten.view.default, halved, [-1, 7]), b.parameter("down.weight", HIDDEN, 7), None)

    after = raised(captured(write), RaiseFFN())
    assert operators(after) == {"ffn": 1, "transpose": 1, "view": 1}
    assert arguments(only(after, FFN))["activation"] == "gelu"
