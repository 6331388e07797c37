"""Capture of a Hugging Face folder."""

import copy
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from picompile.capture.attention import register_attention
from picompile.capture.captured import Captured
from picompile.capture.export import export_decoder, first_names
from picompile.capture.facts import ModelFacts
from picompile.capture.families import Family, activation_text, check_config, find_family
from picompile.checkpoint import ExpectedTensor, FolderWeights, check_folder, match_names, read_headers, ties_hold
from picompile.errors import UnsupportedModelError
from picompile.models import FatReLU

# Rotary embeddings have no longest text of their own; this bounds the token count of the graph, not of the artifact.
_MAX_TOKENS = 1 << 20


# What transformers' feed-forward blocks call their activation: Llama and its like, OPT, Falcon.
_ACTIVATION_MODULES = ("act_fn", "activation_fn", "act")


@dataclass(frozen=True)
class Checkpoint:
    """A folder that has been checked: the model without weights, and where the weights are."""

    model: nn.Module
    weights: FolderWeights
    facts: ModelFacts


def load_model(folder: Path | str) -> Captured:
    """Captures the model of `folder`. No weight is read.

    Raises `UsageError` for what is no model folder, and `UnsupportedModelError`, in one line, for a model or a
    checkpoint that cannot be compiled.
    """
    checkpoint = open_checkpoint(Path(folder))
    graph_module = _capture(checkpoint.model, checkpoint.facts.activation)
    return Captured(graph_module, checkpoint.weights, checkpoint.facts)


def capture_config(raw: Mapping[str, Any]) -> GraphModule:
    """The captured graph of the model that a config.json of these contents describes; there need be no checkpoint.

    Raises `UnsupportedModelError` as `load_model` does.
    """
    family = find_family(raw)
    activation = activation_text(raw, raw_activation(family, raw))
    config = _make_config(family, raw)
    check_config(family, config)
    return _capture(build_model(family, config, activation), activation)


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
    return export_decoder(exportable.model, call_model, _MAX_TOKENS)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Everything that can be known of `folder` before its model is captured; raises as `load_model` does.

    Names, shapes and dtypes of all weights are held against the model by the files' headers.
    """
    check_folder(folder)
    raw = _read_config(folder / "config.json")
    family = find_family(raw)
    _check_unquantized(raw)
    activation = activation_text(raw, raw_activation(family, raw))
    config = _make_config(family, raw)
    check_config(family, config)
    headers = read_headers(folder)
    model = build_model(family, config, activation)
    prefix = f"{model.base_model_prefix}."
    if not ties_hold(_expected(model), headers, prefix):
        config.tie_word_embeddings = False
        model = build_model(family, config, activation)
    weights = FolderWeights(headers, match_names(folder, _expected(model), headers, prefix))
    return Checkpoint(model, weights, _facts(folder, family, config, activation, model, weights.dtype))


def _expected(model: nn.Module) -> dict[str, ExpectedTensor]:
    names = first_names(model)
    return {name: ExpectedTensor(tuple(model.get_parameter(name).shape), names[name]) for name in names}


def build_model(family: Family, config: Any, activation: str) -> nn.Module:
    """The model that `config` describes, on the meta device, with what buffers it computes in memory.

    Raises `UnsupportedModelError` where transformers rejects the config.
    """
    register_attention()
    model_class = _resolve(family.model_class)
    try:
        with torch.device("meta"):
            model: nn.Module = model_class._from_config(
                config, attn_implementation=family.attention, dtype=torch.float32
            )
    except Exception as error:
        raise UnsupportedModelError(f"config.json: {_one_line(error)}") from error
    if activation.startswith("fatrelu"):
        threshold = float(activation.removeprefix("fatrelu(").removesuffix(")"))
        for module in model.modules():
            for name in _ACTIVATION_MODULES:
                if hasattr(module, name):
                    setattr(module, name, FatReLU(threshold))
    _compute_buffers(model)
    return model.eval()


def _compute_buffers(model: nn.Module) -> None:
    """Computes again the buffers that are in no checkpoint (rotary frequencies): on the meta device they are empty."""
    for module in model.modules():
        names = [name for name, _ in module.named_buffers(recurse=False) if name in module._non_persistent_buffers_set]
        if names:
            fresh = type(module)(module.config)
            for name in names:
                module.register_buffer(name, fresh.get_buffer(name), persistent=False)


def call_model(model: nn.Module, tokens: Tensor, positions: Tensor) -> Tensor:
    """Logits [1, T, V] of a transformers model for tokens and positions [1, T]."""
    logits: Tensor = model(input_ids=tokens, position_ids=positions, use_cache=False, return_dict=True).logits
    return logits


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UnsupportedModelError(f"{file}: not readable as JSON: {_one_line(error)}") from error
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"{file}: not a JSON object")
    return config


def _check_unquantized(raw: Mapping[str, Any]) -> None:
    quantization = raw.get("quantization_config") or raw.get("compression_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(f"the checkpoint is quantized ({method}); use the original, unquantized one")


def raw_activation(family: Family, raw: Mapping[str, Any]) -> object:
    """What a config.json says of the activation, or what its family has where it says nothing."""
    if family.name == "bamboo":
        return "relu"
    default = getattr(_resolve(family.config_class)(), family.activation)
    return raw.get(family.activation, default)


def _make_config(family: Family, raw: Mapping[str, Any]) -> Any:
    """The config object. `fatrelu`, which transformers does not know, is put in when the model is built."""
    values = dict(raw)
    if values.get(family.activation) == "fatrelu":
        values[family.activation] = "relu"
    values.pop("auto_map", None)
    values["model_type"] = _resolve(family.config_class).model_type
    try:
        return _resolve(family.config_class).from_dict(values)
    except Exception as error:
        raise UnsupportedModelError(f"config.json: {_one_line(error)}") from error


def _facts(folder: Path, family: Family, config: Any, activation: str, model: nn.Module, dtype: str) -> ModelFacts:
    heads = int(config.num_attention_heads)
    eos = config.eos_token_id
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
        bos_token_id=config.bos_token_id,
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),),
    )


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
