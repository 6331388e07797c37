"""Mixtures with ReLU whose code is in their checkpoints alone, in float64 from their published definitions.

Nothing here is picompile's or transformers'. Matrices have the names of the checkpoint, and experts are loops.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

Config = Mapping[str, Any]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Definition:
    """What a config.json of a family means: `windows` and `turns` have an entry for each layer.

    `router` and `matrices` are parts of tensors' names: a layer's router, and an expert's gate, up and down. `scores`
    of the chosen experts are `softmax` over them, or `sigmoid` divided by their sum.
    """

    experts: int
    chosen: int
    neurons: int
    windows: tuple[int | None, ...]
    turns: tuple[bool, ...]
    router: str
    matrices: tuple[str, str, str]
    scores: str
    two_sided: bool
    routes_before_attention: bool


_SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
_SIZES |= {"vocab_size": 211, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2}

TURBOSPARSE_MIXTRAL: Config = {
    **_SIZES,
    "architectures": ["TurboSparseMixtralForCausalLM"],
    "model_type": "turbosparsemixtral",
    "auto_map": {"AutoModelForCausalLM": "modeling_turbosparsemixtral.TurboSparseMixtralForCausalLM"},
    "hidden_act": "relu",
    "intermediate_size": 48,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
}

SMALLTHINKER: Config = {
    **_SIZES,
    "architectures": ["SmallThinkerForCausalLM"],
    "model_type": "smallthinker",
    "auto_map": {"AutoModelForCausalLM": "modeling_smallthinker.SmallThinkerForCausalLM"},
    "model_name": "smallthinker_4b_instruct",
    "num_hidden_layers": 4,
    "head_dim": 24,
    "moe_num_primary_experts": 6,
    "moe_num_active_primary_experts": 2,
    "moe_ffn_hidden_size": 48,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1.5e6,
    "rope_scaling": None,
    "rope_layout": [0, 1, 1, 1],
    "sliding_window_layout": [0, 1, 1, 1],
    "sliding_window_size": 9,
    "tie_word_embeddings": True,
    "output_router_logits": False,
}


def defined(config: Config) -> Definition:
    """Return what a config.json means."""
    layers = config["num_hidden_layers"]
    if config["model_type"] == "smallthinker":
        return Definition(
            experts=config["moe_num_primary_experts"],
            chosen=config["moe_num_active_primary_experts"],
            neurons=config["moe_ffn_hidden_size"],
            windows=tuple(config["sliding_window_size"] if has else None for has in config["sliding_window_layout"]),
            turns=tuple(map(bool, config["rope_layout"])),
            router="primary_router",
            matrices=("gate", "up", "down"),
            scores="softmax" if config.get("moe_primary_router_apply_softmax") else "sigmoid",
            two_sided=False,
            routes_before_attention=True,
        )
    return Definition(
        experts=config["num_local_experts"],
        chosen=config["num_experts_per_tok"],
        neurons=config["intermediate_size"],
        windows=(config["sliding_window"],) * layers,
        turns=(True,) * layers,
        router="gate",
        matrices=("w1", "w3", "w2"),
        scores="softmax",
        two_sided=True,
        routes_before_attention=False,
    )


def published_tensors(config: Config, seed: int = 0) -> Tensors:
    """Return random tensors under the names of the checkpoint, float32 values that float16 has."""
    of, hidden, generator = defined(config), config["hidden_size"], torch.Generator().manual_seed(seed)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (config["vocab_size"], hidden), "model.norm": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{name}": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{prefix}.self_attn.{name}_proj": (kv_heads * head_dim, hidden) for name in "kv"}
        shapes[f"{prefix}.self_attn.q_proj"] = (heads * head_dim, hidden)
        shapes[f"{prefix}.self_attn.o_proj"] = (hidden, heads * head_dim)
        shapes[f"{prefix}.block_sparse_moe.{of.router}"] = (of.experts, hidden)
        for expert in range(of.experts):
            gate, up, down = (f"{prefix}.block_sparse_moe.experts.{expert}.{name}" for name in of.matrices)
            shapes |= {gate: (of.neurons, hidden), up: (of.neurons, hidden), down: (hidden, of.neurons)}
    return {f"{name}.weight": _drawn(name, shape, generator) for name, shape in shapes.items()}


def _drawn(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        values = 1 + 0.1 * values
    elif "embed" in name:
        values *= 0.5
    else:
        # Attention and experts that add much, so that it shows what a router reads.
        values *= shape[-1] ** -0.5 * (3 if name.endswith(("o_proj", "router", "down", "w2")) else 1)
    return values.half().float()


def save_published(folder: Path, config: Config, tensors: Tensors) -> None:
    """Write a checkpoint of `tensors`, as float16, with `config` for its config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: values.half() for name, values in tensors.items()}, folder / "model.safetensors")


