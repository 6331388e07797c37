"""How often the neurons of a layer fire, most active first, as placement needs it: from a profile or a curve."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from picompile.errors import UsageError
from picompile.quantities import parse_share

if TYPE_CHECKING:
    from picompile.predictors.profile.profile import Profile
    from picompile.predictors.store import Predictors


@dataclass(frozen=True)
class LayerFiring:
    """One layer's neurons, sorted by how often they are computed.

    `shares` float64 [neurons], from 0 to 1, descending: the share of the steps in which each is computed; a step is a
    token of each sequence. `order` int64 [neurons]: the number of each in the model; None for a curve, which is of no
    model. `chosen` is the mean share of the neurons whose experts are chosen in a step: 1 without experts.
    """

    shares: NDArray[np.float64]
    order: NDArray[np.int64] | None = None
    chosen: float = 1.0

    @cached_property
    def computed_sums(self) -> NDArray[np.float64]:
        """The mean number of the first n neurons that are computed for a token: float64 [neurons + 1]."""
        return np.concatenate(([0.0], np.cumsum(self.shares)))

    @cached_property
    def silent_logs(self) -> NDArray[np.float64]:
        """The logarithm of the share of tokens for which no neuron from the n-th on fires: float64 [neurons + 1]."""
        with np.errstate(divide="ignore"):
            silent = np.log1p(-np.minimum(self.shares, 1.0))
        return np.concatenate((np.cumsum(silent[::-1])[::-1], [0.0]))


@dataclass(frozen=True)
class Firing:
    """The firing of all layers of a model. `source` names the profile's folder or the curve that it is from."""

    layers: tuple[LayerFiring, ...]
    source: str


