"""The proof of a capture: it passes for right graphs, and names what is wrong in others."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from helpers.small_models import small_config
from helpers.support import Cli
from picompile import UnsupportedModelError
from picompile.frontend import attention, experts, facts, proof
from picompile.frontend.build import build_model
from picompile.frontend.config import make_config
from picompile.frontend.families import find_family, text_limit
from picompile.frontend.hf import capture_config, raw_activation
from picompile_passes.errors import PassesError
from picompile_passes.passes.canonicalize import raise_elementwise, raise_norms, raise_route
from picompile_passes.passes.canonicalize.captured_experts import EXPERT_GAINS

Raw = dict[str, Any]
_SIZES = {
    "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 40,
    "max_position_embeddings": 64,
}  # fmt: skip
_MISTRAL = {
    "architectures": ["MistralForCausalLM"], "hidden_act": "relu", "num_key_value_heads": 1, "sliding_window": 9,
    **_SIZES,
}  # fmt: skip
_GEMMA = {
    "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "head_dim": 8, "num_key_value_heads": 1, **_SIZES
}  # fmt: skip
_GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 8, "num_key_value_heads": 1,
    "sliding_window": 9, "query_pre_attn_scalar": 8, **_SIZES,
}  # fmt: skip
_FATRELU = {**_MISTRAL, "architectures": ["LlamaForCausalLM"], "hidden_act": "fatrelu", "hidden_act_param": 0.1}


_TWICE = pytest.mark.slow("exports models twice for the proof; one right model is fast")


def _prove(raw: Raw) -> None:
    family = find_family(raw)
    proof.prove(raw, family, raw_activation(family, raw), capture_config(raw))


# With fewer positions than are compared.
_GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16,
    "vocab_size": 40, "n_positions": 8,
}  # fmt: skip


@pytest.mark.slow("exports models twice for the proof; one right model is fast", but=("MistralForCausalLM",))
@pytest.mark.parametrize("raw", [_MISTRAL, _GEMMA, _GEMMA2, _FATRELU, _GPT2], ids=lambda raw: raw["architectures"][0])
def test_right_models_pass(raw: Raw) -> None:
    _prove(raw)


@pytest.fixture
def one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is wrong is wrong for the first weights."""
    monkeypatch.setattr(proof, "_SEEDS", (0,))


