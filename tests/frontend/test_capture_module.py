"""Decoders that are nobody's checkpoint."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from helpers.canonical import Model, canonicalize
from helpers.decoders import Gpt, Llama
from helpers.reference import relative_error
from picompile import UnsupportedModelError, UsageError
from picompile.frontend.captured import Captured
from picompile.frontend.module import capture_module
from picompile_passes.errors import UnsupportedGraphError


def _spread(module: nn.Module) -> nn.Module:
    """Random weights with which logits are well apart."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.15)
    return module


def _check(module: nn.Module, captured: Captured, with_positions: bool, tolerance: float = 2e-5) -> dict[str, int]:
    """Holds both graphs against the module; gives back how many of which operator the canonical graph has."""
    canonical = canonicalize(captured.graph_module)
    for tokens in (1, 2, 17, 50):
        ids = torch.arange(tokens) * 13 % 101
        with torch.no_grad():
            args = (ids[None], torch.arange(tokens)[None]) if with_positions else (ids[None],)
            expected = module(*args)[0].float()
        for logits in Model(module, captured, canonical).logits(ids):
            assert relative_error(logits, expected) < tolerance
    return dict(Counter(node.target._opname for node in canonical.graph.nodes if node.op == "call_function"))


def test_gpt_with_fused_projections() -> None:
    module = _spread(Gpt())
    captured = capture_module(module, max_positions=64)
    found = _check(module, captured, with_positions=False)
    # Three projections are six selections (weight and bias) of the fused one's rows.
    assert found.pop("index_select") == 12
    assert found == {
        "embedding": 2, "add": 5, "layer_norm": 5, "linear": 9, "attention": 2, "transpose": 2, "ffn": 2
    }  # fmt: skip
    facts = captured.facts
    assert (facts.architecture, facts.family, facts.activation) == ("Gpt", "module", "gelu_tanh")
    assert (facts.hidden, facts.layers, facts.heads, facts.kv_heads, facts.ffn) == (96, 2, 4, 4, 200)
    assert (facts.vocab, facts.max_positions, facts.checkpoint_dtype) == (101, 64, "f32")
    assert facts.parameters == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.slow("captures a module twice; one way to turn is fast", but=("True",))
@pytest.mark.parametrize("tables", [False, True])
def test_llama_with_neighbours_turned_and_heads_repeated(tables: bool) -> None:
    module = _spread(Llama(tables=tables))
    captured = capture_module(module, max_positions=512, bos_token_id=1, eos_token_ids=[2, 3])
    found = _check(module, captured, with_positions=True)
    assert found == {
        "embedding": 1, "add": 4, "rms_norm": 5, "linear": 9, "rotary": 4, "attention": 2, "transpose": 2, "ffn": 2,
        # q and k in the order of halves; gate and up out of their fused matrix.
        "index_select": 8,
    }  # fmt: skip
    facts = captured.facts
    assert (facts.heads, facts.kv_heads, facts.activation) == (4, 2, "silu")
    assert (facts.bos_token_id, facts.eos_token_ids) == (1, (2, 3))


def test_a_module_in_bfloat16_becomes_float32_and_stays_as_it_is() -> None:
    module = _spread(Gpt()).to(torch.bfloat16).train()
    before = {name: (id(tensor), tensor.dtype) for name, tensor in module.state_dict(keep_vars=True).items()}
    captured = capture_module(module, max_positions=64)
    assert captured.facts.checkpoint_dtype == "bf16"
    assert {n: (id(t), t.dtype) for n, t in module.state_dict(keep_vars=True).items()} == before
    assert module.training
    reference = Gpt().eval()
    reference.load_state_dict({name: tensor.float() for name, tensor in module.state_dict().items()})
    _check(reference, captured, with_positions=False)


class _Changed(nn.Module):
    """Gpt with something done to its embeddings, its logits or its masks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.gpt, self.kind = Gpt(), kind

    def forward(self, tokens: Tensor) -> Tensor:
        count = tokens.shape[1]
        x = self.gpt.wte(tokens) * 9.0 + self.gpt.wpe(torch.arange(count))
        mask = self.gpt.mask[:count, :count]
        for block in self.gpt.blocks:
            x = block(x, torch.ones_like(mask) if self.kind == "whole view" else mask)
        if self.kind == "later token":
            x = x + x.roll(-1, 1)
        logits = self.gpt.head(self.gpt.ln(x))
        if self.kind == "soft cap":
            return torch.tanh(logits / 3.0) * 3.0
        return logits.cumsum(-1) if self.kind == "running sum" else logits * 0.5


@pytest.mark.slow("captures a module twice; a soft cap is fast", but=("soft cap",))
@pytest.mark.parametrize("kind", ["soft cap", "scaled logits"])
def test_arithmetic_on_embeddings_and_logits(kind: str) -> None:
    module = _spread(_Changed(kind))
    found = _check(module, capture_module(module, max_positions=64), with_positions=False)
    assert found["elementwise"] == 2


def test_modules_that_are_no_decoders() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens))

    class DependsOnData(Branch):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens)) if tokens.sum() > 3 else self.embed(tokens)

    class Broken(Branch):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.embed(tokens) + None

    class NoLogits(Branch):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.embed(tokens).sum()

    for module, message in (
        (Branch(), "it has no attention"),
        (DependsOnData(), "DependsOnData cannot be captured: how much it computes depends on values that it computes"),
        (Broken(), r"Broken cannot be captured: TypeError: .*'NoneType'[^(]*$"),
        (NoLogits(), "gives back no logits"),
        # Operators outside the dialect are named.
        (_Changed("running sum"), r"aten\.cumsum\.default"),
        (_Changed("later token"), r"aten\.roll\.default"),
        (_Changed("whole view"), r"aten\.ones_like\.default"),
    ):
        with pytest.raises((UnsupportedModelError, UnsupportedGraphError), match=message) as caught:
            capture_module(module, max_positions=64)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="max_positions"):
        capture_module(Gpt(), max_positions=0)