def estimate_rank(hidden: int, neurons: int, layer_parameters: float, firing: Firing | None = None) -> int:
    """Return the rank that an untrained learned predictor is planned with, the same in all layers.

    It is the rank that training starts from if neurons fire as in `firing`, in the mean of its layers. It is limited by
    training's budget, a share of the model's parameters: here of `layer_parameters`, which are a layer's with its part
    of those outside of layers. Without `firing` the budget alone decides.
    """
    from picompile.predictors.train.options import TrainOptions, round_rank, start_rank

    most = max(1, int((TrainOptions().budget * layer_parameters - neurons) // (hidden + neurons)))
    if firing is not None:
        most = min(most, start_rank(hidden, neurons, *_mean_firing(firing)))
    rounded = round_rank(most, min(hidden, neurons))
    step = 32 if rounded >= 256 else 8
    return rounded if rounded <= most else max(1, rounded - step)


def _mean_firing(firing: Firing) -> tuple[float, float]:
    """Return (the share of neurons that fire, the share of firings that the most active fifth of a layer makes)."""
    shares = [layer.shares for layer in firing.layers]
    top = sum(float(of_layer[: max(1, len(of_layer) // 5)].sum()) for of_layer in shares)
    total = sum(float(of_layer.sum()) for of_layer in shares)
    return total / sum(map(len, shares)), top / max(total, 1e-30)


# Neurons computed for each one that fires, by predictor kind, if it was not measured: the figures of three models in
# docs/benchmarks.md. Other kinds compute exactly those that fire.
COMPUTED_RATIOS = {"learned": 1.2, "learned-relu": 1.2, "sign": 6.0}

# The range of skews in which sums on a grid tell Beta distributions apart, down to rates of one in a million.
_LEAST_SKEW, _MOST_SKEW = 0.05, 10.0
_SAMPLE = 1000


@dataclass(frozen=True)
class _Curve:
    """A firing curve: the share `active` fires for a token, and the share `hot` of a layer makes 80 % of the firings.

    `hot` None takes the skew that synth makes. The firing grows `growth`-fold from the first layer to the last, by the
    same factor from each layer to the next. A linear rise does not give what the paper found: from 0 to twice the mean,
    it only lowers 26 % to 21 %.
    """

    active: float
    hot: float | None = None
    growth: float = 1.0


# The named curves have the figures of the PowerInfer paper (arXiv 2312.12456): the share that fires for a token, and
# the share of a layer's neurons that makes 80 % of its firings, 26 % in OPT-30B and 43 % in ReGLU-70B. Of all layers
# together fewer neurons make 80 %, namely 17 % and 26 %, since layers differ in how much they fire. A model without
# such figures in the paper has those of the model most like it.
_OPT = {"hot": 0.26, "growth": 44.0}
_REGLU = {"hot": 0.43, "growth": 94.0}
CURVES: Mapping[str, _Curve] = {
    "opt": _Curve(0.03, **_OPT),
    "falcon": _Curve(0.05, **_OPT),
    "bamboo": _Curve(0.10, **_REGLU),
    "reglu-7b": _Curve(0.30, **_REGLU),
    "reglu-13b": _Curve(0.22, **_REGLU),
    "reglu-70b": _Curve(0.18, **_REGLU),
}


def firing_of_profile(profile: "Profile", sequences: int = 1, computed: Mapping[int, float] | None = None) -> Firing:
    """Return the firing of a profile's layers, in the profile's order of layers.

    `computed` has by layer how many neurons its predictor computes for each one that fires, 1 for layers that it lacks.
    With `sequences` tokens at a time a neuron is computed if any of them needs it.
    """
    layers = []
    for layer in profile.layers:
        counts = profile.counts(layer.layer).numpy()
        order = np.argsort(-counts, kind="stable")
        shares = counts[order] / profile.tokens
        chosen = 1.0
        if layer.experts:
            chosen = float(_in_step(profile.chosen(layer.layer).numpy() / profile.tokens, sequences).mean())
        ratio = (computed or {}).get(layer.layer, 1.0)
        layers.append(LayerFiring(_computed(shares, sequences, ratio), order, chosen))
    return Firing(tuple(layers), f"the profile {profile.folder}")


def firing_of_experts(neurons: int, chosen: float, sequences: int = 1) -> LayerFiring:
    """Return the firing of a layer that computes every neuron of chosen experts, which are the share `chosen` of all.

    Tokens choose experts independently of each other, and none more often than others. A block without experts has
    `chosen` 1.
    """
    share = float(_in_step(np.asarray(chosen), sequences))
    return LayerFiring(np.full(neurons, share), chosen=share)


def firing_of_curve(
    text: str, layers: int, neurons: int, sequences: int = 1, computed: float = 1.0, chosen: float = 1.0
) -> Firing:
    """Return the firing that the curve `text` gives to `layers` layers of `neurons` neurons. Raise `UsageError`.

    `text` is one of `CURVES`, or the share of the neurons that fires (`10%`, `0.1`), or that share and the share of the
    neurons that makes 80 % of the firings (`10%:30%`). `sequences` is as in `firing_of_profile`, and so is `computed`,
    here one number for all layers. With experts the curve is of those that a token chooses, a share `chosen` of all.
    """
    curve = _parse(text)
    skew = None if curve.hot is None else _skew(text, curve.active, curve.hot)
    shares = _rates(curve.active, neurons, skew)[::-1]
    weights = curve.growth ** (np.arange(layers) / max(1, layers - 1))
    return Firing(
        tuple(
            LayerFiring(
                _in_step(np.minimum(of_layer * computed, 1.0) * chosen, sequences),
                chosen=float(_in_step(np.asarray(chosen), sequences)),
            )
            for of_layer in _weighted(shares, weights)
        ),
        f"the curve {text.strip()}",
    )


def computed_ratios(predictors: "Predictors") -> dict[int, float]:
    """Return how many neurons each layer's predictor computes for one that fires: as measured, or else as usual."""
    return {
        layer.layer: layer.computed_share / layer.firing_share
        if layer.computed_share and layer.firing_share
        else COMPUTED_RATIOS.get(layer.kind, 1.0)
        for layer in predictors.layers
    }


def _computed(shares: NDArray[np.float64], sequences: int, ratio: float) -> NDArray[np.float64]:
    return _in_step(np.minimum(shares * ratio, 1.0), sequences)


def _in_step(of_token: NDArray[np.float64], sequences: int) -> NDArray[np.float64]:
    """Return the share of the steps that read something, of which a token does in the shares `of_token`."""
    return of_token if sequences == 1 else 1 - (1 - of_token) ** sequences


def _parse(text: str) -> _Curve:
    name = text.strip().lower()
    if name in CURVES:
        return CURVES[name]
    active, colon, hot = name.partition(":")
    try:
        curve = _Curve(parse_share(active, ""), parse_share(hot, "") if colon else None)
    except UsageError:
        curve = _Curve(0.0)
    if curve.active < 1e-6:
        raise UsageError(
            f"{text!r} is no firing curve: name {', '.join(CURVES)}, or the share of the neurons that fires on a token "
            f"(10%), or that and the share of them that makes 80 % of the firings (10%:30%)"
        )
    return curve


def _rates(active: float, neurons: int, skew: float | None) -> NDArray[np.float64]:
    """Return the firing rates of a layer, ascending: float64 [neurons]."""
    from picompile.synth.rates import SKEW, beta_rates

    return beta_rates(active, neurons, SKEW if skew is None else skew)


@cache
def _skew(text: str, active: float, hot: float) -> float:
    """Return the skew with which the share `hot` of the neurons makes 80 % of the firings. Raise `UsageError`."""
    from picompile.synth.rates import share_of_firings

    def reached(skew: float) -> float:
        return share_of_firings(_rates(active, _SAMPLE, skew))

    least, most = reached(_LEAST_SKEW), reached(_MOST_SKEW)
    if not least <= hot <= most:
        raise UsageError(
            f"{text!r} is no firing curve: where {active:.4g} of the neurons fire, from {least:.2f} to {most:.2f} of "
            f"them can make 80 % of the firings"
        )
    low, high = math.log(_LEAST_SKEW), math.log(_MOST_SKEW)
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(math.exp(middle)) < hot else (low, middle)
    return math.exp((low + high) / 2)


def _weighted(shares: NDArray[np.float64], weights: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """Return `shares` for each layer in proportion to `weights`, at most 1 each; the mean over all is that of `shares`.

    `shares` [neurons] are descending, so the neurons that reach 1 are the first ones of a layer.
    """
    if weights.min() == weights.max():
        return [shares] * len(weights)
    scales, mean = weights / weights.mean(), float(shares.mean())
    sums = np.concatenate(([0.0], np.cumsum(shares)))
    for _ in range(30):
        full = np.searchsorted(-shares, -1 / scales)
        found = (full + scales * (sums[-1] - sums[full])) / len(shares)
        scales = scales * (mean / float(found.mean()))
    return [np.minimum(shares * scale, 1.0) for scale in scales]