def _expect(raw: Raw, *parts: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        _prove(raw)
    text = str(caught.value)
    name = raw["architectures"][0]
    assert text.startswith(f"the captured graph does not compute what transformers' {name} computes: ")
    assert text.endswith("; this is a fault of picompile, please report it")
    assert all(part in text for part in parts), text
    assert "\n" not in text
    assert caught.value.exit_code == 3


@pytest.mark.usefixtures("one_seed")
def test_a_wrong_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small model's window is 7, and the longer of its texts goes past it."""
    right = attention.window_of
    monkeypatch.setattr(attention, "window_of", lambda function: right(function) and right(function) + 1)
    _expect(_MISTRAL | {"rope_theta": 77.0}, "model.layers.0.self_attn", "gives another result")


@_TWICE
@pytest.mark.usefixtures("one_seed")
def test_a_wrong_activation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = proof.capture_model

    def smooth(*arguments: Any, **options: Any) -> GraphModule:
        graph_module = right(*arguments, **options)
        for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            node.target = torch.ops.aten.silu.default
        return graph_module

    monkeypatch.setattr(proof, "capture_model", smooth)
    # The kinds of layers are others then, so that the model is compared as it is.
    _expect(_MISTRAL, "model.layers.0.mlp.act_fn gives another result, which is relu")


@_TWICE
@pytest.mark.usefixtures("one_seed")
def test_what_raising_drops_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A factor, and an eps."""
    dropped = {torch.ops.aten.mul.Tensor: lambda write, values: write("mul", values["self"], 1.0)}
    with monkeypatch.context() as patch:
        patch.setattr(raise_elementwise, "_EMITS", {**raise_elementwise._EMITS, **dropped})
        _expect(_GEMMA, "pass raise-elementwise changed elementwise (picompile.elementwise.default) for 3 tokens")
    right = raise_norms._mean_square
    monkeypatch.setattr(raise_norms, "_mean_square", lambda node: (found := right(node)) and (found[0], 0.5))
    _expect(_MISTRAL, "pass raise-norms changed rms_norm")


# Experts in two groups, behind a dense layer; as wide as they are, they are made smaller for the comparison.
_GLM4_MOE = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "head_dim": 8, "num_key_value_heads": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 4096, "routed_scaling_factor": 2.5, **_SIZES,
}  # fmt: skip


@_TWICE
@pytest.mark.usefixtures("one_seed")
def test_wrong_experts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A right graph passes; one whose experts count for more does not."""
    _prove(_GLM4_MOE)
    with monkeypatch.context() as patch:
        patch.setattr(experts, "EXPERT_GAINS", lambda index, weights, count: EXPERT_GAINS(index, weights * 1.01, count))
        _expect(_GLM4_MOE | {"rope_theta": 77.0}, "model.layers.1.mlp", "gives another result")
    right = raise_route._rounded
    monkeypatch.setattr(raise_route, "_rounded", lambda scale: right(scale) * 1.01)
    monkeypatch.setattr(raise_route, "_TOLERANCE", 0.1)
    _expect(_GLM4_MOE | {"rope_theta": 78.0}, "pass raise-route changed route (picompile.route.default)")


_MINISTRAL3 = {
    "architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "head_dim": 8, "num_key_value_heads": 1,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
        "llama_4_scaling_beta": 0.5,
    },
    **_SIZES,
}  # fmt: skip


@_TWICE
@pytest.mark.usefixtures("one_seed")
def test_what_changes_with_the_position_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries are scaled from position 32 on, which none of the texts has."""
    _prove(_MINISTRAL3)
    monkeypatch.setattr(facts, "text_limit", lambda config: None)
    _expect(_MINISTRAL3 | {"bos_token_id": 3}, "at the positions 109 to 127 the canonical graph has other logits")


@_TWICE
def test_models_that_cannot_be_proved_are_refused() -> None:
    """RoBERTa's forward counts from its padding token on, and transformers' generate gives it 0, 1, 2 …

    Windows that are wider than masks are read would go unseen.
    """
    raw = {**_SIZES, "architectures": ["RobertaForCausalLM"], "model_type": "roberta", "is_decoder": True}
    for padding in (1, None):
        with pytest.raises(UnsupportedModelError, match="RobertaForCausalLM counts positions from its padding token"):
            _prove(raw | {"pad_token_id": padding})
    raw = {
        "architectures": ["GPTNeoForCausalLM"], "model_type": "gpt_neo", "num_layers": 2, "num_heads": 2,
        "hidden_size": 16, "vocab_size": 40, "max_position_embeddings": 4608, "window_size": 4200,
        "attention_types": [[["global", "local"], 1]],
    }  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="window_size is 4200; a model that makes its own masks"):
        _prove(raw)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_of_a_nested_config_end_the_context(kind: str) -> None:
    factors = {"short_factor": [1.5] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": 32}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **(factors if kind == "longrope" else {})}
    text = {
        "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 211,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rope_parameters": rope,
    }  # fmt: skip
    config = small_config("got_ocr2", text_config=text)
    assert facts.config_facts(config).positions == text_limit(config) == (64 if kind == "dynamic" else 32)


@pytest.mark.slow("exports two models; right and wrong ones are fast")
def test_comparisons_that_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object) -> None:
        raise RuntimeError("of this\nkind")

    with monkeypatch.context() as patch:
        patch.setattr(proof, "_near", lambda parameter, noise: torch.full_like(noise, torch.inf))
        with pytest.raises(UnsupportedModelError, match="logits of random weights that are not finite"):
            _prove(_MISTRAL)
    monkeypatch.setattr(proof, "call_model", failing)
    with pytest.raises(UnsupportedModelError, match=r"cannot be compared with eager PyTorch: of this kind$"):
        _prove(_MISTRAL)


@_TWICE
def test_a_last_layer_of_its_own_kind_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators behind the last attention are in no layer before it."""
    family, seen = find_family(_MISTRAL), []
    raw = _MISTRAL | {"num_hidden_layers": 4, "sliding_window": None}  # so few are captured whole
    captured = capture_config(raw)
    right = proof._difference
    monkeypatch.setattr(proof, "_difference", lambda subject, seed: seen.append(subject) or right(subject, seed))
    proof.prove(raw, family, "relu", captured)
    # A copy, since a graph that was raised once is known.
    other = copy.deepcopy(captured)
    last = [node for node in other.graph.nodes if node.target is torch.ops.aten.relu.default][-1]
    last.target = torch.ops.aten.sigmoid.default
    other.recompile()
    proof.prove(raw, family, "relu", other)
    assert [len(subject.eager.model.layers) for subject in seen] == [2, 4]


