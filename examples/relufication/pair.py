"""The original model and its copy with another activation, which learns from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from picompile.errors import UnsupportedModelError
from picompile.frontend.activation import with_activation
from picompile.frontend.config import make_config, resolve
from picompile.frontend.families import find_family
from picompile.frontend.hf import activation_of, open_checkpoint

ACTIVATIONS = ("relu", "drelu")

# These already leave neurons silent.
_SPARSE = ("relu", "relu2", "relu6", "fatrelu")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# What a config of Mistral, which Bamboo's is, has no field for.
_NOT_MISTRAL = ("attention_bias", "mlp_bias", "pretraining_tp")


@dataclass(frozen=True)
class Pair:
    """Two models that differ in their feed-forward blocks. What is not trained has one copy in memory for both."""

    original: nn.Module
    copy: nn.Module
    vocabulary: int
    positions: int

    def trained(self) -> dict[str, nn.Parameter]:
        """The feed-forward weights and the norms of the copy, by name."""
        return {name: parameter for name, parameter in self.copy.named_parameters() if parameter.requires_grad}


def open_pair(model: Path, activation: str) -> Pair:
    """Read a checkpoint twice: as it is, and with `activation`, one of `ACTIVATIONS`.

    Raises `UnsupportedModelError` for a model that is not SwiGLU, or that cannot be had with this activation.
    """
    checkpoint = open_checkpoint(model)
    found = checkpoint.activation or activation_of(checkpoint.config)
    if found.partition("(")[0] in _SPARSE:
        raise UnsupportedModelError(f"{model}: its activation is {found} already; compile it as it is")
    if len(feed_forward_blocks(checkpoint.model)) != checkpoint.facts.layers:
        raise UnsupportedModelError(
            f"{model}: {checkpoint.facts.architecture} has no feed-forward block with a gate in every layer "
            f"({', '.join(_PROJECTIONS)}), so there is no SwiGLU to replace"
        )
    if found != "silu":
        raise UnsupportedModelError(f"{model}: its activation is {found}; only SiLU is replaced")
    weights = {name: checkpoint.weights.load(name).float() for name in checkpoint.weights.names()}
    original = _build(checkpoint.config, weights, train=False)
    copy = _build(changed_config(model, checkpoint.config, activation), weights, train=True)
    return Pair(original, copy, checkpoint.facts.vocab, checkpoint.facts.max_positions)


def changed_config(model: Path, config: Mapping[str, Any], activation: str) -> dict[str, Any]:
    """The contents of a config.json with another activation. dReLU is Bamboo's: Mistral with ReLU on gate and up."""
    if activation == "relu":
        return with_activation(config, "relu")
    odd = [name for name in _NOT_MISTRAL[:2] if config.get(name)]
    if find_family(config).name not in ("llama", "mistral") or odd:
        kind = f"{config.get('model_type')}{f' with {odd[0]}' if odd else ''}"
        raise UnsupportedModelError(f"{model}: dReLU needs a Llama or a Mistral without biases, not {kind}")
    kept = {key: value for key, value in config.items() if key not in _NOT_MISTRAL}
    named = {"architectures": ["BambooForCausalLM"], "model_type": "bamboo", "hidden_act": "relu"}
    # Without this, Mistral's class would have a window of 4,096.
    return {"sliding_window": None, **kept, **named}


def feed_forward_blocks(model: nn.Module) -> list[nn.Module]:
    """The feed-forward blocks with a gate, in the order of the layers."""
    return [module for module in model.modules() if all(hasattr(module, name) for name in _PROJECTIONS)]


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that have a feed-forward block with a gate, in order."""
    blocks = {id(block) for block in feed_forward_blocks(model)}
    return [module for module in model.modules() if any(id(child) in blocks for child in module.children())]


def _build(config: Mapping[str, Any], weights: Mapping[str, Tensor], train: bool) -> nn.Module:
    """Build a model of transformers. Those weights that are trained are copies of its own."""
    family = find_family(config)
    with torch.device("meta"):
        names = _trained_names(resolve(family.model_class)(make_config(family, config))) if train else set()
    model: nn.Module = resolve(family.model_class)(make_config(family, config))
    own = {name: weight.clone() if name in names else weight for name, weight in weights.items()}
    model.load_state_dict(own, strict=False, assign=True)
    model.tie_weights()  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    return model.eval()


def _trained_names(model: nn.Module) -> set[str]:
    blocks = {id(parameter) for block in feed_forward_blocks(model) for parameter in block.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in blocks or "norm" in name}


@contextmanager
def seen_neurons(model: nn.Module, see: Any) -> Iterator[None]:
    """Call `see(layer, neurons, output)` with what goes into and comes out of each down projection."""

    def hook(layer: int) -> Any:
        return lambda _, inputs, output: see(layer, inputs[0], output)

    blocks = feed_forward_blocks(model)
    hooks = [block.down_proj.register_forward_hook(hook(layer)) for layer, block in enumerate(blocks)]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()
