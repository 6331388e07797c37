"""`sparse_ffn` with limits of gates and outputs, against the same block neuron by neuron in float64."""

import math

import pytest
import torch
from torch import Tensor

from picompile_passes.dialect import parse_activation

TOKENS, HIDDEN, NEURONS = 5, 9, 23
_sparse_ffn = torch.ops.picompile.sparse_ffn


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + sum(shape)))


def block(gated: bool, activation: str) -> dict[str, object]:
    """The operands of a block, by name; every third neuron is not in the mask."""
    return {
        "x": random(TOKENS, HIDDEN, seed=1),
        "mask": (torch.arange(TOKENS * NEURONS) % 3 > 0).view(TOKENS, NEURONS),
        "neurons": None,
        "gate": random(NEURONS, HIDDEN, seed=2) if gated else None,
        "up": random(NEURONS, HIDDEN, seed=3),
        "down": random(NEURONS, HIDDEN, seed=4),
        "gate_bias": random(NEURONS, seed=5) if gated else None,
        "up_bias": random(NEURONS, seed=6),
        "down_bias": random(HIDDEN, seed=7),
        "activation": activation,
        "up_activation": "identity",
        "squares": True,
        "gate_limits": random(NEURONS, seed=8).abs() if gated else None,
        "output_limits": random(NEURONS, seed=9).abs(),
    }


def by_loops(v: dict) -> tuple[Tensor, int]:
    """Return y with the squares in float64, and how many neurons of all tokens are kept."""
    act = parse_activation(v["activation"]).function
    y, kept = torch.zeros(TOKENS, HIDDEN + 1, dtype=torch.float64), 0
    for t in range(TOKENS):
        y[t, :HIDDEN] = v["down_bias"]
        for j in range(NEURONS):
            up = v["up"][j].double() @ v["x"][t].double() + v["up_bias"][j].double()
            first = up if v["gate"] is None else v["gate"][j].double() @ v["x"][t].double() + v["gate_bias"][j].double()
            h = act(first) if v["gate"] is None else act(first) * up
            if v["gate_limits"] is not None and not abs(act(first)) > v["gate_limits"][j]:
                continue
            if not v["mask"][t, j] or (v["output_limits"] is not None and abs(h) <= v["output_limits"][j]):
                continue
            y[t, :HIDDEN] += h * v["down"][j].double()
            y[t, HIDDEN] += h * h
            kept += 1
    return y, kept


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
@pytest.mark.parametrize("limits", [("gate_limits",), ("output_limits",), ("gate_limits", "output_limits")])
def test_neurons_below_their_limits_are_left_out(limits, activation):
    for gated in (True, False):
        values = block(gated, activation)
        for name in {"gate_limits", "output_limits"} - set(limits):
            values[name] = None
        expected, kept = by_loops(values)
        torch.testing.assert_close(_sparse_ffn(*values.values()).double(), expected, rtol=1e-5, atol=1e-5)
        if limits != ("gate_limits",) or gated:
            assert 0 < kept < int(values["mask"].sum())


def test_limits_of_zero_keep_every_neuron_and_infinite_ones_none():
    values = block(True, "silu")
    without = _sparse_ffn(*(values | {"gate_limits": None, "output_limits": None}).values())
    zeros, infinite = torch.zeros(NEURONS), torch.full((NEURONS,), math.inf)
    both = values | {"gate_limits": zeros, "output_limits": zeros}
    assert torch.equal(_sparse_ffn(*both.values()), without)
    for name in ("gate_limits", "output_limits"):
        nothing = _sparse_ffn(*(both | {name: infinite}).values())
        assert torch.equal(nothing[:, :HIDDEN], values["down_bias"].expand(TOKENS, -1))
        assert not nothing[:, HIDDEN].any()


def test_a_neuron_that_its_gate_leaves_out_may_overflow():
    """An output that is not a number shows."""
    values = block(True, "silu") | {"output_limits": None}
    values["gate_limits"][4] = 1e9
    expected = _sparse_ffn(*values.values())
    values["up_bias"][4] = math.inf
    assert torch.equal(_sparse_ffn(*values.values()), expected)
    values["gate_bias"][4] = math.nan
    assert torch.equal(_sparse_ffn(*values.values()), expected)
    shown = block(True, "silu") | {"gate_limits": None}
    shown["up_bias"][4] = math.nan
    result = _sparse_ffn(*shown.values())
    assert result[shown["mask"][:, 4]].isnan().all()
    assert not result[~shown["mask"][:, 4]].isnan().any()
    faked = _sparse_ffn(*(v.to("meta") if isinstance(v, Tensor) else v for v in shown.values()))
    assert faked.shape == result.shape
