"""Blocks of experts in eager PyTorch, in which only experts that a token chose are computed, against all of them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from picompile_passes.dialect.ffn import FfnOperands, ffn
from picompile_passes.dialect.sparse_ffn import SparseFfnOperands, sparse_ffn

Weights = dict[str, Any]

T, D, G, S = 7, 12, 9, 5
_TOLERANCE = 1e-5


def _gains() -> Tensor:
    """Two experts a token; nobody chooses expert 4, and token 3 chooses none."""
    gains = torch.zeros(T, G)
    for token in range(T):
        chosen = [expert for expert in torch.randperm(G).tolist() if expert != 4][:2]
        gains[token, chosen] = torch.tensor([0.7, -0.4])
    gains[3] = 0
    return gains


def _weights(gated: bool) -> Weights:
    matrices = {name: torch.randn(G * S, D) for name in ("gate", "up", "down")}
    biases = {"gate_bias": torch.randn(G * S), "up_bias": torch.randn(G * S), "down_bias": torch.randn(D)}
    found: Weights = {**matrices, **biases, "expert_bias": torch.randn(G, D), "gains": _gains()}
    return found if gated else {**found, "gate": None, "gate_bias": None}


def _expected(x: Tensor, weights: Weights, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The neurons' outputs times their gains, and y, in float64 from all neurons."""
    own: Weights = {name: None if value is None else value.double() for name, value in weights.items()}
    hidden = x.double() @ own["up"].T + own["up_bias"]
    if own["gate"] is not None:
        hidden = torch.relu(x.double() @ own["gate"].T + own["gate_bias"]) * hidden
    else:
        hidden = hidden.relu()
    hidden = hidden * own["gains"].repeat_interleave(S, dim=1) * (1 if mask is None else mask)
    return hidden, hidden @ own["down"] + own["down_bias"] + own["gains"] @ own["expert_bias"]


def _near(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())


@pytest.fixture(params=[True, False], ids=["gated", "not gated"])
def weights(request: pytest.FixtureRequest) -> Weights:
    torch.manual_seed(5)
    return _weights(request.param)


def test_a_dense_block(weights: Weights) -> None:
    x = torch.randn(T, D)
    named = {**weights, "activation": "relu", "up_activation": "identity"}
    hidden, y = _expected(x, weights)
    block = FfnOperands(x=x, **named)
    assert _near(block.outputs(), hidden) and _near(block.result(block.outputs()), y)
    assert _near(ffn(x, **named), y)


def test_a_sparse_block(weights: Weights) -> None:
    x, mask = torch.randn(T, D), torch.rand(T, G * S) < 0.6
    named = {**weights, "activation": "relu", "up_activation": "identity"}
    hidden, y = _expected(x, weights, mask)
    block = SparseFfnOperands(x=x, mask=mask, neurons=None, **named)
    gains = block.neuron_gains()
    assert gains is not None and _near(block.kept_outputs() * gains, hidden)
    assert _near(block.result(block.kept_outputs()), y)
    assert _near(sparse_ffn(x, mask, None, **named), y)


def test_parts_of_a_block_add_up_to_it(weights: Weights) -> None:
    x, mask = torch.randn(T, D), torch.rand(T, G * S) < 0.6
    named = {**weights, "activation": "relu", "up_activation": "identity"}
    total = torch.zeros(T, D)
    order = torch.randperm(G * S)
    for number, table in enumerate((order[:17], order[17:])):
        own = {name: None if value is None else value[table] for name, value in weights.items() if name in _ROWS}
        rest = {} if number else {"down_bias": None, "expert_bias": None}
        total += sparse_ffn(x, mask, table, **{**named, **own, **rest})
    assert _near(total, _expected(x, weights, mask)[1])


_ROWS = ("gate", "up", "down", "gate_bias", "up_bias")


def test_experts_that_no_token_chose_are_not_computed(weights: Weights) -> None:
    """Theirs may be values that are no numbers, and so may those of a token that chose others."""
    x, mask = torch.randn(T, D), torch.ones(T, G * S, dtype=torch.bool)
    named = {**weights, "activation": "relu", "up_activation": "identity"}
    expected = _expected(x, weights)[1]
    for name in _ROWS:
        if weights[name] is not None:
            weights[name][4 * S : 5 * S] = torch.nan
    x[3] = torch.inf
    assert _near(ffn(x, **named)[:3], expected[:3]) and _near(ffn(x, **named)[4:], expected[4:])
    assert bool(torch.isfinite(ffn(x, **named)).all())
    assert bool(torch.isfinite(sparse_ffn(x, mask, None, **named)).all())
