"""The choice of one predictor a layer, over all layers at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from picompile.errors import UsageError
from picompile.predictors import LayerPredictor
from picompile.training.candidates import SIGN_SCALE, LayerResult
from picompile.training.curve import Point


@dataclass(frozen=True)
class Choice:
    """What a layer may get. `candidate` is None for `exact` and `none`.

    `cost` counts weights that are read for a token, `excess` neurons that are computed beyond the limit on them.
    """

    layer: int
    kind: str
    candidate: int | None
    point: Point
    parameters: int
    cost: float
    excess: float


# Parameters; excess and cost; the choices of the layers so far.
_Entry = tuple[int, tuple[float, float], tuple[Choice, ...]]


@dataclass(frozen=True)
class Limits:
    """What a choice must keep to: `parameters` of all predictors; `computed_ratio` as far as these allow it."""

    parameters: int
    computed_ratio: float
    exact: bool


def choose(results: Sequence[LayerResult], targets: Mapping[int, float], limits: Limits) -> list[Choice]:
    """The best choice of which every layer reaches its target, a share of the contribution of firing neurons.

    That is the one with the fewest neurons beyond the computed ratio, none wherever the budget has room for it, and of
    those the one that reads the fewest weights. Raises `UsageError` where even the smallest predictors are too large
    together.
    """
    every = [options_of(result, targets[result.layer], limits) for result in results]
    fitting = [entry for entry in _front(every) if entry[0] <= limits.parameters]
    if fitting:
        return list(fitting[-1][2])
    least = sum(min(option.parameters for option in options) for options in every)
    raise UsageError(
        f"the smallest predictors have {least} parameters, more than the budget of {limits.parameters}; "
        f"raise --budget, lower --rank, or allow exact ones"
    )


def _front(options: Sequence[Sequence[Choice]]) -> list[_Entry]:
    """Of all combinations, those for which none is better that has as few parameters.

    A combination that is beaten in its first layers is beaten in all, so that layer after layer few are kept.
    """
    front: list[_Entry] = [(0, (0.0, 0.0), ())]
    for of_layer in options:
        front = _undominated(
            [
                (parameters + option.parameters, (excess + option.excess, cost + option.cost), (*chosen, option))
                for parameters, (excess, cost), chosen in front
                for option in of_layer
            ]
        )
    return front


def _undominated(entries: list[_Entry]) -> list[_Entry]:
    """By rising parameters, each better than those before it."""
    kept: list[_Entry] = []
    for entry in sorted(entries, key=lambda entry: entry[:2]):
        if not kept or entry[1] < kept[-1][1]:
            kept.append(entry)
    return kept


def options_of(result: LayerResult, target: float, limits: Limits) -> list[Choice]:
    """What the layer may get for its target: its candidates, and a lossless kind.

    Nothing that reads more than the whole block, unless all do: many neurons of a SiLU model can hardly be told apart.
    """
    every = [_of_candidate(result, number, target, limits) for number in range(len(result.candidates))]
    if limits.exact or result.decided_share is None:
        every.append(_lossless(result, limits))
    whole = result.neurons * result.neuron_parameters
    return [option for option in every if option.cost <= whole] or every


def _of_candidate(result: LayerResult, number: int, target: float, limits: Limits) -> Choice:
    candidate = result.candidates[number]
    point = candidate.curve.at(target)
    read = candidate.parameters
    if candidate.kind == "sign":
        # One bit of each weight that decides.
        read = result.neurons * result.hidden // 16
    cost = read + point.computed_share * result.neurons * result.neuron_parameters
    excess = _excess(result, point, limits)
    return Choice(result.layer, candidate.kind, number, point, candidate.parameters, cost, excess)


def _excess(result: LayerResult, point: Point, limits: Limits) -> float:
    """Neurons a token that are computed beyond the limit."""
    share_beyond = 1 - limits.computed_ratio / max(point.computed_ratio, limits.computed_ratio)
    return share_beyond * point.computed_share * result.neurons


def _lossless(result: LayerResult, limits: Limits) -> Choice:
    firing = result.candidates[0].curve.firing_share
    whole = result.neurons * result.neuron_parameters
    if result.decided_share is None:
        point = Point(0.0, 1.0, 1.0, firing, 1.0, 1 / firing if firing else 1.0)
        return Choice(result.layer, "none", None, point, 0, float(whole), _excess(result, point, limits))
    share = result.decided_share
    ratio = share / firing if firing else 1.0
    point = Point(0.0, 1.0, 1.0, firing / share if share else 1.0, share, ratio)
    deciding = result.neurons * result.hidden
    cost = deciding + share * (whole - deciding)
    return Choice(result.layer, "exact", None, point, 0, cost, _excess(result, point, limits))


def described(result: LayerResult, choice: Choice) -> LayerPredictor:
    """The entry of a choice in `predictors.json`."""
    candidate = None if choice.candidate is None else result.candidates[choice.candidate]
    threshold = choice.point.threshold
    if choice.kind == "sign":
        threshold = 0.5 + threshold / SIGN_SCALE
    return LayerPredictor(
        layer=result.layer,
        kind=choice.kind,
        input=None if candidate is None else candidate.input,
        rank=None if candidate is None else candidate.rank,
        threshold=threshold,
        parameters=choice.parameters,
        bytes_f16=2 * choice.parameters,
        recall=choice.point.recall,
        weighted_recall=choice.point.weighted_recall,
        precision=choice.point.precision,
        firing_share=result.candidates[0].curve.firing_share,
        computed_share=choice.point.computed_share,
        skewness=result.skewness,
    )
