"""Capturing the model of a Hugging Face folder."""

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.fx import GraphModule

from picompile.errors import UnsupportedModelError
from picompile.frontend.activation import check_activation, dialect_text
from picompile.frontend.build import build_model, capture_model
from picompile.frontend.captured import Captured, ModelFacts
from picompile.frontend.checkpoint import (
    ExpectedTensor,
    check_folder,
    is_stored,
    match_names,
    read_headers,
    ties_hold,
)
from picompile.frontend.config import default_activation, make_config
from picompile.frontend.config_keys import config_warnings
from picompile.frontend.export import first_names
from picompile.frontend.facts import (
    GraphFacts,
    block_activations,
    config_facts,
    graph_facts,
    positions_of,
    with_graph,
)
from picompile.frontend.families import Family, activation_text, find_family, text_config
from picompile.frontend.gguf.parts import model_name
from picompile.frontend.gguf.weights import GgufWeights
from picompile.frontend.json_file import token_ids
from picompile.frontend.left_out import LeftOut, bias_line, lacking_biases
from picompile.frontend.model_file import QUANTIZATION_FILES, folder_name, gguf_file, is_gguf, opened_gguf, read_config
from picompile.frontend.proof import prove
from picompile.frontend.renaming import IgnoredTensors, rename
from picompile.frontend.stored.matrices import StoredMatrices, find_method, quantized_part
from picompile.frontend.tensor_file import TensorHeader
from picompile.frontend.text_model import left_out_of
from picompile.frontend.weight_sources import FolderWeights
from picompile_passes.errors import PassesError

# The number of a layer in a tensor's name: model.layers.1.mlp.up_proj.weight, transformer.h.1.ln_attn.bias.
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d{1,9})\.")

# Fields that ask for layers.
_LAYER_FIELDS = ("num_hidden_layers", "decoder_layers", "num_decoder_layers", "encoder_layers", "num_encoder_layers")


@dataclass(frozen=True)
class Checkpoint:
    """A folder that has been checked: the model without weights, and where the weights are.

    `config` has the contents of config.json, with the activation that was given. `warnings` are lines for the
    user, where something of it has no effect.
    """

    config: Mapping[str, Any]
    family: Family
    model: nn.Module
    activation: str | None
    weights: FolderWeights | GgufWeights
    facts: ModelFacts
    warnings: tuple[str, ...]


def load_model(folder: Path | str, activation: str | None = None) -> Captured:
    """Return the model of `folder`, or of a GGUF file, captured. No weight is read.

    Args:
        folder: a Hugging Face folder, or a GGUF file.
        activation: the activation of the feed-forward blocks, where config.json names another than the model was
            trained with: a name of transformers, such as `relu` or `gelu_new`, or `fatrelu(0.01)` with its threshold.
            None takes what config.json says.

    Raises:
        UsageError: `folder` is no model, or the activation is not known.
        UnsupportedModelError: the model or the checkpoint cannot be compiled, or its class computes another activation
            whatever its config says.
    """
    checkpoint = open_checkpoint(Path(folder), activation)
    graph_module, found = _capture(checkpoint.family, checkpoint.model, checkpoint.activation)
    if activation is not None and not checkpoint.family.is_known:
        _check_shown(checkpoint, activation, None if found is None else graph_module)
    facts = checkpoint.facts if found is None else with_graph(checkpoint.facts, found)
    prove_it = partial(prove, checkpoint.config, checkpoint.family, checkpoint.activation, graph_module)
    return Captured(graph_module, checkpoint.weights, facts, checkpoint.warnings, prove=prove_it)


def capture_config(raw: Mapping[str, Any]) -> GraphModule:
    """Return the captured graph of the model that a config.json of these contents describes, without a checkpoint.

    Raises `UnsupportedModelError` as `load_model` does.
    """
    family = find_family(raw)
    activation = raw_activation(family, raw)
    return _capture(family, build_model(family, make_config(family, raw), activation), activation)[0]


def activation_of(raw: Mapping[str, Any]) -> str:
    """Return the dialect's text for the activation of the model that a config.json of these contents describes.

    Raises `UnsupportedModelError` as `load_model` does.
    """
    family = find_family(raw)
    activation = raw_activation(family, raw)
    if activation is not None:
        return activation
    _, found = _capture(family, build_model(family, make_config(family, raw), None), None)
    return "identity" if found is None else found.activation