def test_a_capture_that_cannot_be_raised_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raise_elementwise, "_EMITS", {})
    with pytest.raises(PassesError, match=r"mul \(aten\.mul\.Tensor\): rms_norm takes it"):
        _prove(_GEMMA)


@_TWICE
@pytest.mark.usefixtures("one_seed")
def test_the_proof_is_a_part_of_compiling(
    tiny_model: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "_difference", lambda subject, seed: "lm_head gives another result")
    ended = cli("compile", tiny_model, "-o", tmp_path / "artifact")
    assert ended.code == 3
    assert "lm_head gives another result; this is a fault of picompile" in ended.err
    assert not (tmp_path / "artifact").exists()


def test_all_weights_differ_by_seed() -> None:
    """Weights that are tied stay so, norms are near what they begin as, and no two weights are alike."""
    raw = {**_GEMMA, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True}
    family = find_family(raw)
    one, again, other = (
        build_model(family, make_config(family, raw), raw_activation(family, raw), "eager") for _ in range(3)
    )
    for model, seed in ((one, 0), (again, 0), (other, 1)):
        proof._fill(model, seed)
    assert one.lm_head.weight is one.model.embed_tokens.weight
    for (name, first), second, third in zip(
        one.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(first, second)
        assert not bool((first == third).any()), name
        assert float(first.std()) > 0.05
    norms = [parameter for parameter in one.parameters() if parameter.dim() == 1]
    assert all(abs(float(norm.mean()) - 1) < 0.3 for norm in norms)
    flat = [tuple(parameter.flatten()[:4].tolist()) for parameter in one.parameters()]
    assert len(set(flat)) == len(flat)


@_TWICE
def test_models_are_made_small_without_losing_a_kind_of_layer() -> None:
    raw = {
        **_GEMMA2, "num_hidden_layers": 6, "sliding_window": 4096, "intermediate_size": 9000, "eos_token_id": 30_000,
        "vocab_size": 32_000, "layer_types": ["full_attention"] * 5 + ["sliding_attention"],
        "text_config": {"num_hidden_layers": 6, "n_layer": 5}, "rope_parameters": None,
    }  # fmt: skip
    small = proof._smaller(raw, 6, 6, proof._SMALL)
    assert (small["sliding_window"], small["intermediate_size"], small["vocab_size"]) == (7, 96, 256)
    assert (small["eos_token_id"], small["num_hidden_layers"], small["hidden_size"]) == (1, 6, 16)
    shorter = proof._smaller(raw, 6, 2, {})
    assert (shorter["num_hidden_layers"], len(shorter["layer_types"])) == (2, 2)
    assert shorter["text_config"] == {"num_hidden_layers": 2, "n_layer": 5}
    assert (shorter["sliding_window"], shorter["vocab_size"]) == (4096, 32_000)
