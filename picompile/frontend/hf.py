"""Capturing the model of a Hugging Face folder."""

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from picompile.errors import UnsupportedModelError
from picompile.frontend.bamboo import FatReLU
from picompile.frontend.captured import Captured, ModelFacts
from picompile.frontend.checkpoint import (
    ExpectedTensor,
    FolderWeights,
    TensorHeader,
    check_folder,
    match_names,
    read_headers,
    ties_hold,
)
from picompile.frontend.config import (
    default_activation,
    make_config,
    one_line,
    quiet_transformers,
    resolve,
    unknown_keys,
)
from picompile.frontend.export import export_decoder, first_names, register_attention
from picompile.frontend.families import Family, activation_text, find_family
from picompile.frontend.json_file import read_json_object, token_ids

# Rotary embeddings have no longest text of their own; this bounds the token count of the graph, not of the artifact.
_MAX_TOKENS = 1 << 20


# The number of a layer in a tensor's name: model.layers.1.mlp.up_proj.weight, transformer.h.1.ln_attn.bias.
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d{1,9})\.")

# Names that transformers' feed-forward blocks have for their activation: Llama and its like, OPT, Falcon.
_ACTIVATION_MODULES = ("act_fn", "activation_fn", "act")


@dataclass(frozen=True)
class Checkpoint:
    """A folder that has been checked: the model without weights, and where the weights are.

    `warning` is a line for the user, where config.json has something that has no effect.
    """

    model: nn.Module
    weights: FolderWeights
    facts: ModelFacts
    warning: str | None


def load_model(folder: Path | str) -> Captured:
    """Return the model of `folder`, captured. No weight is read.

    Raises `UsageError` for what is no model folder, and `UnsupportedModelError`, in one line, for a model or a
    checkpoint that cannot be compiled.
    """
    checkpoint = open_checkpoint(Path(folder))
    graph_module = _capture(checkpoint.model, checkpoint.facts.activation)
    return Captured(graph_module, checkpoint.weights, checkpoint.facts, checkpoint.warning)


def capture_config(raw: Mapping[str, Any]) -> GraphModule:
    """Return the captured graph of the model that a config.json of these contents describes, without a checkpoint.

    Raises `UnsupportedModelError` as `load_model` does.
    """
    family = find_family(raw)
    activation = raw_activation(family, raw)
    return _capture(build_model(family, make_config(family, raw), activation), activation)


@dataclass(frozen=True)
class _Exportable:
    """A model without weights, and what makes it equal to another."""

    model_class: type
    config: str
    activation: str
    model: nn.Module = field(compare=False)


def _capture(model: nn.Module, activation: str) -> GraphModule:
    """The graph of a model of transformers: a copy, since `torch.export` takes seconds for a few layers, and a command
    may profile a model, train its predictors and compile it.
    """
    config = json.dumps(vars(model)["config"].to_dict(), sort_keys=True, default=str)
    return copy.deepcopy(_exported(_Exportable(type(model), config, activation, model)))