@dataclass(frozen=True)
class _Exportable:
    """A model without weights, and what makes it equal to another."""

    family: Family
    config: str
    activation: str | None
    model: nn.Module = field(compare=False)

    def rebuild(self, attention: str) -> nn.Module:
        """Return the model again, which attends by `attention`."""
        config = copy.deepcopy(vars(self.model)["config"])
        return build_model(self.family, config, self.activation, attention)


def _capture(family: Family, model: nn.Module, activation: str | None) -> tuple[GraphModule, GraphFacts | None]:
    """Return the graph of a model of transformers, and the facts that it shows: None where it cannot be raised.

    It is a copy, since `torch.export` takes seconds for a few layers, and a command may profile a model, train its
    predictors and compile it.
    """
    config = json.dumps(vars(model)["config"].to_dict(), sort_keys=True, default=str)
    graph_module, found = _exported(_Exportable(family, config, activation, model))
    return copy.deepcopy(graph_module), found


@lru_cache(maxsize=16)
def _exported(exportable: _Exportable) -> tuple[GraphModule, GraphFacts | None]:
    graph_module = capture_model(exportable.model, exportable.rebuild)
    try:
        return graph_module, graph_facts(graph_module, type(exportable.model).__name__)
    except PassesError:
        # A pass of the user's own may raise what ours cannot; the pipeline will tell.
        return graph_module, None


def _check_shown(checkpoint: Checkpoint, activation: str, captured: GraphModule | None) -> None:
    """Refuse an activation that the graph does not show; `captured` is None where it cannot be raised.

    What a class of transformers makes of a field of its config is known from the graph alone.
    """
    name = type(checkpoint.model).__name__
    shown = [] if captured is None else block_activations(captured)
    if not shown:
        raise UnsupportedModelError(
            f"--activation {activation}: the graph of {name} has no feed-forward block that shows its activation"
        )
    if shown != [dialect_text(activation)]:
        raise UnsupportedModelError(
            f"--activation {activation}: {name} computes {' and '.join(shown)} whatever its config says"
        )


def open_checkpoint(folder: Path, activation: str | None = None) -> Checkpoint:
    """Return everything that can be known of `folder` before its model is captured.

    Names, shapes and dtypes of all weights are held against the model by the files' headers. `activation` is what
    `load_model` takes; raises as `load_model` does.
    """
    check_activation(activation)
    if is_gguf(folder):
        return _open_gguf(folder, read_config(folder, activation))
    check_folder(folder)
    return _open_folder(folder, read_config(folder, activation))


def _open_folder(folder: Path, raw: Mapping[str, Any]) -> Checkpoint:
    """Return what `open_checkpoint` returns, of a folder; `raw` are the contents of its config.json."""
    family = find_family(raw)
    method = find_method(raw)
    activation = raw_activation(family, raw)
    config = make_config(family, raw)
    headers = read_headers(folder)
    if method is None and (part := quantized_part(headers)) is not None:
        raise UnsupportedModelError(
            f"{folder}: holds {part}, a part of a quantized matrix, but neither config.json nor a file beside it "
            f"({', '.join(QUANTIZATION_FILES)}) says how to read it"
        )
    quantized = None if method is None else StoredMatrices(method, headers)
    headers = headers if quantized is None else quantized.headers
    _check_layers(folder, headers, config, family)
    model = build_model(family, config, activation)
    if quantized is not None:
        headers = quantized.without_zero_biases(_expected(model))
    headers = rename(folder, headers, model)
    prefix = f"{model.base_model_prefix}."
    if not ties_hold(_expected(model), headers, prefix):
        config.tie_word_embeddings = text_config(config).tie_word_embeddings = False
        model = build_model(family, config, activation)
    expected, left_out = _expected(model), LeftOut(folder, headers, config, left_out_of(model))
    has = [name for name, tensor in expected.items() if is_stored(name, tensor, headers, prefix)]
    zeros = lacking_biases(model, expected, has)
    names = match_names(
        folder,
        expected={name: tensor for name, tensor in expected.items() if name not in zeros},
        headers=headers,
        prefix=prefix,
        is_ignored=IgnoredTensors(headers, model, left_out),
    )
    if quantized is not None:
        _check_orientation(folder, model, headers, names, quantized)
    weights = FolderWeights(headers, names, quantized, zeros)
    facts = _facts(folder, family, config, activation, model, weights.dtype)
    notes = () if quantized is None else quantized.notes
    warnings = (*config_warnings(family, raw, config), *left_out.lines, *bias_line(folder, zeros), *notes)
    return Checkpoint(raw, family, model, activation, weights, facts, warnings)


