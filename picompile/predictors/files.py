"""Reading and writing predictor sets: a folder with `predictors.json`, or a bare `predictors.safetensors`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from picompile.errors import UsageError
from picompile.frontend.tensor_file import TensorHeader, headers_of, read_tensor
from picompile.output.files import json_bytes
from picompile.predictors.description import adding_advice, check_order, check_schema, figure, read_object
from picompile.predictors.store import PARTS, LayerPredictor, Predictors, tensor_name
from picompile.synth.writer import CheckpointWriter
from picompile_runtime.artifact.fields import Fields
from picompile_runtime.version import __version__

FORMAT = "picompile-predictors"
SCHEMA = 1
FACTS_FILE = "predictors.json"
WEIGHTS_FILE = "predictors.safetensors"

_DTYPES = ("F16", "BF16", "F32")
_NAME = re.compile(rf"layers\.(0|[1-9][0-9]{{0,3}})\.({'|'.join(PARTS)})")
_FIGURES = ("dense_perplexity", "perplexity", "relative_change", "tokens")
_ADVICE = "train again"


def load_predictors(path: Path | str) -> Predictors:
    """Read the predictors of a folder, or of a bare safetensors file.

    A bare file, which `picompile synth` writes beside its checkpoint, is read as kind `learned`, input `block`,
    threshold 0.

    Raises:
        UsageError: There are no predictors, they are damaged, or hold values that are not finite.
    """
    path = Path(path)
    facts = path / FACTS_FILE
    if facts.is_file():
        with adding_advice(_ADVICE):
            predictors = _described(path, _read_facts(facts))
    elif path.is_file() or (path / WEIGHTS_FILE).is_file():
        predictors = _bare(path, path if path.is_file() else path / WEIGHTS_FILE)
    else:
        raise UsageError(f"{path}: neither {FACTS_FILE} nor {WEIGHTS_FILE} is there; picompile train makes them")
    for name, header in predictors.headers.items():
        if not bool(torch.isfinite(read_tensor(header.file, name, UsageError)).all()):
            raise UsageError(f"{header.file}: {name} holds values that are no numbers; {_ADVICE}")
    return predictors


def _described(folder: Path, facts: Fields) -> Predictors:
    layers = tuple(LayerPredictor.from_json(entry) for entry in facts.objects("layers"))
    check_order(facts, [layer.layer for layer in layers])
    model = facts.object("model")
    accuracy = _accuracy_facts(facts.object("accuracy")) if "accuracy" in facts.data else {}
    curves = facts.data.get("curves", [])
    if not isinstance(curves, list):
        raise facts.wrong("curves", "a list")
    learned = [layer for layer in layers if layer.learned]
    headers = _read_headers(folder / WEIGHTS_FILE) if learned else {}
    for layer in learned:
        _require_parts(folder / WEIGHTS_FILE, headers, layer.layer, layer.rank)
    wanted = {tensor_name(layer.layer, part) for layer in learned for part in PARTS}
    used = {name: header for name, header in headers.items() if name in wanted}
    parameters = model.integer("parameters", 1) if model.data.get("parameters") is not None else None
    described = (_word(model, "fingerprint"), _word(model, "name"), parameters)
    return Predictors(folder, layers, used, *described, accuracy, curves)


def _accuracy_facts(accuracy: Fields) -> Mapping[str, Any]:
    """Return the facts of training's accuracy check unchanged, after a check that its figures are numbers."""
    for key in _FIGURES:
        # NaN and infinity are results of a measurement, too.
        if key in accuracy.data and figure(accuracy, key) is None and not isinstance(accuracy.data[key], float):
            raise accuracy.wrong(key, "a number")
    return accuracy.data


def _word(fields: Fields, key: str) -> str | None:
    """Return a text, or None if it is missing."""
    value = fields.data.get(key)
    if value is not None and not isinstance(value, str):
        raise fields.wrong(key, "a text")
    return value


def _bare(path: Path, file: Path) -> Predictors:
    headers = _read_headers(file)
    layers = []
    for number in sorted({int(match[1]) for name in headers if (match := _NAME.fullmatch(name))}):
        _require_parts(file, headers, number, None)
        fc1, fc2 = (headers[tensor_name(number, part)].shape for part in ("fc1", "fc2"))
        parameters = fc1[0] * fc1[1] + fc2[0] * fc2[1] + fc2[0]
        layers.append(
            LayerPredictor(
                number,
                kind="learned",
                input="block",
                rank=fc1[0],
                threshold=0.0,
                parameters=parameters,
                bytes_f16=2 * parameters,
            )
        )
    if not layers:
        raise UsageError(f"{file}: holds no predictors: no tensor is called layers.N.fc1")
    return Predictors(path, tuple(layers), headers)


