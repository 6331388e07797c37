"""Small mixtures of experts: canonical graphs by hand, their equations in plain PyTorch, and a Hugging Face folder."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.support import save_byte_tokenizer
from picompile.frontend.captured import Captured, ModelFacts
from picompile.testing import GraphShape, RandomWeights, build, random_weights
from picompile_passes.base import Stage, set_stage

MIXTURE = GraphShape(
    hidden=32, heads=2, kv_heads=2, ffn=48, experts=6, chosen=2, layers=3, vocab=300, activation="silu", fused=True
)
"""A mixture in the manner of Qwen3: gate and up in one stack, a softmax before the choice."""

RELU_MIXTURE = replace(MIXTURE, activation="relu", normalized="sum")
"""One whose neurons are silent where they do not fire."""

SHARED_MIXTURE = replace(
    MIXTURE, shared=64, scores="sigmoid", normalized="sum", router_bias=True, gated=False, activation="relu2"
)
"""One in the manner of Nemotron 3: no gate, a bias of the choice, and a block that all tokens share."""

BIASED_MIXTURE = replace(
    MIXTURE, expert_bias=True, turned=True, scores="identity", normalized="softmax", activation="silu"
)
"""One in the manner of gpt-oss: biases of experts, and stacks with inputs first."""

MIXTURES = {"silu": MIXTURE, "relu": RELU_MIXTURE, "shared": SHARED_MIXTURE, "biased": BIASED_MIXTURE}


def captured_mixture(shape: GraphShape = MIXTURE, seed: int = 0) -> Captured:
    """Return a mixture as if it were captured: its graph is canonical, and the passes that raise graphs change nothing.

    Its weights are random ones of `seed`.
    """
    graph_module = build(shape)
    set_stage(graph_module, Stage.CAPTURED)
    weights = random_weights(graph_module, seed)
    return Captured(graph_module, weights, _facts(shape, weights))


def _facts(shape: GraphShape, weights: RandomWeights) -> ModelFacts:
    return ModelFacts(
        name="mixture",
        architecture="Mixture",
        family="module",
        hidden=shape.hidden,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ffn=shape.experts * shape.ffn,
        vocab=shape.vocab,
        activation=shape.activation,
        max_positions=64,
        parameters=sum(tensor.numel() for tensor in weights.tensors.values()),
        checkpoint_dtype="f32",
        bos_token_id=None,
        eos_token_ids=(),
    )


class EagerExperts(nn.Module):
    """The mixture of one layer of a `GraphShape` without biases, expert by expert, in float64.

    It is written as a paper would, so that nothing of the dialect's own is in it.
    """

    def __init__(self, shape: GraphShape, weights: RandomWeights, layer: int) -> None:
        super().__init__()
        self.shape, self.prefix = shape, f"model.layers.{layer}.mlp"
        self.weights = {name: tensor.double() for name, tensor in weights.tensors.items()}

    def forward(self, x: Tensor) -> Tensor:
        """x [T, D] → [T, D]."""
        shape, rows = self.shape, []
        logits = x.double() @ self._tensor("router.weight").T
        score = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "identity": logits}[shape.scores]
        bias = self._tensor("router.correction_bias") if shape.router_bias else torch.zeros(shape.experts)
        for token, scores in zip(x.double(), score, strict=True):
            chosen = sorted(range(shape.experts), key=lambda e, s=scores: -float(s[e] + bias[e]))[: shape.chosen]
            gains = torch.stack([scores[e] for e in chosen])
            gains = {"none": gains, "sum": gains / gains.sum(), "softmax": gains.softmax(-1)}[shape.normalized]
            rows.append(sum(gain * self._expert(token, e) for gain, e in zip(gains, chosen, strict=True)))
        y = torch.stack(rows)
        return y + self._shared(x.double()) if shape.shared else y

    def _expert(self, x: Tensor, expert: int) -> Tensor:
        shape = self.shape
        if not shape.gated:
            hidden = self._activated(self._tensor("experts.up_proj")[expert] @ x)
        else:
            both = self._tensor("experts.gate_up_proj")[expert] @ x
            hidden = self._activated(both[: shape.ffn]) * both[shape.ffn :]
        return self._tensor("experts.down_proj")[expert] @ hidden

    def _shared(self, x: Tensor) -> Tensor:
        up = x @ self._tensor("shared.up_proj.weight").T
        hidden = self._activated(up)
        if self.shape.gated:
            hidden = self._activated(x @ self._tensor("shared.gate_proj.weight").T) * up
        return hidden @ self._tensor("shared.down_proj.weight").T

    def _activated(self, values: Tensor) -> Tensor:
        name = self.shape.activation
        return F.silu(values) if name == "silu" else values.relu() ** (2 if name == "relu2" else 1)

    def _tensor(self, name: str) -> Tensor:
        return self.weights[f"{self.prefix}.{name}"]


def save_tiny_mixture(folder: Path, **changes: object) -> None:
    """A Hugging Face folder: an OLMoE model with ReLU experts of random weights, float32, and a tokenizer of bytes."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    fields = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "hidden_act": "relu",
        "max_position_embeddings": 256,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "initializer_range": 0.15,
    }
    torch.manual_seed(0)
    OlmoeForCausalLM(OlmoeConfig(**{**fields, **changes})).save_pretrained(folder)
    save_byte_tokenizer(folder, vocabulary=300)
