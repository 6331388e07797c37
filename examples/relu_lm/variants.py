"""The models that can be trained, and the parts of them that training touches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from relu_lm.texts import END_OF_TEXT, read_documents, read_library

MAX_CONTEXT = 1024


@dataclass(frozen=True)
class Variant:
    """One model that can be trained. Sizes of its tokenizer and its shape, and whether it reads documents too.

    A mixture has `experts` experts of `neurons` neurons each in a layer, of which a token is computed by `chosen`.
    """

    name: str
    family: str
    vocabulary: int
    hidden: int
    neurons: int
    layers: int
    heads: int
    documents: bool
    experts: int = 0
    chosen: int = 0

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
        gated = {"intermediate_size": self.neurons, "num_key_value_heads": self.heads // 2, "hidden_act": "relu"}
        if self.family == "mixtral":
            # The router's loss keeps all experts in use (arXiv 2101.03961).
            mixture = {"num_local_experts": self.experts, "num_experts_per_tok": self.chosen}
            return MixtralConfig(**shared, **gated, **mixture, output_router_logits=True, router_aux_loss_coef=0.01)
        return LlamaConfig(**shared, **gated)

    @property
    def architecture(self) -> str:
        """The model in a few words, for its card."""
        if self.family == "opt":
            return "an OPT with ReLU"
        if self.family == "mixtral":
            return f"a Mixtral with ReLU gates (ReGLU), {self.chosen} of {self.experts} experts for a token"
        return "a Llama with a ReLU gate (ReGLU)"

    def texts(self, held_out: bool) -> dict[str, str]:
        """Return the texts that the model is trained on, or measured with, by name."""
        return read_library(held_out) | (read_documents(held_out) if self.documents else {})


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("tiny-reglu", "llama", 2048, 192, 704, 6, 6, documents=False),
        Variant("reglu", "llama", 4096, 512, 1536, 6, 8, documents=True),
        Variant("tiny-moe", "mixtral", 2048, 192, 160, 4, 6, documents=False, experts=8, chosen=2),
        Variant("opt", "opt", 4096, 512, 2048, 6, 8, documents=True),
    )
}


def residual_writers(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the matrices that write to the residual stream: attention's outputs, and the FFNs' down."""
    if model.config.model_type == "opt":
        layers = model.model.decoder.layers
        return [weight for layer in layers for weight in (layer.self_attn.out_proj.weight, layer.fc2.weight)]
    found = [layer.self_attn.o_proj.weight for layer in model.model.layers]
    if model.config.model_type == "mixtral":
        return found + [layer.mlp.experts.down_proj for layer in model.model.layers]
    return found + [layer.mlp.down_proj.weight for layer in model.model.layers]


def observe_neurons(model: PreTrainedModel, see: Callable[[torch.Tensor], None]) -> list[RemovableHandle]:
    """Call `see` in each forward pass with what each layer's neurons say, once a layer; the handles end it.

    That is what goes to down; in a mixture it is the activated gate of the experts' neurons that were computed.
    """
    if model.config.model_type == "mixtral":
        gates = [layer.mlp.experts.act_fn for layer in model.model.layers]
        return [gate.register_forward_hook(lambda _module, _inputs, output: see(output)) for gate in gates]
    if model.config.model_type == "opt":
        downs = [layer.fc2 for layer in model.model.decoder.layers]
    else:
        downs = [layer.mlp.down_proj for layer in model.model.layers]
    return [down.register_forward_pre_hook(lambda _module, inputs: see(inputs[0])) for down in downs]


def new_model(variant: Variant, tokenizer: Tokenizer, seed: int) -> PreTrainedModel:
    """Random weights; what writes to the residual stream starts smaller in deeper models, as in GPT-2."""
    torch.manual_seed(seed)
    config = variant.config(tokenizer.token_to_id(END_OF_TEXT), tokenizer.get_vocab_size())
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    for weight in residual_writers(model):
        weight.data /= math.sqrt(2 * variant.layers)
    return model