def _read_facts(file: Path) -> Fields:
    facts = read_object(file, FORMAT, "the facts of predictors")
    check_schema(file, facts, SCHEMA, _ADVICE)
    return Fields(facts, f"{file}: not the facts of predictors")


def _read_headers(file: Path) -> dict[str, TensorHeader]:
    headers = headers_of(file, "cannot be read as predictors", UsageError)
    return {name: header for name, header in headers.items() if _NAME.fullmatch(name)}


def _require_parts(file: Path, headers: Mapping[str, TensorHeader], layer: int, rank: int | None) -> None:
    """Check the shapes of a layer's three tensors against each other, and against the rank in `predictors.json`."""
    names = [tensor_name(layer, part) for part in PARTS]
    for name in names:
        if name not in headers:
            raise UsageError(f"{file}: holds no tensor {name}")
        if headers[name].dtype not in _DTYPES:
            raise UsageError(f"{file}: {name} is {headers[name].dtype}; only {', '.join(_DTYPES)} are read")
    fc1, fc2, bias = (headers[name].shape for name in names)
    whole = len(fc1) == len(fc2) == 2 and fc1[0] == fc2[1] == (rank or fc1[0]) and bias == fc2[:1] and fc1[0] > 0
    if not whole:
        shapes = ", ".join(f"{part} {list(shape)}" for part, shape in zip(PARTS, (fc1, fc2, bias), strict=True))
        of = "" if rank is None else f" of rank {rank}"
        raise UsageError(f"{file}: layer {layer}: {shapes} do not make a predictor{of}")


def write_predictors(
    folder: Path,
    layers: Sequence[LayerPredictor],
    tensors: Mapping[str, Tensor],
    model: Mapping[str, Any],
    accuracy: Mapping[str, Any] | None = None,
    curves: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the predictors of a model to `folder`. The caller checks that what is there may be replaced.

    Args:
        folder: The output, which need not exist.
        layers: The predictor of each layer.
        tensors: `layers.N.fc1`, `layers.N.fc2` and `layers.N.bias` of every learned layer. They are written as f16, one
            at a time, so that a mapping may make each one on access.
        model: `{"fingerprint", "name"}` and, if known, `"parameters"`, the number of the model's parameters.
        accuracy: Facts of the accuracy check.
        curves: Trade-off curves of the layers.

    Raises:
        KeyError: A tensor is missing; nothing is changed.
        ValueError: A tensor has the wrong shape; nothing is changed.
    """
    layers = sorted(layers, key=lambda layer: layer.layer)
    learned = [layer for layer in layers if layer.learned]
    table = [
        (name, tuple(tensors[name].shape))
        for layer in learned
        for name in (tensor_name(layer.layer, part) for part in PARTS)
    ]
    for layer in learned:
        _check_shapes(layer, dict(table))
    folder.mkdir(exist_ok=True)
    stem = WEIGHTS_FILE.removesuffix(".safetensors")
    # One file, whatever its size: its header is enough to find a tensor, without an index of shards.
    with CheckpointWriter(folder, stem, table, "f16", shard_bytes=1 << 62) as writer:
        for name, _ in table:
            # The writer rounds in place.
            writer.put(name, tensors[name].float().clone())
    facts = {
        "format": FORMAT,
        "schema": SCHEMA,
        "picompile": __version__,
        "model": dict(model),
        "accuracy": dict(accuracy or {}),
        "layers": [asdict(layer) for layer in layers],
        "curves": list(curves),
    }
    (folder / FACTS_FILE).write_bytes(json_bytes(facts))


def _check_shapes(layer: LayerPredictor, shapes: Mapping[str, tuple[int, ...]]) -> None:
    fc1, fc2, bias = (shapes[tensor_name(layer.layer, part)] for part in PARTS)
    if not (len(fc1) == len(fc2) == 2 and fc1[0] == fc2[1] == layer.rank and bias == fc2[:1]):
        raise ValueError(f"layer {layer.layer}: fc1 {fc1}, fc2 {fc2} and bias {bias} make no predictor of {layer.rank}")
