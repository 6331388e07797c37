"""What firing counts say of a layer, or of a whole model: shares, as the report draws them. numpy only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64] | NDArray[np.float64]


@dataclass(frozen=True)
class Firing:
    """How the neurons of a layer or a model fire.

    `firing_share` of the neurons fire for a token; the share `neurons_for_80_percent` of them makes 80 % of the
    firings; the most active fifth makes the share `skewness`; `never_fired` counts those that fired for no token. Where
    nothing fired, there are no firings to have a share of: both are None.
    """

    neurons: int
    firing_share: float
    neurons_for_80_percent: float | None
    skewness: float | None
    never_fired: int


def firing_curve(counts: Counts) -> NDArray[np.float64]:
    """The share of all firings that the most active neurons make, for 0, 1, 2, … of them. `[n] → [n + 1]`

    Takes contributions as well as counts. All zero where nothing fired.
    """
    ordered = np.sort(np.asarray(counts, np.float64).ravel())[::-1]
    curve = np.concatenate([np.zeros(1), ordered.cumsum()])
    return curve / curve[-1] if curve[-1] > 0 else curve


def share_for(curve: NDArray[np.float64], firings: float) -> float | None:
    """The smallest share of the neurons that makes this share of the firings; None where nothing fired."""
    return int((curve < firings).sum()) / (len(curve) - 1) if curve[-1] > 0 else None


def summarize(layers: Sequence[Counts], tokens: int) -> Firing:
    """The figures of some layers taken together, from each neuron's firings among `tokens`."""
    counts = np.concatenate([np.asarray(layer).ravel() for layer in layers])
    curve = firing_curve(counts)
    fifth = max(1, round(len(counts) / 5))
    return Firing(
        neurons=len(counts),
        firing_share=float(counts.mean()) / tokens,
        neurons_for_80_percent=share_for(curve, 0.8),
        skewness=float(curve[fifth]) if curve[-1] > 0 else None,
        never_fired=int((counts == 0).sum()),
    )


def sampled(curve: NDArray[np.float64], points: int = 160) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A curve as x and y in percent, at so many places that a picture needs; denser at its steep beginning."""
    last = len(curve) - 1
    places = np.unique(np.rint(last * np.linspace(0, 1, min(points, last + 1)) ** 2).astype(int))
    return 100 * places / last, 100 * curve[places]
