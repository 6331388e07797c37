"""The synthesis of a checkpoint: from a shape and a firing rate to a Hugging Face folder."""

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from picompile.errors import UsageError
from picompile.output import reserve
from picompile.progress import NoProgress, Progress
from picompile.synth.network import SynthesizedFiring, make_network
from picompile.synth.rates import beta_rates
from picompile.synth.shapes import ModelShape, tensor_shapes
from picompile.synth.tokens import write_tokenizer
from picompile.synth.writer import (
    DTYPES,
    SHARD_BYTES,
    CheckpointWriter,
    Recipe,
    Table,
    balanced_signs,
    check_disk,
    check_free,
    random_subspace,
    table_bytes,
)

_CONFIG_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


@dataclass(frozen=True)
class Synthesis:
    """The request, and measurements on tokens that were not used for calibration."""

    shape: str
    active: float
    seed: int
    dtype: str
    rank: int
    parameters: int
    predictor_share: float
    measured_active: float
    layers: tuple[SynthesizedFiring, ...]


def synthesize(
    shape: ModelShape,
    active: float,
    seed: int,
    output: Path,
    dtype: str = "f16",
    progress: Progress | None = None,
    rank: int | None = None,
) -> Synthesis:
    """Write a checkpoint whose FFN neurons fire at a given rate, and return its measurements.

    The same arguments give the same bytes on the same machine with the same number of threads. After an error nothing
    is left behind.

    Args:
        shape: The model's shape.
        active: The mean share of tokens on which a neuron fires, 0 < active ≤ 1.
        seed: Seed of all random numbers.
        output: The folder to write; it must not exist, or be empty.
        dtype: f16, bf16 or f32.
        progress: Receives the steps.
        rank: The rank of the predictors; None chooses it by the shape.

    Raises:
        UsageError: The arguments make no checkpoint, or `output` exists (exit code 2).
        DoesNotFitError: The disk is too small (exit code 5).
    """
    _check_arguments(shape, active, dtype, rank)
    rank = rank or predictor_rank(shape)
    weights, predictors = list(tensor_shapes(shape)), _predictor_table(shape, rank)
    needed = table_bytes(weights, dtype), table_bytes(predictors, dtype)
    check_free(output)
    with reserve(output, overwrite=False, check=lambda: check_free(output)) as place, place.folder() as folder:
        check_disk(output, sum(needed))
        _write_json(folder / "config.json", {**shape.config, "dtype": _CONFIG_DTYPES[dtype]})
        write_tokenizer(shape, folder)
        writer = partial(CheckpointWriter, folder, dtype=dtype)
        # Predictors are one file, whatever their size.
        with (
            writer("model", table=weights, shard_bytes=SHARD_BYTES) as weight_writer,
            writer("predictors", table=predictors, shard_bytes=needed[1] + 1) as predictor_writer,
        ):
            recipe = _recipe(shape, active, seed, rank, weights=weight_writer, predictors=predictor_writer)
            title = f"Synthesizing {shape.name}"
            with torch.inference_mode(), (progress or NoProgress()).step(title, shape.layers + 2) as advance:
                layers = make_network(recipe, advance)
        result = Synthesis(
            shape=shape.name,
            active=active,
            seed=seed,
            dtype=dtype,
            rank=rank,
            parameters=needed[0] // DTYPES[dtype].itemsize,
            predictor_share=needed[1] / needed[0],
            measured_active=sum(layer.rate for layer in layers) / len(layers),
            layers=tuple(layers),
        )
        _write_json(folder / "synth.json", asdict(result))
    return result


def predictor_rank(shape: ModelShape) -> int:
    """Return the rank of a shape's predictors: an eighth of the hidden size, at least 32, at most half of it.

    From a hidden size of 1024 on this keeps the predictors below 6 % of the parameters.
    """
    return max(2, min(shape.hidden // 2, max(shape.hidden // 8, 32)))


def _recipe(
    shape: ModelShape, active: float, seed: int, rank: int, weights: CheckpointWriter, predictors: CheckpointWriter
) -> Recipe:
    direction, signs = (balanced_signs(seed, name, shape.hidden) for name in ("direction", "signs"))
    # If offsets are not biases, the constant direction is one of the predictors' rows.
    directions = rank if shape.ffn_bias else rank - 1
    return Recipe(
        shape=shape,
        seed=seed,
        rank=rank,
        rates=torch.from_numpy(beta_rates(active, shape.ffn)),
        direction=direction,
        signs=signs,
        subspace=random_subspace(seed, directions, torch.stack([direction, direction * signs])),
        weights=weights,
        predictors=predictors,
    )


def _check_arguments(shape: ModelShape, active: float, dtype: str, rank: int | None) -> None:
    if not 0 < active <= 1:
        raise UsageError(f"the share of active neurons must be above 0 and at most 1, not {active}")
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    if rank is not None and not 2 <= rank <= shape.hidden // 2:
        raise UsageError(f"the predictors' rank must be from 2 to {shape.hidden // 2} for {shape.name}, not {rank}")


def _predictor_table(shape: ModelShape, rank: int) -> Table:
    return [
        entry
        for layer in range(shape.layers)
        for entry in (
            (f"layers.{layer}.fc1", (rank, shape.hidden)),
            (f"layers.{layer}.fc2", (shape.ffn, rank)),
            (f"layers.{layer}.bias", (shape.ffn,)),
        )
    ]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