def _check_orientation(
    folder: Path, model: nn.Module, headers: Mapping[str, TensorHeader], names: Mapping[str, str],
    quantized: StoredMatrices,
) -> None:  # fmt: skip
    """Refuse quantized matrices of GPT-2, whose rows are inputs: a square shape does not tell."""
    for name, stored in names.items():
        module = model.get_submodule(name.rpartition(".")[0])
        if quantized.is_quantized(headers[stored].name) and type(module).__name__ == "Conv1D":
            raise UnsupportedModelError(
                f"{folder}: {stored} is quantized, which is not read for modules of type Conv1D"
            )


def _open_gguf(file: Path, raw: Mapping[str, Any]) -> Checkpoint:
    """Return what `open_checkpoint` returns, of a GGUF file. Its names, shapes and ties are checked as it is opened.

    `raw` is what the file has in place of a config.json.
    """
    opened = opened_gguf(file)
    family = find_family(raw)
    activation = raw_activation(family, raw)
    config = make_config(family, raw)
    model = build_model(family, config, activation)
    names = match_names(file, _expected(model), opened.tensors, f"{model.base_model_prefix}.")
    weights = GgufWeights(opened, names)
    facts = _facts(file, family, config, activation, model, weights.dtype)
    return Checkpoint(raw, family, model, activation, weights, facts, warnings=opened.notes)


def _check_layers(folder: Path, headers: Mapping[str, TensorHeader], config: Any, family: Family) -> None:
    """Refuse a config of more layers than the checkpoint has: before a million of them are built, not after."""
    if not family.is_known:
        _check_layer_counts(folder, headers, config)
        return
    layers = int(config.num_hidden_layers)
    found = {int(match[1]) for name in headers if (match := _LAYER.search(name))}
    missing = next((layer for layer in range(layers) if layer not in found), layers)
    if missing < layers:
        raise UnsupportedModelError(
            f"{folder}: no tensor of layer {missing}, but config.json asks for {layers} layers (num_hidden_layers)"
        )


def _check_layer_counts(folder: Path, headers: Mapping[str, TensorHeader], config: Any) -> None:
    """Refuse more layers than tensors. Names of layers are known with the model, and an encoder has others."""
    for name in _LAYER_FIELDS:
        layers = getattr(config, name, getattr(text_config(config), name, None))
        if type(layers) is int and layers > max(1, len(headers)):
            raise UnsupportedModelError(
                f"{folder}: config.json asks for {layers} layers ({name}), but there are {len(headers)} tensors"
            )


def _expected(model: nn.Module) -> dict[str, ExpectedTensor]:
    names = first_names(model)
    return {name: ExpectedTensor(tuple(model.get_parameter(name).shape), names[name]) for name in names}


def raw_activation(family: Family, raw: Mapping[str, Any]) -> str | None:
    """Return the dialect's text for the activation of a config.json, or of its family where it says nothing.

    It is None for a family of which only the captured graph shows the activation.
    """
    return activation_text(raw, family, default_activation(family)) if family.is_known else None


def _facts(
    folder: Path, family: Family, config: Any, activation: str | None, model: nn.Module, dtype: str
) -> ModelFacts:
    found, file = config_facts(config), gguf_file(folder)
    # A config of several models may have them in its text's.
    bos, eos = (
        token_ids(vars(config), name, "config.json") or token_ids(vars(text_config(config)), name, "config.json")
        for name in ("bos_token_id", "eos_token_id")
    )
    numbers = {name: value for name, value in vars(found).items() if name != "positions"}
    return ModelFacts(
        name=folder_name(folder) if file is None else model_name(file),
        architecture=type(model).__name__,
        family=family.name,
        **numbers | {"activation": activation or found.activation},
        max_positions=positions_of(found),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        checkpoint_dtype=dtype,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos,
    )
