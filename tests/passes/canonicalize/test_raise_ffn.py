from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from helpers.raising import HIDDEN, Builder, Value, Write, aten, only, operators, raised, stays
from picompile_passes.dialect import ACTIVATIONS, parse_activation
from picompile_passes.graph.nodes import arguments
from picompile_passes.graph.operands import FFN, LINEAR, RMS_NORM, TRANSPOSE
from picompile_passes.passes.canonicalize.raise_ffn import RaiseFFN, recognize_activation

NEURONS = 40

Act = Write


def _up(b: Builder, x: Value, name: str = "up", bias: bool = False) -> Value:
    return b.linear(x, name, NEURONS, bias=bias)


def _down(b: Builder, hidden: Value, bias: bool = False) -> Value:
    return b.linear(hidden, "down", bias=bias)


def _plain(act: Act, bias: bool = False) -> Write:
    return lambda b, x: _down(b, act(b, _up(b, x, bias=bias)), bias)


def _block(graph_module: GraphModule) -> dict:
    return arguments(only(graph_module, FFN))


def _of(op: object, *args: object) -> Act:
    return lambda b, x: b.call(op, x, *args)


def _silu(b: Builder, x: Value) -> Value:
    return x.sigmoid() * x


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (_of(aten.relu.default), "relu"),
        (_of(aten.clamp_min.default, 0), "relu"),
        (lambda b, x: x.maximum(x.new_zeros([])), "relu"),
        (_of(aten.silu.default), "silu"),
        (_silu, "silu"),
        (_of(aten.gelu.default), "gelu"),
        (lambda b, x: x * 0.5 * ((x / 2**0.5).special_erf() + 1.0), "gelu"),
        # gelu_new of transformers.
        (lambda b, x: x * 0.5 * (((x + (x**3.0 * 0.044715)) * 0.7978845608028654).tanh() + 1.0), "gelu_tanh"),
        (lambda b, x: x * (x * 1.702).sigmoid(), "quick_gelu"),
        (lambda b, x: x.relu() ** 2, "relu2"),
        (_of(aten.hardtanh.default, 0.0, 6.0), "relu6"),
        (_of(aten.sigmoid.default), "sigmoid"),
        (_of(aten.tanh.default), "tanh"),
        (lambda b, x: x.gt(0.01).where(x, x.zeros_like()), "fatrelu(0.01)"),
        (lambda b, x: x.gt(0.3).where(x, b.constant("zero", torch.zeros(()))), "fatrelu(0.3)"),
        (lambda b, x: x.gt(0.1).where(x, 0.0), "fatrelu(0.1)"),
        (lambda b, x: x.le(0.1).where(0.0, x), "fatrelu(0.1)"),
        (lambda b, x: x * x.gt(0.1)._to_copy(dtype=torch.float32), "fatrelu(0.1)"),
        (_of(aten.threshold.default, 0.25, 0.0), "fatrelu(0.25)"),
    ],
)
def test_activations_are_recognized_by_their_values(act: Act, text: str) -> None:
    result = raised(_plain(act), RaiseFFN())
    assert _block(result)["activation"] == text
    assert operators(result) == {"transpose": 1, "ffn": 1}


