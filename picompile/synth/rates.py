"""Firing rates of neurons, which follow a Beta distribution. Needs only numpy; plans from curves use these rates too.

Trained models have similar distributions: a few hot neurons make most of the firings.
"""

import numpy as np
from numpy.typing import NDArray

# Beta's first parameter. A third of the neurons then makes 80 % of the firings: between what the PowerInfer paper
# reports per layer for OPT-30B (26 %) and for ReGLU-70B (43 %).
SKEW = 0.5
_GRID = 1 << 16


def beta_rates(active: float, neurons: int, skew: float = SKEW) -> NDArray[np.float64]:
    """Return the firing rates of `neurons` neurons, ascending: quantiles of a Beta distribution with mean `active`.

    float64 [neurons]. The less `skew`, Beta's first parameter (the second above a half), the more of the firings a few
    neurons make. Nothing is drawn: the i-th rate is the mean of the i-th slice of the distribution.
    """
    if active == 1:
        return np.ones(neurons)
    if active > 0.5:
        return np.flip(1 - beta_rates(1 - active, neurons, skew)).copy()
    # With x = sin²θ the density of Beta(a, b) is 2·sin(θ)^(2a-1)·cos(θ)^(2b-1), without a pole where a = 1/2.
    a, b = skew, skew * (1 - active) / active
    angle = (np.arange(_GRID) + 0.5) * (np.pi / 2 / _GRID)
    # For rare firing the mass lies near θ = 0; a quadratic grid puts the points there.
    angle = angle**2 / (np.pi / 2)
    density = np.sqrt(angle) * np.exp((2 * a - 1) * np.log(np.sin(angle)) + (2 * b - 1) * np.log(np.cos(angle)))
    cumulative = density.cumsum() / density.sum()
    middles = (np.arange(neurons) + 0.5) / neurons
    rates = np.interp(middles, cumulative, np.sin(angle) ** 2)
    scaled: NDArray[np.float64] = np.minimum(rates * (active / rates.mean()), 1.0)
    return scaled


def share_of_firings(rates: NDArray[np.float64], share: float = 0.8) -> float:
    """Return the smallest share of the neurons that makes `share` of all firings. rates [neurons], of any scale."""
    ordered = np.sort(rates)[::-1]
    reached = ordered.cumsum() < share * ordered.sum()
    return (int(reached.sum()) + 1) / len(ordered)
