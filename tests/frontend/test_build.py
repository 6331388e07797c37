"""Models without memory for their weights: buffers have their values, and tables have an end."""

import pytest
import torch
from torch import nn

from picompile import UnsupportedModelError
from picompile.frontend.build import WithoutWeights, build_model
from picompile.frontend.config import make_config
from picompile.frontend.families import find_family

_GPT = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 24, "n_head": 3, "n_layer": 1}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 1,
    "intermediate_size": 20, "vocab_size": 30,
}  # fmt: skip


def _build(raw: dict[str, object]) -> nn.Module:
    family = find_family(raw)
    return build_model(family, make_config(family, raw), "relu" if family.is_known else None)


def test_parameters_take_no_memory_and_buffers_are_right() -> None:
    with WithoutWeights():
        linear, norm = nn.Linear(1 << 20, 1 << 20), nn.BatchNorm1d(3)
        steps, ones, filled = torch.arange(4), torch.ones(2, 2).tril(), torch.full((2,), 0.5)
        explicit = torch.empty(3, device="cpu")
    assert linear.weight.is_meta
    assert (steps.tolist(), ones.tolist(), filled.tolist()) == ([0, 1, 2, 3], [[1, 0], [1, 1]], [0.5, 0.5])
    assert not explicit.is_meta
    assert norm.running_var.tolist() == [1, 1, 1]
    assert not torch.empty(3).is_meta


def test_tables_that_no_model_has_are_refused() -> None:
    for make in (
        lambda: torch.zeros(1 << 15, 1 << 14),
        lambda: torch.ones((1 << 15, 1 << 14)),
        lambda: torch.full((1 << 29,), 1.0),
        lambda: torch.arange(0, 1 << 40),
        lambda: torch.eye(1 << 15),
        lambda: torch.rand(1 << 29),
    ):
        with WithoutWeights(), pytest.raises(UnsupportedModelError, match="the model computes a table of"):
            make()
    with WithoutWeights():
        assert torch.zeros(1 << 20, 1 << 20, device="meta").shape == (1 << 20, 1 << 20), "no device, no memory"


@pytest.mark.parametrize("raw", [_GPT, _LLAMA], ids=lambda raw: raw["architectures"][0])
def test_models_have_no_matrices_in_memory(raw: dict[str, object]) -> None:
    import transformers

    model = _build(raw)
    assert all(parameter.is_meta for parameter in model.parameters() if parameter.dim() > 1)
    built = getattr(transformers, raw["architectures"][0])._from_config(make_config(find_family(raw), raw))
    expected = dict(built.named_buffers())
    assert {name for name, _ in model.named_buffers()} == set(expected)
    assert all(torch.equal(buffer, expected[name]) for name, buffer in model.named_buffers())
    assert not model.training


def test_what_every_way_to_attend_rejects_is_one_line() -> None:
    with pytest.raises(UnsupportedModelError, match=r"config\.json: ") as caught:
        _build({**_GPT, "n_head": 5})
    assert "\n" not in str(caught.value)


def test_the_first_way_to_attend_is_ours() -> None:
    assert vars(_build(_GPT))["config"]._attn_implementation == "picompile"
    family = find_family(_GPT)
    eager = build_model(family, make_config(family, _GPT), None, "eager")
    assert vars(eager)["config"]._attn_implementation == "eager"
