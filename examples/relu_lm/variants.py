"""The models that can be trained, and the parts of them that training touches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PretrainedConfig, PreTrainedModel

from relu_lm.texts import END_OF_TEXT, read_documents, read_library

MAX_CONTEXT = 1024


@dataclass(frozen=True)
class Variant:
    """One model that can be trained. Sizes of its tokenizer and its shape, and whether it reads documents too."""

    name: str
    family: str
    vocabulary: int
    hidden: int
    neurons: int
    layers: int
    heads: int
    documents: bool

    def config(self, end: int, vocabulary: int) -> PretrainedConfig:
        shared = {
            "vocab_size": vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": MAX_CONTEXT,
            "tie_word_embeddings": True,
            "bos_token_id": end,
            "eos_token_id": end,
        }
        if self.family == "opt":
            return OPTConfig(
                **shared,
                ffn_dim=self.neurons,
                word_embed_proj_dim=self.hidden,
                activation_function="relu",
                dropout=0.0,
                pad_token_id=end,
            )
        return LlamaConfig(
            **shared, intermediate_size=self.neurons, num_key_value_heads=self.heads // 2, hidden_act="relu"
        )

    def texts(self, held_out: bool) -> dict[str, str]:
        """Return the texts that the model is trained on, or measured with, by name."""
        return read_library(held_out) | (read_documents(held_out) if self.documents else {})


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("tiny-reglu", "llama", 2048, 192, 704, 6, 6, documents=False),
        Variant("reglu", "llama", 4096, 512, 1536, 6, 8, documents=True),
        Variant("opt", "opt", 4096, 512, 2048, 6, 8, documents=True),
    )
}


def down_projections(model: PreTrainedModel) -> list[tuple[torch.nn.Linear, torch.nn.Linear]]:
    """Return the projections of each layer that write to the residual stream: attention output and FFN down."""
    if model.config.model_type == "opt":
        return [(layer.self_attn.out_proj, layer.fc2) for layer in model.model.decoder.layers]
    return [(layer.self_attn.o_proj, layer.mlp.down_proj) for layer in model.model.layers]


def new_model(variant: Variant, tokenizer: Tokenizer, seed: int) -> PreTrainedModel:
    """Random weights; what writes to the residual stream starts smaller in deeper models, as in GPT-2."""
    torch.manual_seed(seed)
    config = variant.config(tokenizer.token_to_id(END_OF_TEXT), tokenizer.get_vocab_size())
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    for projections in down_projections(model):
        for projection in projections:
            projection.weight.data /= math.sqrt(2 * variant.layers)
    return model
