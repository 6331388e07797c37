"""Import of PowerInfer's predictors: from a source to a predictor set that fits the model."""

import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.fx import GraphModule

from picompile.errors import UnsupportedModelError, UsageError
from picompile.frontend.activation import check_activation
from picompile.frontend.checkpoint import fingerprint
from picompile.frontend.gguf.blocks import read_tensor
from picompile.frontend.gguf.header import TensorEntry
from picompile.frontend.hf import load_model
from picompile.frontend.model_file import read_config
from picompile.frontend.tensor_file import read_tensor as read_stored
from picompile.output import OutputPath, reserve
from picompile.predictors.files import write_predictors
from picompile.predictors.powerinfer.guard import read_guarded
from picompile.predictors.powerinfer.sources import PARTS, PredictorSource
from picompile.predictors.profile.profile import layer_file
from picompile.predictors.store import LayerPredictor, TensorsOnAccess, block_shapes, tensor_name
from picompile.progress import NoProgress, Progress
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import FFN, stream_of
from picompile_passes.passes.canonicalize import canonicalize

# The names that the model families have in config.json for the layers, the hidden size and the neurons of a block.
_LAYERS = ("num_hidden_layers", "n_layer")
_HIDDEN = ("hidden_size",)
_NEURONS = ("intermediate_size", "ffn_dim", "ffn_hidden_size")

Shapes = Mapping[int, Mapping[str, tuple[int, ...]]]


def check_by_config(path: Path, shapes: Shapes, model: Path) -> None:
    """Raise `UsageError` if the predictors do not fit the sizes in `model`'s config.json, as far as it has them.

    The final check is `check_shapes` against the graph; but capturing that takes seconds, and this check takes none.
    """
    try:
        config = read_config(model)
    except UnsupportedModelError:
        return  # whoever opens the checkpoint says what is wrong with it
    layers, hidden, neurons = (_number(config, names) for names in (_LAYERS, _HIDDEN, _NEURONS))
    blocks = dict.fromkeys(shapes if layers is None else range(layers), (neurons, hidden))
    check_shapes(path, shapes, blocks)


def check_shapes(path: Path, shapes: Shapes, blocks: Mapping[int, tuple[int | None, int | None]]) -> None:
    """Raise `UsageError` unless `shapes` has fc1 [r, hidden] and fc2 [neurons, r] for each of `blocks`.

    `blocks`: layer → its neurons and hidden size; None stands for a number that is not known.
    """
    for layer in sorted({*shapes, *blocks}):
        if layer not in blocks:
            raise UsageError(f"{path}: a predictor for layer {layer}, but the model has {len(blocks)} layers")
        parts = shapes.get(layer, {})
        for part in ("fc1", "fc2"):
            if part not in parts:
                raise UsageError(f"{path}: {part} of layer {layer} is missing; the model has {len(blocks)} layers")
        _check_layer(path, layer, parts, *blocks[layer])


def _check_layer(
    path: Path, layer: int, parts: Mapping[str, tuple[int, ...]], neurons: int | None, hidden: int | None
) -> None:
    fc1, fc2 = parts["fc1"], parts["fc2"]
    for part, shape in parts.items():
        if len(shape) != 2:
            raise UsageError(f"{path}: {part} of layer {layer} is {list(shape)}, not a matrix")
    if fc1[0] != fc2[1] or (hidden or fc1[1]) != fc1[1] or (neurons or fc2[0]) != fc2[0]:
        needed = f"[r, {hidden or 'hidden'}] and [{neurons or 'neurons'}, r]"
        raise UsageError(
            f"{path}: fc1 and fc2 of layer {layer} are {list(fc1)} and {list(fc2)}, but the model needs {needed}"
        )


def _number(config: object, names: tuple[str, ...]) -> int | None:
    values = [config.get(name) for name in names] if isinstance(config, dict) else []
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 < v < 1 << 20), None)


# The smallest step of f16 at zero.
_SMALLEST_STEP = 2.0**-24


@dataclass(frozen=True)
class Imported:
    """The result of an import: the predictors of each layer, and how many layers have counts."""

    layers: tuple[LayerPredictor, ...]
    counted_layers: int

    @property
    def parameters(self) -> int:
        """The number of parameters of all predictors together."""
        return sum(layer.parameters for layer in self.layers)


def import_predictors(
    source: PredictorSource,
    model: Path,
    output: Path,
    progress: Progress | None = None,
    *,
    overwrite: bool = True,
    activation: str | None = None,
) -> Imported:
    """Write the predictors of `source`, which are for `model`, to the folder `output`, and return what was written.

    An existing folder is replaced; without `overwrite`, only an empty one. `activation` is that of `model`, as
    `load_model` takes it.

    They become kind `learned-relu` with input `stream`. Activation statistics become `layers/NNN.safetensors` with
    `counts` int64 [F], as a profile has them. Raises `UsageError` for files that are refused or are predictors of
    another model, `UnsupportedModelError` for the model, `DoesNotFitError` for a full disk; then nothing is written.
    """
    progress = progress or NoProgress()
    check_activation(activation)
    _require_utf8(output)
    if source.header is not None:
        check_by_config(source.path, source.shapes, model)
    with reserve(output, overwrite=overwrite) as place, place.scratch() as folder:
        with progress.step("read"):
            shapes, counts, tensors = read_predictors(source, folder)
            check_by_config(source.path, shapes, model)
        with progress.step("check"):
            fingerprint = _check_model(source.path, shapes, counts, model, activation)
        layers = _layers(shapes, computes_above(source.threshold))
        with progress.step("write"):
            described = {"fingerprint": fingerprint, "name": model.name}
            _write(place, layers, tensors, counts, model=described)
    return Imported(layers, len(counts))


