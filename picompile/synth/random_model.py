"""A checkpoint of random weights for any config that is captured: for mixtures of experts, which no recipe makes.

Tensors have the names and shapes of transformers' own class, and are written one after another, in pieces.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from picompile.errors import UnsupportedModelError
from picompile.frontend.build import build_model
from picompile.frontend.config import make_config
from picompile.frontend.export import first_names
from picompile.frontend.families import find_family
from picompile.output import reserve
from picompile.progress import NoProgress, Progress
from picompile.synth.shapes import special_tokens
from picompile.synth.tokens import write_tokenizer
from picompile.synth.writer import SHARD_BYTES, CheckpointWriter, check_disk, check_free, generator, table_bytes

# Deviations: of logits, of what a router makes, and of biases.
_LOGITS = 3.0
_ROUTER = 2.0
_BIAS = 0.05
# Elements that are drawn at a time.
_PIECE = 1 << 24
_CONFIG_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


@dataclass(frozen=True)
class RandomModel:
    """What was written: the shape's name, its parameters, and the seed and element type that were asked for."""

    shape: str
    parameters: int
    seed: int
    dtype: str


def write_random_model(
    name: str, config: Mapping[str, Any], seed: int, output: Path, dtype: str = "f16", progress: Progress | None = None
) -> RandomModel:
    """Write a checkpoint of the model that a config.json of these contents describes, with random weights.

    The same arguments give the same bytes. After an error nothing is left behind.

    Raises:
        UsageError: `output` exists (exit code 2).
        UnsupportedModelError: transformers takes no such config, or its vocabulary is too small (3).
        DoesNotFitError: The disk is too small (5).
    """
    vocabulary = _Vocabulary.of(name, config)
    table = list(_table(config))
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
                for rows in _values(tensor, shape, config, seed):
                    writer.put(tensor, rows)
                    advance(rows.numel())
    return RandomModel(name, parameters, seed, dtype)


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


def _table(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every parameter of the model's class, in its order."""
    family = find_family(config)
    model = build_model(family, make_config(family, config), None)
    for name in first_names(model):
        yield name, tuple(model.get_parameter(name).shape)


def _values(name: str, shape: tuple[int, ...], config: Mapping[str, Any], seed: int) -> Iterator[Tensor]:
    """Yield the rows of a tensor in order, float32: every value of the residual stream stays near 1 in size."""
    numbers = generator(seed, name)
    if len(shape) == 1 or name.endswith("bias"):
        # Of a vector, norms are ones; biases and sinks are small, and unlike.
        small = torch.randn(shape, generator=numbers) * _BIAS
        yield small if name.endswith(("bias", "sinks")) else torch.ones(shape)
        return
    bound = _deviation(name, shape, config) * 3**0.5
    rows = max(1, _PIECE // math.prod(shape[1:]))
    for first in range(0, shape[0], rows):
        piece = (min(rows, shape[0] - first), *shape[1:])
        yield torch.empty(piece).uniform_(-bound, bound, generator=numbers)


def _deviation(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> float:
    """Return the deviation of a matrix's elements, by what it does with how many inputs."""
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    leaf = next(part for part in reversed(name.split(".")) if part != "weight")
    if "embed" in leaf:
        return 1.0
    if leaf == "lm_head":
        return _LOGITS / math.sqrt(hidden)
    if leaf in ("gate", "router"):
        return _ROUTER / math.sqrt(hidden)
    writes = leaf in ("o_proj", "down_proj", "out_proj")
    # A stack has outputs before inputs or, in gpt-oss, behind them.
    inputs = next((size for size in shape[-2:] if size != hidden), hidden) if writes and len(shape) == 3 else shape[-1]
    if len(shape) == 3 and not writes:
        inputs = hidden
    return 1 / math.sqrt(inputs * (2 * layers if writes else 1))
