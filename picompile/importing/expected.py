"""What a model asks of its predictors: one for each layer, of the right sizes."""

from collections.abc import Mapping
from pathlib import Path

from picompile.errors import UnsupportedModelError, UsageError
from picompile.json_file import read_json_object

# What config.json calls the layers, the hidden size and the neurons of a block, in the families that there are.
_LAYERS = ("num_hidden_layers", "n_layer")
_HIDDEN = ("hidden_size",)
_NEURONS = ("intermediate_size", "ffn_dim", "ffn_hidden_size")

Shapes = Mapping[int, Mapping[str, tuple[int, ...]]]


def check_by_config(path: Path, shapes: Shapes, model: Path) -> None:
    """Holds predictors against the numbers of `model`'s config.json, so far as it has them.

    The graph has the last word, `check_shapes`; but to capture it takes seconds, and this a moment.
    Raises `UsageError`, in one line.
    """
    try:
        config = read_json_object(model / "config.json")
    except UnsupportedModelError:
        return  # whoever opens the checkpoint says what is wrong with it
    layers, hidden, neurons = (_number(config, names) for names in (_LAYERS, _HIDDEN, _NEURONS))
    blocks = dict.fromkeys(shapes if layers is None else range(layers), (neurons, hidden))
    check_shapes(path, shapes, blocks)


def check_shapes(path: Path, shapes: Shapes, blocks: Mapping[int, tuple[int | None, int | None]]) -> None:
    """Raises `UsageError` unless `shapes` has fc1 [r, hidden] and fc2 [neurons, r] for each of `blocks`.

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
