"""Writing predictors: the folder appears whole, or not at all."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from picompile.predictors.layer import PARTS, LayerPredictor, tensor_name
from picompile.predictors.load import FACTS_FILE, FORMAT, SCHEMA, WEIGHTS_FILE


def save_predictors(
    folder: Path,
    layers: Sequence[LayerPredictor],
    tensors: Mapping[str, Tensor],
    model: Mapping[str, Any],
    gate: Mapping[str, Any] | None = None,
    curves: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Writes the predictors of a model to `folder`, in place of what may be there.

    `tensors` holds `layers.N.fc1`, `layers.N.fc2` and `layers.N.bias` of every learned layer; they are written as f16,
    one at a time, so a mapping that makes them when asked needs no more memory. `model` is `{"fingerprint", "name"}`
    and, where that is known, `"parameters"`, how many the model has.

    Whether the place may be written is the caller's to check. Raises `KeyError` for a tensor that is missing and
    `ValueError` for one of the wrong shape; then nothing is changed.
    """
    from picompile.output import replacing

    with replacing(folder) as place:
        write_predictors(place, layers, tensors, model, gate, curves)


def write_predictors(
    folder: Path,
    layers: Sequence[LayerPredictor],
    tensors: Mapping[str, Tensor],
    model: Mapping[str, Any],
    gate: Mapping[str, Any] | None = None,
    curves: Sequence[Mapping[str, Any]] = (),
) -> None:
    """As `save_predictors`, into a folder that is there; no more than that."""
    import picompile
    from picompile.artifact_writer import write_json
    from picompile.synth.writer import CheckpointWriter

    layers = sorted(layers, key=lambda layer: layer.layer)
    learned = [layer for layer in layers if layer.learned]
    table = [
        (name, tuple(tensors[name].shape))
        for layer in learned
        for name in (tensor_name(layer.layer, part) for part in PARTS)
    ]
    for layer in learned:
        _check_shapes(layer, dict(table))
    stem = WEIGHTS_FILE.removesuffix(".safetensors")
    # One file, whatever its size: a header says more than an index of shards would.
    with CheckpointWriter(folder, stem, table, "f16", shard_bytes=1 << 62) as writer:
        for name, _ in table:
            # The writer rounds in place.
            writer.put(name, tensors[name].float().clone())
    write_json(
        folder / FACTS_FILE,
        {
            "format": FORMAT,
            "schema": SCHEMA,
            "picompile": picompile.__version__,
            "model": dict(model),
            "gate": dict(gate or {}),
            "layers": [layer.to_json() for layer in layers],
            "curves": list(curves),
        },
    )


def _check_shapes(layer: LayerPredictor, shapes: Mapping[str, tuple[int, ...]]) -> None:
    fc1, fc2, bias = (shapes[tensor_name(layer.layer, part)] for part in PARTS)
    if not (len(fc1) == len(fc2) == 2 and fc1[0] == fc2[1] == layer.rank and bias == fc2[:1]):
        raise ValueError(f"layer {layer.layer}: fc1 {fc1}, fc2 {fc2} and bias {bias} make no predictor of {layer.rank}")
