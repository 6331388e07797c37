"""Firing counts that came with imported predictors: `layers/NNN.safetensors` beside predictors.json."""

import numpy as np
from numpy.typing import NDArray

from picompile.errors import UsageError
from picompile.predictors import Predictors
from picompile.profiling.files import read_tensors
from picompile.profiling.profile import layer_file


def imported_counts(predictors: Predictors) -> dict[int, NDArray[np.int64]]:
    """How often each neuron fired `[neurons]`, by layer, where that is known; of how many tokens is not.

    Raises `UsageError` for a damaged file.
    """
    found = {}
    for layer in predictors.layers:
        file = predictors.path / layer_file(layer.layer)
        if file.is_file():
            found[layer.layer] = _counts(predictors, layer.layer)
    return found


def _counts(predictors: Predictors, layer: int) -> NDArray[np.int64]:
    file = predictors.path / layer_file(layer)
    counts = read_tensors(file, only="counts")[0].get("counts")
    if counts is None or counts.ndim != 1 or not len(counts) or counts.is_floating_point() or bool((counts < 0).any()):
        raise UsageError(f"{file}: holds no counts of firings; import the predictors again")
    values: NDArray[np.int64] = counts.long().numpy()
    return values
