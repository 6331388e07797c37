"""How often the neurons of a layer fire, in the order that placement wants: the most firing first."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class LayerFiring:
    """One layer's neurons, sorted by how often they are computed.

    `shares` float64 [neurons], from 0 to 1, descending: on which share of the tokens each is computed. `order` int64
    [neurons]: the number that each has in the model; None for a curve that is no model's.
    """

    shares: NDArray[np.float64]
    order: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Firing:
    """All layers of a model, and where the figures are from: a profile's folder, or the name of a curve."""

    layers: tuple[LayerFiring, ...]
    source: str
