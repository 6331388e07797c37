"""Experts as they are captured: every kind that transformers' registry has, against a loop over tokens in float64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import use_experts_implementation

from helpers.greedy import config_json
from helpers.small_models import small_config, small_model
from picompile import UnsupportedModelError
from picompile.frontend import experts
from picompile.frontend.build import build_model
from picompile.frontend.config import make_config
from picompile.frontend.experts import EXPERTS_NAME, experts_forward, keep_router_biases, register_experts
from picompile.frontend.families import find_family
from picompile.frontend.hf import capture_config
from picompile.frontend.left_out import lacking_biases
from picompile_passes.graph.nodes import calls
from picompile_passes.passes.canonicalize.captured_experts import EXPERT_GAINS

T, D, S, G, K = 5, 7, 3, 4, 2
# What transformers tells its registry of a class.
_KINDS: dict[str, dict[str, bool]] = {
    "gated": {},
    "without a gate": {"has_gate": False},
    "transposed": {"is_transposed": True},
    "with biases": {"has_bias": True},
    "gpt-oss": {"is_concatenated": False, "is_transposed": True, "has_bias": True},
    "transposed, without a gate": {"has_gate": False, "is_transposed": True, "has_bias": True},
}


def _module(kind: dict[str, bool], **more: Any) -> Any:
    """Return experts of a kind, whose own forward is never called, with random weights."""
    gated, transposed = kind.get("has_gate", True), kind.get("is_transposed", False)
    rows = 2 * S if gated else S
    name = "gate_up_proj" if gated else "up_proj"
    shapes = {name: (G, rows, D), "down_proj": (G, D, S), f"{name}_bias": (G, rows), "down_proj_bias": (G, D)}

    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            for parameter, shape in shapes.items():
                if kind.get("has_bias", False) or not parameter.endswith("bias"):
                    own = (*shape[:1], *shape[:0:-1]) if transposed and len(shape) == 3 else shape
                    self.register_parameter(parameter, nn.Parameter(torch.randn(own)))
            self.act_fn = F.silu

        def forward(self, *_: Tensor) -> Tensor:
            raise AssertionError

    if not kind.get("is_concatenated", True):
        Experts._apply_gate = _interleaved  # type: ignore[attr-defined]
    register_experts()
    config = SimpleNamespace(_experts_implementation=EXPERTS_NAME)
    return use_experts_implementation(Experts, **kind | more)(config)


def _interleaved(module: Any, gate_up: Tensor) -> Tensor:
    return F.silu(gate_up[..., ::2]) * gate_up[..., 1::2]


def _expected(module: Any, kind: dict[str, bool], x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros(T, D, dtype=torch.float64)
    gated = kind.get("has_gate", True)
    name = "gate_up_proj" if gated else "up_proj"
    for token in range(T):
        for expert, weight in zip(index[token].tolist(), weights[token].double(), strict=True):
            if expert >= G:
                continue
            up, down = getattr(module, name)[expert].double(), module.down_proj[expert].double()
            if kind.get("is_transposed", False):
                up, down = up.T, down.T
            h = up @ x[token].double()
            if kind.get("has_bias", False):
                h = h + getattr(module, f"{name}_bias")[expert].double()
            if gated:
                gate, up = h.unflatten(0, (2, S)) if kind.get("is_concatenated", True) else h.unflatten(0, (S, 2)).T
                h = F.silu(gate) * up
            else:
                h = F.silu(h)
            out = down @ h
            if kind.get("has_bias", False):
                out = out + module.down_proj_bias[expert].double()
            y[token] += weight * out
    return y


@pytest.mark.parametrize("name", _KINDS)
def test_every_kind_of_experts(name: str) -> None:
    """An expert may be chosen twice, and an index that is the number of experts stands for none."""
    kind = _KINDS[name]
    module = _module(kind)
    index = torch.randint(G + 1, (T, K))
    index[0], index[1] = 2, G
    x, weights = torch.randn(T, D), torch.randn(T, K)
    with torch.no_grad():
        torch.testing.assert_close(
            module(x, index, weights).double(), _expected(module, kind, x, index, weights), rtol=1e-4, atol=1e-5
        )


def test_experts_that_are_more_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.randn(T, D), torch.zeros(T, K, dtype=torch.int64), torch.ones(T, K)
    with pytest.raises(UnsupportedModelError, match="Experts normalizes what each expert gives"):
        _module({}, has_post_expert_norm=True)(*given)
    module = _module({})
    module.extra = nn.Parameter(torch.ones(D))
    with pytest.raises(UnsupportedModelError, match="Experts has extra besides its experts' matrices"):
        experts_forward(module, *given)
    monkeypatch.setattr(experts, "_MOST_ROWS", G * 2 * S - 1)
    with pytest.raises(UnsupportedModelError, match="Experts: 24 rows of gate and up; 23 at most"):
        experts_forward(_module({}), *given)


def test_the_mark_of_gains() -> None:
    index, weights = torch.tensor([[0, 2], [3, 1], [2, 2]]), torch.tensor([[0.5, 0.25], [4.0, 2.0], [1.0, 8.0]])
    assert EXPERT_GAINS(index, weights, 3).tolist() == [[0.5, 0.0, 0.25], [0.0, 2.0, 0.0], [0.0, 0.0, 9.0]]
    torch.library.opcheck(EXPERT_GAINS, (index, weights, 3))


def test_biases_of_routers_become_parameters() -> None:
    """A buffer that is not saved stays one, and so does one that is not there."""
    module = nn.Module()
    module.register_buffer("e_score_correction_bias", torch.arange(3.0))
    module.register_buffer("expert_bias", None)
    module.inner = nn.Module()
    module.inner.register_buffer("expert_bias", torch.ones(2), persistent=False)
    keep_router_biases(module)
    assert [name for name, _ in module.named_parameters()] == ["e_score_correction_bias"]
    assert torch.equal(module.e_score_correction_bias, torch.arange(3.0))  # type: ignore[arg-type]
    assert [name for name, _ in module.named_buffers()] == ["inner.expert_bias"]


def test_a_model_that_asks_the_registry() -> None:
    raw = config_json("olmoe", {})
    assert len(list(calls(capture_config(raw).graph, EXPERT_GAINS))) == 2


def test_a_router_without_a_bias_in_the_checkpoint() -> None:
    """It is no bias of a linear layer, which would be zero."""
    raw = config_json("solar_open", {})
    family = find_family(raw)
    model = build_model(family, make_config(family, raw), None)
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    assert name in dict(model.named_parameters())
    assert not lacking_biases(model, {name: SimpleNamespace(shape=(8,))}, ["model.layers.0.mlp.gate.weight"])  # type: ignore[dict-item]
    # The eager model of tests has random ones.
    eager = small_model(small_config("solar_open"))
    assert all(float(buffer.abs().max()) > 0 for path, buffer in eager.named_buffers() if path.endswith(name))
