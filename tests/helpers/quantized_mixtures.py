"""Small mixtures whose checkpoints hold a quantized matrix for each expert, and the same models in float32."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from helpers.quantized_files import Maker
from helpers.support import save_byte_tokenizer

_SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def save_quantized_mixture(
    folder: Path, make: Maker, config: Mapping[str, Any], *, router: bool = False, **changes: Any
) -> nn.Module:
    """Write a Qwen3-MoE of random matrices, as its quantized checkpoints are published, and a tokenizer of bytes.

    Projections of attention and the matrices of experts, and with `router` those of routers, are made by `make`; norms,
    embeddings and the head are bfloat16. `config` is the quantization config. Return the eager model of the numbers, in
    float32.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**_SIZES, **changes})).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_((0.5 if name.endswith("mlp.gate.weight") else 0.05) * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    values = dict(tensors)
    quantized = [name for name in tensors if name.endswith(("_proj.weight", "mlp.gate.weight")[: 1 + router])]
    assert any(".experts.1.gate_proj." in name for name in quantized)
    for seed, name in enumerate(quantized):
        outputs, inputs = tensors.pop(name).shape
        parts, weight = make(outputs, inputs, seed)
        values[name] = weight.float()
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": dict(config)}))
    save_byte_tokenizer(folder, vocabulary=300)
    return _loaded(folder.with_name(f"{folder.name}-values"), raw, values)


def _loaded(folder: Path, config: Mapping[str, Any], values: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return the model of transformers with `values`, by the names that checkpoints have for them."""
    from transformers import Qwen3MoeForCausalLM

    folder.mkdir()
    save_file({name: value.float().contiguous() for name, value in values.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    model: nn.Module = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()