class PlainMixture(nn.Module):
    """The model of a config.json and of the tensors of its checkpoint."""

    def __init__(self, config: Config, tensors: Tensors) -> None:
        super().__init__()
        self.config, self.of = config, defined(config)
        self.tensors = {name: values.double() for name, values in tensors.items()}

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        """Tokens [1, T] → an object with logits [1, T, vocabulary]."""
        x = self._tensor("model.embed_tokens")[input_ids[0]]
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            begin, read = x, self._normed(x, f"{prefix}.input_layernorm")
            x = x + self._attended(read, layer)
            read = self._normed(x, f"{prefix}.post_attention_layernorm")
            routed = begin if self.of.routes_before_attention else read
            x = x + self._mixed(routed, read, f"{prefix}.block_sparse_moe")
        tied = self.config["tie_word_embeddings"]
        head = self._tensor("model.embed_tokens" if tied else "lm_head")
        return SimpleNamespace(logits=(self._normed(x, "model.norm") @ head.T).unsqueeze(0))

    def _tensor(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"]

    def _normed(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + float(self.config["rms_norm_eps"])).sqrt()
        return x / scale * self._tensor(name)

    def _attended(self, x: Tensor, layer: int) -> Tensor:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        prefix, window = f"model.layers.{layer}.self_attn", self.of.windows[layer]
        q, k, v = (x @ self._tensor(f"{prefix}.{name}_proj").T for name in "qkv")
        q, k, v = q.reshape(len(x), heads, -1), k.reshape(len(x), kv_heads, -1), v.reshape(len(x), kv_heads, -1)
        if self.of.turns[layer]:
            q, k = self._turned(q), self._turned(k)
        rows = []
        for token in range(len(x)):
            first = 0 if window is None else max(0, token - window + 1)
            results = []
            for head in range(heads):
                shared = head // (heads // kv_heads)
                scores = k[first : token + 1, shared] @ q[token, head] / q.shape[-1] ** 0.5
                results.append(scores.softmax(-1) @ v[first : token + 1, shared])
            rows.append(torch.cat(results))
        return torch.stack(rows) @ self._tensor(f"{prefix}.o_proj").T

    def _turned(self, x: Tensor) -> Tensor:
        """x [T, heads, head_dim]: number i of a head turns with number i + head_dim / 2."""
        half = x.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** -(torch.arange(half, dtype=torch.float64) / half)
        angles = (torch.arange(len(x)).unsqueeze(-1) * frequencies).unsqueeze(1)
        left, right = x[..., :half], x[..., half:]
        return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)

    def _mixed(self, routed: Tensor, read: Tensor, prefix: str) -> Tensor:
        logits, rows = routed @ self._tensor(f"{prefix}.{self.of.router}").T, []
        for token, each in zip(read, logits, strict=True):
            chosen = each.argsort(descending=True)[: self.of.chosen].tolist()
            scores = each[chosen].softmax(-1) if self.of.scores == "softmax" else each[chosen].sigmoid()
            gains = scores / scores.sum()
            rows.append(sum(gain * self._expert(token, prefix, e) for gain, e in zip(gains, chosen, strict=True)))
        return torch.stack(rows)

    def _expert(self, x: Tensor, prefix: str, expert: int) -> Tensor:
        gate, up, down = (self._tensor(f"{prefix}.experts.{expert}.{name}") for name in self.of.matrices)
        raised = up @ x
        return down @ ((gate @ x).clamp(min=0) * (raised.clamp(min=0) if self.of.two_sided else raised))
