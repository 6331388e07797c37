"""A profile as the report needs it: the firings of each neuron, without the samples."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from picompile.report.firing import Firing, summarize

if TYPE_CHECKING:
    from picompile.profiling import LayerProfile, Profile


@dataclass(frozen=True)
class LayerFiring:
    """One layer: how often each neuron fired `[neurons]`, and what its firings contributed `[neurons]`.

    A neuron fires where the magnitude of what it sends to the down matrix is above `threshold`.
    """

    layer: int
    threshold: float
    counts: NDArray[np.int64]
    contribution: NDArray[np.float64]


@dataclass(frozen=True)
class FiringProfile:
    """The firings of all layers of the profile `of`."""

    of: "Profile"
    layers: tuple[LayerFiring, ...]

    @property
    def path(self) -> Path:
        """The profile's folder."""
        return self.of.folder

    def figures(self) -> dict[int, Firing]:
        """The figures of each layer."""
        return {layer.layer: summarize([layer.counts], self.of.tokens) for layer in self.layers}

    def model_figures(self) -> Firing:
        """The figures of the whole model."""
        return summarize([layer.counts for layer in self.layers], self.of.tokens)


def read_profile(folder: Path) -> FiringProfile:
    """Reads a folder that `picompile profile` wrote. Raises `UsageError` for one that is not whole."""
    from picompile.profiling import load_profile

    profile = load_profile(folder)
    return FiringProfile(profile, tuple(_layer(profile, layer) for layer in profile.layers))


def _layer(profile: "Profile", layer: "LayerProfile") -> LayerFiring:
    counts, contribution = profile.counts(layer.layer).numpy(), profile.contribution(layer.layer).double().numpy()
    return LayerFiring(layer.layer, layer.threshold, counts, contribution)
