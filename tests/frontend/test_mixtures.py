"""Mixtures whose classes ask no registry: what they compute with a forward of ours, and models that are compiled."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.greedy import config_json, first_difference
from helpers.small_models import small_config, small_model
from picompile import CompileOptions, UnsupportedModelError, compile_model
from picompile.frontend import experts
from picompile.frontend.build import build_model
from picompile.frontend.config import make_config
from picompile.frontend.config_keys import config_warnings
from picompile.frontend.families import find_family, text_limit
from picompile.frontend.hf import capture_config
from picompile.frontend.mixtures import replace_mixtures
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import FFN, ROUTE
from picompile_passes.passes.canonicalize import canonicalize

_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i / 8 for i in range(8)],
    "short_mscale": 1.24,
    "long_mscale": 1.5,
}


def _first(model: nn.Module, name: str) -> Any:
    """Return the first module of a class by its name."""
    return next(module for module in model.modules() if type(module).__name__ == name)


@pytest.mark.parametrize(
    ("model_type", "whole", "name"),
    [("llama4_text", "Llama4TextMoe", "Llama4TextMoe"), ("dbrx", "DbrxFFN", "DbrxExperts")],
)
def test_the_forward_of_a_mixture_is_its_own(model_type: str, whole: str, name: str) -> None:
    model = small_model(small_config(model_type))
    module, x, names = _first(model, whole), torch.randn(2, 5, 64), list(model.state_dict())
    before = type(_first(model, name))
    with torch.no_grad():
        expected = module(x)
        replace_mixtures(model)
        found = module(x)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one.reshape(other.shape), other, rtol=1e-5, atol=1e-6)
    after = type(_first(model, name))
    assert after is not before and issubclass(after, before)
    # Nothing of ours is in a checkpoint.
    assert list(model.state_dict()) == names


def test_a_score_of_llama_4_scales_its_token() -> None:
    """Two routes have the same logits: one makes the token's scale, the other chooses its expert."""
    graph = canonicalize(capture_config(config_json("llama4_text", {}))).graph
    scale, choice = map(arguments, calls(graph, ROUTE))
    if scale["normalized"] != "sigmoid":
        scale, choice = choice, scale
    assert (scale["scores"], scale["normalized"], scale["chosen"]) == ("identity", "sigmoid", 1)
    assert (choice["logits"], choice["chosen"]) == (scale["logits"], 1)
    blocks = [arguments(block) for block in calls(graph, FFN)]
    # Dense layers come between.
    assert [block["gains"] is not None for block in blocks] == [False, True]


def test_llama_4_with_several_experts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModelError, match=r"config.json: num_experts_per_tok is 2; of Llama 4, which scales"):
        capture_config(config_json("llama4_text", {"num_experts_per_tok": 2}))
    monkeypatch.setattr(experts, "_MOST_ROWS", 100)
    with pytest.raises(UnsupportedModelError, match="Llama4TextMoe: 1,536 rows of gate and up; 100 at most"):
        capture_config(config_json("llama4_text", {}))


def test_attention_that_is_a_mixture_is_refused() -> None:
    with pytest.raises(
        UnsupportedModelError, match="JetMoeAttention is a mixture itself: a router chooses each token's queries"
    ):
        capture_config(config_json("jetmoe", {}))


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, 8191),
        ({"attention_chunk_size": 64}, 64),
        ({"attn_temperature_tuning": False}, 8192),
        ({"attn_temperature_tuning": False, "no_rope_layers": [0, 0]}, None),
        ({"floor_scale": 32}, 31),
    ],
)
def test_a_context_of_llama_4_ends_where_attention_changes(options: dict[str, Any], limit: int | None) -> None:
    raw = config_json("llama4_text", {**options, "max_position_embeddings": 1 << 17})
    family = find_family(raw)
    config = make_config(family, raw)
    assert text_limit(config) == limit
    expected = () if limit is None else (f"config.json: attention differs in texts of more than {limit:,} tokens",)
    assert tuple(line.partition(";")[0] for line in config_warnings(family, raw, config)) == expected
    if limit is not None:
        # The proof of eager PyTorch goes up to the limit, and the graph does not attend otherwise beyond it.
        assert build_model(family, config, None).training is False


@pytest.mark.parametrize("options", [{"attention_chunk_size": None}, {"attention_chunk_size": 0}, {"floor_scale": 1}])
def test_chunks_that_are_none(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="attention_chunk_size must be a whole number from 1, and floor_sc"):
        capture_config(config_json("llama4_text", options))


def test_dbrx_has_its_base_in_its_attention() -> None:
    """transformers would leave it out, and turn by 10,000."""
    raw = config_json("dbrx", {})
    raw["attn_config"]["rope_theta"] = 500000
    family = find_family(raw)
    assert make_config(family, raw).rope_parameters["rope_theta"] == 10000
    del raw["rope_parameters"]
    assert make_config(family, raw).rope_parameters["rope_theta"] == 500000


@pytest.mark.slow("compiles a model per class; test_smallthinker.py compiles a mixture")
@pytest.mark.parametrize(
    ("model_type", "options", "context"),
    [
        # The last token of the context is the last one of the chunk.
        (
            "llama4_text",
            {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 0, 1], "attention_chunk_size": 64, "floor_scale": 80},
            64,
        ),
        # As Phi-3.5-MoE has it, whose positions have another scale behind the first 64.
        ("phimoe", {"attention_bias": True, "lm_head_bias": True, "rope_parameters": _LONG_ROPE}, 64),
        ("dbrx", {}, 64),
    ],
)
def test_compiled_models_give_eager_tokens(
    model_type: str, options: dict[str, Any], context: int, tmp_path: Path
) -> None:
    model = small_model(small_config(model_type, **options))
    model.half().save_pretrained(tmp_path / "model")
    model.float()
    compile_model(tmp_path / "model", tmp_path / "artifact", CompileOptions(quant="f16", context=context))
    assert first_difference(model, tmp_path / "artifact", steps=context - 35) is None