def _normed(b: Builder, hidden: Value, bias: bool = False, groups: int = 1) -> Value:
    width = int(hidden.meta["val"].shape[-1])
    return _down(b, b.call(RMS_NORM, hidden, b.parameter("norm", width), 1e-4, groups), bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_norm_across_neurons_goes_into_the_block(gated: bool, bias: bool) -> None:
    def write(b: Builder, x: Value) -> Value:
        x = x.unsqueeze(0)
        hidden = _up(b, x, "gate", bias).relu()
        return _normed(b, hidden * _up(b, x, bias=bias) if gated else hidden, bias).squeeze(0)

    result = raised(write, RaiseFFN())
    assert operators(result) == {"transpose": 1, "unsqueeze": 2, "mul": 1, "ffn": 1, "squeeze": 1}
    block = _block(result)
    assert (block["activation"], block["norm_eps"], block["gate"] is not None) == ("relu", 1e-4, gated)
    rows, weight = block["down"].args
    assert (rows.target, weight.args[0].target) == (TRANSPOSE, "norm")
    assert (block["down_bias"] is not None) == bias


@pytest.mark.parametrize(
    "write",
    [
        lambda b, x: _normed(b, _up(b, x)),
        lambda b, x: _normed(b, _up(b, x).relu(), groups=4),
        lambda b, x: _normed(b, _up(b, x, "gate").relu() + _up(b, x)),
    ],
    ids=["a plain projection", "groups of neurons", "a sum"],
)
def test_norms_of_other_values_stay(write: Act) -> None:
    assert stays(write, RaiseFFN())


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

    def stored_by_neuron(b: Builder, x: Value) -> Value:
        return b.call(LINEAR, _up(b, x).relu(), b.call(TRANSPOSE, b.parameter("down", NEURONS, HIDDEN), 0, 1), None)

    assert _block(raised(stored_by_neuron, RaiseFFN()))["down"].target == "down"


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

    def write(b: Builder, x: Value) -> Value:
        factors = [_up(b, x, name, bias=name == "gate") for name in names]
        applied = [act(b, factor) if act else factor for act, factor in zip((gate, up), factors, strict=True)]
        return _down(b, b.call(aten.mul.Tensor, *applied))

    block = _block(raised(write, RaiseFFN()))
    assert (block["gate"].target, block["gate_bias"].target, block["up"].target) == ("gate", "gate_bias", "up")
    assert (block["activation"], block["up_activation"]) == activations


def test_fused_gate_and_up_in_views() -> None:
    def write(b: Builder, x: Value) -> Value:
        fused = b.linear(x.unsqueeze(0), "gate_up", 2 * NEURONS, bias=True)
        gate, up = (fused.slice(-1, *ends) for ends in ((0, NEURONS), (NEURONS, 2 * NEURONS)))
        return _down(b, gate.relu() * up).squeeze(0)

    result = raised(write, RaiseFFN())
    block = _block(result)
    assert result.get_buffer(block["up"].args[2].target).tolist() == list(range(NEURONS, 2 * NEURONS))
    assert block["up_bias"].args[0].target == "gate_up_bias"


def _dented(b: Builder, x: Value, low: float) -> Value:
    """ReLU but for a dent of width 2 beside 500, where no other number of the expression lies."""
    up = _up(b, x)
    beside = (up - 500.0).clamp(low, low + 2.0)
    return _down(b, up.relu() + (beside - low) * (beside - (low + 2.0)))


def _mixed(b: Builder, x: Value) -> Value:
    product = _up(b, x, "gate") * _up(b, x)
    return _down(b, product * product)


@pytest.mark.parametrize(
    "write",
    [
        lambda b, x: _down(b, _up(b, x)),
        lambda b, x: b.linear(x.relu(), "w"),
        lambda b, x: _down(b, _up(b, x).leaky_relu()),
        # The identity, but for values below a bound that the call does not write.
        lambda b, x: _down(b, _up(b, x).hardshrink()),
        *(partial(_dented, low=low) for low in (-2.0, 0.0)),
        lambda b, x: _down(b, _up(b, x, "gate").relu() + _up(b, x)),
        lambda b, x: _down(b, _up(b, x.relu(), "gate").relu() * _up(b, x)),
        _mixed,
        lambda b, x: _down(b, (_up(b, x, "gate").relu() * _up(b, x)) * 0.5),
        # One gate for all neurons.
        lambda b, x: _down(b, b.linear(x, "gate", 1).relu() * _up(b, x)),
        lambda b, x: _down(b, (_up(b, x) + b.constant("scales", torch.arange(float(NEURONS)))).relu()),
    ],
)
def test_what_is_no_block_or_one_that_ffn_cannot_express_stays(write: Act) -> None:
    assert stays(write, RaiseFFN())


def test_an_activation_that_ends_in_a_factor_and_a_view():
    """Found by fuzzing: the factor is no part of what the view, one step later, is a form of."""

    def write(b, x):
        up = b.call(LINEAR, x.view([-1, HIDDEN]), b.parameter("up.weight", 7, HIDDEN), None)
        up = up.unsqueeze(0)
        halved = ((up * 0.5**0.5).erf() + 1.0) * up / 2.0
        return b.call(LINEAR, halved.view([-1, 7]), b.parameter("down.weight", HIDDEN, 7), None)

    after = raised(write, RaiseFFN())
    assert operators(after) == {"ffn": 1, "transpose": 1, "view": 1}
    assert arguments(only(after, FFN))["activation"] == "gelu"
