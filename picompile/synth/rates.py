"""How often each neuron fires, and the offset that makes it do so.

Rates follow a Beta distribution, as hot and cold neurons of trained models do: a few neurons make most of the firings.
"""

import torch
from torch import Tensor

# Beta's first parameter. A third of the neurons then makes 80 % of the firings: between what the PowerInfer paper
# reports per layer for OPT-30B (26 %) and for ReGLU-70B (43 %).
SKEW = 0.5
_GRID = 1 << 16
# Pooled samples that make a layer's quantile function; enough for tails of one in 100,000.
_POOL = 1 << 20


def beta_rates(active: float, neurons: int, skew: float = SKEW) -> Tensor:
    """Firing rates of `neurons` neurons, ascending: quantiles of a Beta distribution, their mean exactly `active`.

    float64 [neurons]. The less `skew`, Beta's first parameter (the second above a half), the more of the firings a few
    neurons make. Nothing is drawn: the i-th rate is the mean of the i-th slice of the distribution.
    """
    if active == 1:
        return torch.ones(neurons, dtype=torch.float64)
    if active > 0.5:
        return (1 - beta_rates(1 - active, neurons, skew)).flip(0)
    # With x = sin²θ the density of Beta(a, b) is 2·sin(θ)^(2a-1)·cos(θ)^(2b-1), without a pole where a = 1/2.
    a, b = skew, skew * (1 - active) / active
    angle = (torch.arange(_GRID, dtype=torch.float64) + 0.5) * (torch.pi / 2 / _GRID)
    # For rare firing the mass lies near θ = 0; a quadratic grid puts the points there.
    angle = angle**2 / (torch.pi / 2)
    density = angle.sqrt() * torch.exp((2 * a - 1) * angle.sin().log() + (2 * b - 1) * angle.cos().log())
    cumulative = density.cumsum(0) / density.sum()
    middles = (torch.arange(neurons, dtype=torch.float64) + 0.5) / neurons
    rates = interpolate(middles, cumulative, angle.sin() ** 2)
    return (rates * (active / rates.mean())).clamp(max=1.0)


def firing_offsets(levels: Tensor, rates: Tensor) -> Tensor:
    """The offset t of each neuron with which it fires at its rate, given that it fires on a token where t > level.

    levels float32 [tokens, neurons], all neurons with one distribution; rates [neurons] → float64 [neurons]. One
    quantile function is read from all levels together: thousands of neurons tell about tails that the tokens of one
    neuron don't reach, and none of them is fitted to the few tokens it has seen. Beyond the pool it is continued as a
    normal distribution.
    """
    pool = levels.flatten()
    ordered = pool[:: max(1, len(pool) // _POOL)].sort().values.to(torch.float64)
    edge = min(4.5, float(torch.special.ndtri(torch.tensor(1 - 4 / len(ordered), dtype=torch.float64))))
    scores = torch.linspace(-edge, edge, 513, dtype=torch.float64)
    position = torch.special.ndtr(scores) * (len(ordered) + 1) - 1
    quantiles = interpolate(position, torch.arange(len(ordered), dtype=torch.float64), ordered)
    wanted = torch.special.ndtri(rates.to(torch.float64).clamp(1e-12, 1 - 1e-12))
    beyond = (wanted - wanted.clamp(-edge, edge)) * ordered.std()
    offsets: Tensor = interpolate(wanted, scores, quantiles) + beyond
    return offsets


def share_of_firings(rates: Tensor, share: float = 0.8) -> float:
    """The smallest share of the neurons that makes `share` of all firings. rates [neurons], of any scale."""
    ordered = rates.to(torch.float64).sort(descending=True).values
    reached = ordered.cumsum(0) < share * ordered.sum()
    return (int(reached.sum()) + 1) / len(ordered)


def interpolate(at: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Piecewise linear interpolation of the points (x ascending, y), constant beyond them."""
    at = at.clamp(x[0], x[-1])
    right = torch.searchsorted(x, at).clamp(1, len(x) - 1)
    left = right - 1
    weight = (at - x[left]) / (x[right] - x[left]).clamp(min=1e-300)
    return y[left] + weight * (y[right] - y[left])
