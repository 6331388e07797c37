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


class BlockInHalves:
    """Makes an example of a feed-forward block that of a chunk on tensor cores, if `on_tensor_cores` is set."""

    on_tensor_cores = False
    x: NDArray[Any]
    weights: dict[str, NDArray[np.float64]]
    biases: dict[str, NDArray[Any]]

    @property
    def tolerance(self) -> float:
        """For `assert_close`. Of hidden values in float32 a few are rounded to another half than in float64."""
        return 3e-4 if self.on_tensor_cores else 2e-5

    def products(self, name: str) -> NDArray[np.float64]:
        x, weights = self.x.astype(np.float64), self.weights[name]
        if self.on_tensor_cores:
            x, weights = in_halves(x), weights_in_halves(weights)
        return x @ weights.T + self.biases.get(f"{name}_bias", 0)

    def hidden(self) -> NDArray[np.float64]:
        raise NotImplementedError

    def output(self) -> NDArray[np.float64]:
        hidden, down = self.hidden(), self.weights["down"]
        if self.on_tensor_cores:
            hidden, down = in_halves(hidden), weights_in_halves(down)
        return hidden @ down + self.biases.get("down_bias", 0)