def _require_utf8(output: Path) -> None:
    try:
        str(output.absolute()).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{output}: not a name in UTF-8, the only ones that safetensors files can have") from error


def computes_above(threshold: float) -> float:
    """Return the number t for which logit > t holds exactly when logit ≥ `threshold`.

    PowerInfer leaves a neuron out if its logit is *below* the threshold. At 0 the
    difference matters: if relu(fc1·x) is zero, all logits are zero, and every neuron is computed. For a threshold of 0
    the result is a step that f16 has too.
    """
    below = float(np.nextafter(np.float32(threshold), np.float32(-math.inf)))
    return min(below, -_SMALLEST_STEP) if threshold == 0 else below


def read_predictors(source: PredictorSource, folder: Path) -> tuple[Shapes, dict[int, Tensor], Mapping[str, Tensor]]:
    """Return the shapes of predictors by layer and part, the counts by layer, and the tensors by name, read on access.

    Another process reads what is pickled, and hands it over by way of `folder`. Raises as `import_predictors` does; for
    values that are no numbers on access.
    """
    shapes: Shapes = source.shapes
    counts: dict[int, Tensor] = {}
    reads: dict[str, Callable[[], Tensor]] = {}
    if source.files or source.activations:
        file = read_guarded(source, folder)
        handed_back, counts = _handed_back(file)
        shapes = shapes or handed_back
        names = [tensor_name(layer, part) for layer in shapes for part in PARTS]
        reads = {name: partial(read_stored, file, name, UsageError) for name in names}
    if source.header is not None:
        with source.header.file.open("rb") as opened:
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        reads = {
            tensor_name(layer, part): partial(_unpack, source.path, data, entry)
            for layer, parts in source.tensors.items()
            for part, entry in parts.items()
        }
    for layer, parts in shapes.items():
        neurons = parts["fc2"][0] if "fc2" in parts else 0
        reads[tensor_name(layer, "bias")] = partial(torch.zeros, neurons, dtype=torch.float16)
    return shapes, counts, TensorsOnAccess(reads)


def _unpack(path: Path, data: mmap.mmap, entry: TensorEntry) -> Tensor:
    values = read_tensor(data, entry).half()
    if not bool(values.isfinite().all()):
        raise UsageError(f"{path}: {entry.name} holds values that are no numbers, or too large for f16")
    return values


def _handed_back(file: Path) -> tuple[Shapes, dict[int, Tensor]]:
    """Return the shapes of the predictors by layer and part, and the counts by layer."""
    shapes: dict[int, dict[str, tuple[int, ...]]] = {}
    counts: dict[int, Tensor] = {}
    with safe_open(str(file), framework="pt") as handle:
        for name in handle.keys():  # noqa: SIM118 (a handle is no mapping)
            _, layer, part = name.split(".")
            if part in PARTS:
                shapes.setdefault(int(layer), {})[part] = tuple(handle.get_slice(name).get_shape())
            else:
                counts[int(layer)] = handle.get_tensor(name).clone()
    return shapes, counts


def _check_model(path: Path, shapes: Shapes, counts: Mapping[int, Tensor], model: Path, activation: str | None) -> str:
    """Check everything against the model's graph; return the model's fingerprint."""

    graph_module = canonicalize(load_model(model, activation).graph_module)
    blocks = block_shapes(graph_module)
    check_shapes(path, shapes, {layer: (block.neurons, block.hidden) for layer, block in blocks.items()})
    _check_norms(path, graph_module)
    if counts and (odd := sorted(set(counts) ^ set(blocks))):
        what = "a layer that the model has not" if odd[0] in counts else "missing, and others are there"
        raise UsageError(f"{path}: activation_{odd[0]}.pt is {what}; the model has {len(blocks)} layers")
    for layer, values in counts.items():
        if len(values) != blocks[layer].neurons:
            raise UsageError(
                f"{path}: activation_{layer}.pt has {len(values)} neurons; the model's have {blocks[layer].neurons}"
            )
    return fingerprint(model, activation)


def _check_norms(path: Path, graph_module: GraphModule) -> None:
    """Raise if a block has no norm before it, and so no input for PowerInfer's predictors."""

    for block in calls(graph_module.graph, FFN):
        if stream_of(arguments(block)["x"]) is None:
            raise UsageError(
                f"{path}: PowerInfer's predictors read what the norm before a block reads; {block.name} has none"
            )


def _layers(shapes: Shapes, threshold: float) -> tuple[LayerPredictor, ...]:
    layers = []
    for layer, parts in sorted(shapes.items()):
        (rank, hidden), (neurons, _) = parts["fc1"], parts["fc2"]
        parameters = rank * hidden + neurons * rank + neurons
        layers.append(
            LayerPredictor(
                layer,
                kind="learned-relu",
                input="stream",
                rank=rank,
                threshold=threshold,
                parameters=parameters,
                bytes_f16=2 * parameters,
            )
        )
    return tuple(layers)


def _write(
    place: OutputPath,
    layers: tuple[LayerPredictor, ...],
    tensors: Mapping[str, Tensor],
    counts: Mapping[int, Tensor],
    model: Mapping[str, Any],
) -> None:

    with place.folder() as folder:
        write_predictors(folder, layers, tensors, model)
        for layer, values in counts.items():
            file = folder / layer_file(layer)
            file.parent.mkdir(exist_ok=True)
            save_file({"counts": values}, file)
