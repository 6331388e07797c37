"""Activations and weights rounded to halves, as kernels that multiply on tensor cores see them, in float64."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def in_halves(x: NDArray[Any]) -> NDArray[np.float64]:
    """Rows of activations, each rounded with the power of two that brings its largest to between 2^14 and 2^15."""
    values = x.astype(np.float64)
    largest = np.abs(values).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        power = np.where(np.isfinite(largest) & (largest > 0), 2.0 ** (14 - np.floor(np.log2(largest))), 1.0)
        return (values * power).astype(np.float16).astype(np.float64) / power


def weights_in_halves(weights: NDArray[Any]) -> NDArray[np.float64]:
    """A matrix, each weight rounded."""
    return weights.astype(np.float16).astype(np.float64)