@lru_cache(maxsize=16)
def _exported(exportable: _Exportable) -> GraphModule:
    with quiet_transformers():
        return export_decoder(exportable.model, call_model, _MAX_TOKENS)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Return everything that can be known of `folder` before its model is captured; raises as `load_model` does.

    Names, shapes and dtypes of all weights are held against the model by the files' headers.
    """
    check_folder(folder)
    raw = read_json_object(folder / "config.json")
    family = find_family(raw)
    _check_unquantized(raw)
    activation = raw_activation(family, raw)
    config = make_config(family, raw)
    headers = read_headers(folder)
    _check_layers(folder, headers, int(config.num_hidden_layers))
    model = build_model(family, config, activation)
    prefix = f"{model.base_model_prefix}."
    if not ties_hold(_expected(model), headers, prefix):
        config.tie_word_embeddings = False
        model = build_model(family, config, activation)
    weights = FolderWeights(headers, match_names(folder, _expected(model), headers, prefix))
    facts = _facts(folder, family, config, activation, model, weights.dtype)
    return Checkpoint(model, weights, facts, unknown_keys(family, raw))


def _check_layers(folder: Path, headers: Mapping[str, TensorHeader], layers: int) -> None:
    """Refuse a config of more layers than the checkpoint has: before a million of them are built, not after."""
    found = {int(match[1]) for name in headers if (match := _LAYER.search(name))}
    missing = next((layer for layer in range(layers) if layer not in found), layers)
    if missing < layers:
        raise UnsupportedModelError(
            f"{folder}: no tensor of layer {missing}, but config.json asks for {layers} layers (num_hidden_layers)"
        )


def _expected(model: nn.Module) -> dict[str, ExpectedTensor]:
    names = first_names(model)
    return {name: ExpectedTensor(tuple(model.get_parameter(name).shape), names[name]) for name in names}


def build_model(family: Family, config: Any, activation: str) -> nn.Module:
    """Return the model that `config` describes, on the meta device, with what buffers it computes in memory.

    Raises `UnsupportedModelError` where transformers rejects the config.
    """
    register_attention()
    model_class = resolve(family.model_class)
    try:
        with quiet_transformers(), torch.device("meta"):
            model: nn.Module = model_class._from_config(
                config, attn_implementation=family.attention, dtype=torch.float32
            )
    except Exception as error:
        raise UnsupportedModelError(f"config.json: {one_line(error)}") from error
    if activation.startswith("fatrelu"):
        threshold = float(activation.removeprefix("fatrelu(").removesuffix(")"))
        for module in model.modules():
            for name in _ACTIVATION_MODULES:
                if hasattr(module, name):
                    setattr(module, name, FatReLU(threshold))
    _compute_buffers(model)
    return model.eval()


def _compute_buffers(model: nn.Module) -> None:
    """Compute again the buffers that are in no checkpoint (rotary frequencies): on the meta device they are empty.

    Raises `UnsupportedModelError` where the config makes them infinite or NaN.
    """
    for module in model.modules():
        names = [name for name, _ in module.named_buffers(recurse=False) if name in module._non_persistent_buffers_set]
        if names:
            fresh = _fresh(module)
            for name in names:
                module.register_buffer(name, fresh.get_buffer(name), persistent=False)


def _fresh(module: nn.Module) -> nn.Module:
    """Return another instance of `module` with its buffers computed."""
    try:
        with quiet_transformers():
            fresh = type(module)(module.config)
    except Exception as error:
        raise UnsupportedModelError(f"config.json: {one_line(error)}") from error
    numbers = [*fresh.buffers(), torch.tensor(float(getattr(fresh, "attention_scaling", 1.0)))]
    if not all(bool(torch.isfinite(tensor).all()) for tensor in numbers):
        raise UnsupportedModelError("config.json: rope_parameters make rotary frequencies that are no finite numbers")
    return fresh


def call_model(model: nn.Module, tokens: Tensor, positions: Tensor) -> Tensor:
    """Return logits [1, T, V] of a transformers model for tokens and positions [1, T]."""
    logits: Tensor = model(input_ids=tokens, position_ids=positions, use_cache=False, return_dict=True).logits
    return logits


def _check_unquantized(raw: Mapping[str, Any]) -> None:
    quantization = raw.get("quantization_config") or raw.get("compression_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(
            f"the checkpoint is quantized ({str(method)[:60]}); use the original, unquantized one"
        )


def raw_activation(family: Family, raw: Mapping[str, Any]) -> str:
    """Return the dialect's text for the activation of a config.json, or of its family where it says nothing."""
    return activation_text(raw, family, default_activation(family))


def _facts(folder: Path, family: Family, config: Any, activation: str, model: nn.Module, dtype: str) -> ModelFacts:
    heads = int(config.num_attention_heads)
    bos = token_ids(vars(config), "bos_token_id", "config.json")
    return ModelFacts(
        name=folder.resolve().name,
        architecture=type(model).__name__,
        family=family.name,
        hidden=int(config.hidden_size),
        layers=int(config.num_hidden_layers),
        heads=heads,
        kv_heads=family.kv_heads(config),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        ffn=int(getattr(config, family.ffn)),
        vocab=int(config.vocab_size),
        activation=activation,
        max_positions=int(config.max_position_embeddings),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        checkpoint_dtype=dtype,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=token_ids(vars(config), "eos_token_id", "config.json"),
    )
