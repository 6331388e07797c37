"""Predictors on disk: a folder that `picompile train` or `import-predictors` wrote, and how it enters a compilation.

    predictors = load_predictors(Path("predictors"))
    predictors.require_model(fingerprint, block_shapes(graph_module))
    predicted = predictors.insert_pass()(graph_module).graph_module
    runnable = materialize(predicted, predictors.weights(captured.weights))

A folder holds `predictors.json` (one entry a layer: kind, input, rank, threshold, what was measured of it) and
`predictors.safetensors` (`layers.N.fc1` [rank, hidden], `layers.N.fc2` [neurons, rank], `layers.N.bias` [neurons]).
"""

from typing import TYPE_CHECKING

from picompile.lazy import lazy

if TYPE_CHECKING:
    from picompile.predictors.files import load_predictors, save_predictors
    from picompile.predictors.store import (
        INPUTS,
        LEARNED_KINDS,
        BlockShape,
        LayerPredictor,
        OverlayWeights,
        Predictors,
        block_shapes,
    )

__all__ = [
    "INPUTS",
    "LEARNED_KINDS",
    "BlockShape",
    "LayerPredictor",
    "OverlayWeights",
    "Predictors",
    "block_shapes",
    "load_predictors",
    "save_predictors",
]

# Imported on first use: most of it needs torch.
_HOME = {
    "BlockShape": "picompile.predictors.store",
    "INPUTS": "picompile.predictors.store",
    "LEARNED_KINDS": "picompile.predictors.store",
    "LayerPredictor": "picompile.predictors.store",
    "OverlayWeights": "picompile.predictors.store",
    "Predictors": "picompile.predictors.store",
    "block_shapes": "picompile.predictors.store",
    "load_predictors": "picompile.predictors.files",
    "save_predictors": "picompile.predictors.files",
}

__getattr__ = lazy(__name__, _HOME)
