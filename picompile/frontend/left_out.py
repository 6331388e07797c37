"""Tensors that a checkpoint has besides its decoder, and biases that it lacks: transformers warns of both.

transformers loads a checkpoint with tensors too many, or too few, and logs their names. Here only tensors that are
known to be something else than the decoder are left out, with one line that says so. All others are refused, since a
tensor without a place is mostly a part of the model that its config.json does not describe.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from picompile.errors import UnsupportedModelError
from picompile.frontend.checkpoint import ExpectedTensor
from picompile.frontend.families import text_config

# Parts that training and serving add to a decoder, by the names that they have in published checkpoints.
_PARTS: Mapping[str, re.Pattern[str]] = {
    # TRL's models with a value head, reward models, sentence classifiers, BERT's second task.
    "a value or classification head": re.compile(
        r"(^|\.)((v|value|reward|critic|regression|multiple_choice)_head|score|classifier|seq_relationship)\."
    ),
    "a pooler": re.compile(r"(^|\.)pooler\."),
    "heads or layers that guess further tokens": re.compile(
        r"(^|\.)(mtp(_\w+)?|medusa_heads?|eagle(_\w+)?)\.|\.(eh_proj|enorm|hnorm|shared_head)\."
    ),
    # compressed-tensors, ModelOpt and Quark write them for vLLM.
    "scales of a quantized KV cache": re.compile(r"\.([kvq]|kv|prob_output)_scale$"),
}
# The authors of Bamboo and TurboSparse have them in checkpoints, and their code takes neurons by them. fc1 and fc2 are
# the two matrices of each.
_PREDICTORS = "predictors of its authors"
_PREDICTOR = re.compile(r"\.predictor\.fc[12]\.weight$")
_MODULES = "what reads images or sound"
_OTHER = "tensors that transformers leaves out of this class"
_ADAPTER = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|ia3_l)\b")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
# Fields with the number of layers that guess further tokens: they are numbered behind the model's own.
_FURTHER = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")


class LeftOut:
    """The tensors of a checkpoint that are left out, by the part that they are of."""

    def __init__(self, folder: Path, names: Iterable[str], config: Any, modules: Sequence[str] = ()) -> None:
        """`names` are the checkpoint's tensors, as the model calls them, `modules` those that text does not need.

        Raises `UnsupportedModelError` for LoRA.
        """
        self._folder = folder
        self._modules = tuple(f"{variant}." for name in modules for variant in (name, name.removeprefix("model.")))
        self._found: dict[str, list[str]] = {}
        text = text_config(config)
        self._layers = getattr(text, "num_hidden_layers", None)
        self._further = max((_count(text, name) for name in _FURTHER), default=0)
        # DeepSeek's and GLM's layers behind the last one have parts of their own, whatever their config says.
        self._guessing = {
            int(match[1])
            for name in names
            if _PARTS["heads or layers that guess further tokens"].search(name) and (match := _LAYER.search(name))
        }
        if adapter := next((name for name in names if _ADAPTER.search(name)), None):
            raise UnsupportedModelError(
                f"{folder}: holds {adapter}, a part of an adapter (LoRA); merge it into the model: load both with "
                "peft, and save what merge_and_unload returns"
            )

    def take(self, name: str, *, ignored: bool = False) -> bool:
        """Return whether the tensor `name` is left out, and remember it. `ignored` tells that transformers does."""
        part = next((part for part, pattern in _PARTS.items() if pattern.search(name)), None)
        if name.startswith(self._modules):
            part = _MODULES
        if part is None and self._is_further_layer(name):
            part = "heads or layers that guess further tokens"
        if _PREDICTOR.search(name):
            part = _PREDICTORS
        if part is None and ignored:
            part = _OTHER
        if part is not None:
            self._found.setdefault(part, []).append(name)
        return part is not None

    def _is_further_layer(self, name: str) -> bool:
        match = _LAYER.search(name)
        if match is None or type(self._layers) is not int or int(match[1]) < self._layers:
            return False
        return int(match[1]) < self._layers + self._further or int(match[1]) in self._guessing

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines for the user, none where nothing is left out."""
        folder = self._folder.name or self._folder
        parts = [f"{part} ({_named(names)})" for part, names in self._found.items() if part != _PREDICTORS]
        lines = [f"{folder}: left out, as no part of the decoder: {', '.join(parts)}"] if parts else []
        if names := self._found.get(_PREDICTORS):
            lines.append(
                f"{folder}: left out, the predictors by which its authors' code skips neurons ({_named(names)}): every "
                "neuron that fires is computed"
            )
        return tuple(lines)


def lacking_biases(
    model: nn.Module, expected: Mapping[str, ExpectedTensor], has: Iterable[str]
) -> dict[str, tuple[int, ...]]:
    """Return the biases of linear layers that a checkpoint has in no layer, and those beside them in all, with shapes.

    transformers makes them zeros: a config with `attention_bias` gives Llama four biases, and checkpoints that were
    Qwen2's have three. A bias that some layers have is not among them, nor are any where the same module has none: then
    the config may be another model's. `has` are the names of parameters that are there.
    """
    found = {_LAYER.sub(".layers.*.", name) for name in has}
    beside = {_LAYER.sub(".layers.*.", _module(name)) for name in has if name.endswith(".bias")}
    return {
        name: tensor.shape
        for name, tensor in expected.items()
        if name.endswith(".bias")
        and _LAYER.sub(".layers.*.", name) not in found
        and _LAYER.sub(".layers.*.", _module(name)) in beside
        and isinstance(model.get_submodule(name.removesuffix(".bias")), nn.Linear)
    }


def _module(name: str) -> str:
    """Return the module of a linear layer whose bias is `name`: `self_attn` of `self_attn.q_proj.bias`."""
    return name.rsplit(".", 2)[0]


def bias_line(folder: Path, lacking: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the line that says that biases are zeros, none where all are there."""
    if not lacking:
        return ()
    return (
        f"{folder.name or folder}: has no {_named(list(lacking))}, which config.json asks for: these biases are zero",
    )


def _named(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _count(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    return value if type(value) is int else 0
