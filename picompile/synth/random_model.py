"""A checkpoint of random weights for any config that is captured: for mixtures of experts, which no recipe makes.

Tensors have the names and shapes of transformers' own class, and are written one after another, in pieces.

Neurons fire at rates that are asked for as those of `synthesis.py` do, but nothing is calibrated: the embedding carries
a constant direction, which no matrix reads but those that decide about firing, and layers add so little that what they
read is the embedding's distribution still.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from picompile.errors import UnsupportedModelError, UsageError
from picompile.frontend.activation import named_activations
from picompile.frontend.build import build_model
from picompile.frontend.config import make_config
from picompile.frontend.export import first_names
from picompile.frontend.families import find_family
from picompile.output import reserve
from picompile.progress import NoProgress, Progress
from picompile.synth.rates import beta_rates
from picompile.synth.shapes import special_tokens
from picompile.synth.tokens import write_tokenizer
from picompile.synth.writer import (
    CONSTANT,
    SHARD_BYTES,
    CheckpointWriter,
    Table,
    balanced_signs,
    check_disk,
    check_free,
    generator,
    table_bytes,
)
from picompile_passes.dialect.activations import parse_activation

# Deviations: of logits, of what a router makes, and of biases.
_LOGITS = 3.0
_ROUTER = 2.0
_BIAS = 0.05
# Where firing rates are set, layers add this share of what they add elsewhere.
_QUIET = 0.2
# Elements that are drawn at a time.
_PIECE = 1 << 24
# Matrices that write to the residual stream.
_WRITES = ("o_proj", "down_proj", "out_proj")
_CONFIG_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


@dataclass(frozen=True)
class RandomModel:
    """What `write_random_model` wrote; `active` is None where firing was left to chance."""

    shape: str
    parameters: int
    seed: int
    dtype: str
    active: float | None


def write_random_model(
    name: str,
    config: Mapping[str, Any],
    seed: int,
    output: Path,
    dtype: str = "f16",
    active: float | None = None,
    progress: Progress | None = None,
) -> RandomModel:
    """Write a checkpoint of the model that a config.json of these contents describes, with random weights.

    The same arguments give the same bytes. After an error nothing is left behind.

    Args:
        name: What messages call the shape.
        config: The contents of the config.json.
        seed: Seed of all random numbers.
        output: The folder to write; it must not exist, or be empty.
        dtype: f16, bf16 or f32.
        active: The mean share of tokens on which a neuron fires that its expert computes, above 0, at most 1. None
            leaves neurons to chance: half of those with a ReLU fire.
        progress: Receives the steps.

    Raises:
        UsageError: `output` exists, or neurons of this activation are never silent (exit code 2).
        UnsupportedModelError: transformers takes no such config, or its vocabulary is too small (3).
        DoesNotFitError: The disk is too small (5).
    """
    vocabulary = _Vocabulary.of(name, config)
    family = find_family(config)
    made = make_config(family, config)
    model = build_model(family, made, None)
    table = [(tensor, tuple(model.get_parameter(tensor).shape)) for tensor in first_names(model)]
    sizes = made.get_text_config()
    firing = None if active is None else _Firing.of(name, config, seed, table, active, sizes.hidden_size)
    drawing = _Drawing(sizes.hidden_size, sizes.num_hidden_layers, seed, firing)
    check_free(output)
    with reserve(output, overwrite=False, check=lambda: check_free(output)) as place, place.folder() as folder:
        check_disk(output, table_bytes(table, dtype))
        content = json.dumps({**config, "dtype": _CONFIG_DTYPES[dtype]}, indent=2) + "\n"
        (folder / "config.json").write_text(content, encoding="utf-8")
        write_tokenizer(vocabulary, folder)
        parameters = sum(math.prod(shape) for _, shape in table)
        step = (progress or NoProgress()).step(f"Synthesizing {name}", parameters)
        with CheckpointWriter(folder, "model", table, dtype, SHARD_BYTES) as writer, step as advance:
            for tensor, shape in table:
                for rows in drawing.values(tensor, shape):
                    writer.put(tensor, rows)
                    advance(rows.numel())
    return RandomModel(name, parameters, seed, dtype, active)


@dataclass(frozen=True)
class _Vocabulary:
    """What the tokenizer is made of."""

    vocab: int
    positions: int
    specials: tuple[int, ...]
    config: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any]) -> "_Vocabulary":
        vocab, specials = config.get("vocab_size"), special_tokens(name, config)
        if type(vocab) is not int or vocab < 256 + len(specials) or max(specials, default=0) >= vocab:
            raise UnsupportedModelError(
                f"{name}: a vocabulary of {vocab} cannot hold 256 bytes and the special tokens {list(specials)}"
            )
        return cls(vocab, int(config.get("max_position_embeddings", 2048)), specials, config)


@dataclass(frozen=True)
class _Firing:
    """This sets how often neurons fire, at the rate `active` of `write_random_model`.

    `direction` float32 [hidden] is the constant direction, entries ±1; `deciding` is the last part of the names of the
    matrices that decide about firing.
    """

    active: float
    direction: Tensor
    deciding: str

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any], seed: int, table: Table, active: float, hidden: int) -> "_Firing":
        """Raise `UsageError` if neurons of this model are never silent."""
        if not any(text and parse_activation(text).sparse for text in named_activations(config)):
            raise UsageError(f"{name}: its experts have no ReLU, so all their neurons fire; leave --active out")
        leaves = {_leaf(tensor) for tensor, _ in table}
        deciding = next((leaf for leaf in ("gate_up_proj", "gate_proj", "up_proj") if leaf in leaves), None)
        if deciding is None:
            raise UsageError(f"{name}: no matrix of its class is known to decide about firing; leave --active out")
        return cls(active, balanced_signs(seed, "direction", hidden), deciding)

    def set(self, leaf: str, piece: Tensor, numbers: torch.Generator) -> None:
        """Give embeddings the constant direction, and take it from rows that read the stream or offset them by it.

        `piece` [..., rows, columns] is changed in place.
        """
        hidden = len(self.direction)
        if piece.shape[-1] != hidden or leaf in _WRITES:
            return
        piece -= (piece @ self.direction / hidden).unsqueeze(-1) * self.direction
        if "embed" in leaf:
            piece += CONSTANT * self.direction
        elif leaf == self.deciding:
            # The rows of a stack are those of one expert, gates before ups.
            neurons = piece.shape[-2] // (2 if leaf == "gate_up_proj" else 1)
            rates = torch.from_numpy(beta_rates(self.active, neurons)).clamp(1e-12, 1 - 1e-12)
            order = torch.rand(*piece.shape[:-2], neurons, generator=numbers).argsort(-1)
            # A row's product with an embedding has a deviation of 1, and with the stream nearly so.
            offsets = torch.special.ndtri(rates).float()[order] / (CONSTANT * hidden)
            piece[..., :neurons, :] += offsets.unsqueeze(-1) * self.direction


@dataclass(frozen=True)
class _Drawing:
    """This draws the values of each tensor; `firing` is None where it is left to chance."""

    hidden: int
    layers: int
    seed: int
    firing: _Firing | None

    def values(self, name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
        """Yield the rows of a tensor in order, float32: every value of the residual stream stays near 1 in size."""
        numbers = generator(self.seed, name)
        if len(shape) == 1 or name.endswith("bias"):
            # Weights of norms are ones; biases and sinks are small, and differ.
            small = torch.randn(shape, generator=numbers) * _BIAS
            yield small if name.endswith(("bias", "sinks")) else torch.ones(shape)
            return
        bound = self._deviation(_leaf(name), shape) * 3**0.5
        rows = max(1, _PIECE // math.prod(shape[1:]))
        for first in range(0, shape[0], rows):
            piece = torch.empty(min(rows, shape[0] - first), *shape[1:]).uniform_(-bound, bound, generator=numbers)
            if self.firing is not None:
                self.firing.set(_leaf(name), piece, numbers)
            yield piece

    def _deviation(self, leaf: str, shape: tuple[int, ...]) -> float:
        """Return the deviation of a matrix's elements, by what it does with how many inputs."""
        hidden = self.hidden
        if "embed" in leaf:
            return 1.0
        if leaf == "lm_head":
            return _LOGITS / math.sqrt(hidden)
        if leaf in ("gate", "router", "primary_router"):
            return _ROUTER / math.sqrt(hidden)
        writes = leaf in _WRITES
        # A stack has outputs before inputs or, in gpt-oss, behind them.
        other = next((size for size in shape[-2:] if size != hidden), hidden)
        inputs = shape[-1] if len(shape) == 2 else other if writes else hidden
        if not writes:
            return 1 / math.sqrt(inputs)
        quiet = 1.0 if self.firing is None else _QUIET
        return quiet / math.sqrt(inputs * 2 * self.layers)


def _leaf(name: str) -> str:
    return next(part for part in reversed(name.split(".")) if part != "weight")
