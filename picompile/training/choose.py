"""The choice of one predictor a layer, over all layers at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from picompile.errors import UsageError
from picompile.predictors import LayerPredictor
from picompile.training.candidates import SIGN_SCALE, LayerResult
from picompile.training.curve import Point


@dataclass(frozen=True)
class Choice:
    """What a layer may get. `candidate` is None for `exact` and `none`; `cost` counts weights read for a token."""

    layer: int
    kind: str
    candidate: int | None
    point: Point
    parameters: int
    cost: float


# Parameters, cost and the choices of the layers so far.
_Entry = tuple[int, float, tuple[Choice, ...]]


@dataclass(frozen=True)
class Limits:
    """What a choice must keep to: `parameters` of all predictors; `computed_ratio` where a layer can."""

    parameters: int
    computed_ratio: float
    exact: bool


def choose(results: Sequence[LayerResult], targets: Mapping[int, float], limits: Limits) -> list[Choice]:
    """The cheapest choice of which every layer reaches its target, a share of the contribution of firing neurons.

    The computed ratio is let go of in a layer that cannot keep it, and in all where the budget has no room for it.
    Raises `UsageError` where even the smallest predictors are too large together.
    """
    every = [options_of(result, targets[result.layer], limits) for result in results]
    kept = [
        [option for option in options if option.point.computed_ratio <= limits.computed_ratio] or options
        for options in every
    ]
    for options in (kept, every):
        fitting = [entry for entry in _front(options) if entry[0] <= limits.parameters]
        if fitting:
            return list(fitting[-1][2])
    least = sum(min(option.parameters for option in options) for options in every)
    raise UsageError(
        f"the smallest predictors have {least} parameters, more than the budget of {limits.parameters}; "
        f"raise --budget, lower --rank, or allow exact ones"
    )


def _front(options: Sequence[Sequence[Choice]]) -> list[_Entry]:
    """Of all combinations, those for which none has as few parameters at a smaller cost.

    A combination that is beaten in its first layers is beaten in all, so that layer after layer few are kept.
    """
    front: list[_Entry] = [(0, 0.0, ())]
    for of_layer in options:
        front = _undominated(
            [
                (parameters + option.parameters, cost + option.cost, (*chosen, option))
                for parameters, cost, chosen in front
                for option in of_layer
            ]
        )
    return front


def _undominated(entries: list[_Entry]) -> list[_Entry]:
    """By rising parameters and falling cost."""
    kept: list[_Entry] = []
    for entry in sorted(entries, key=lambda entry: entry[:2]):
        if not kept or entry[1] < kept[-1][1]:
            kept.append(entry)
    return kept


def options_of(result: LayerResult, target: float, limits: Limits) -> list[Choice]:
    """What the layer may get for its target: its candidates, and a lossless kind."""
    every = [_of_candidate(result, number, target) for number in range(len(result.candidates))]
    return every + (_lossless(result) if limits.exact or result.decided_share is None else [])


def _of_candidate(result: LayerResult, number: int, target: float) -> Choice:
    candidate = result.candidates[number]
    point = candidate.curve.at(target)
    read = candidate.parameters
    if candidate.kind == "sign":
        # One bit of each weight that decides.
        read = result.neurons * result.hidden // 16
    cost = read + point.computed_share * result.neurons * result.neuron_parameters
    return Choice(result.layer, candidate.kind, number, point, candidate.parameters, cost)


def _lossless(result: LayerResult) -> list[Choice]:
    firing = result.candidates[0].curve.firing_share
    whole = result.neurons * result.neuron_parameters
    if result.decided_share is None:
        point = Point(0.0, 1.0, 1.0, firing, 1.0, 1 / firing if firing else 1.0)
        return [Choice(result.layer, "none", None, point, 0, float(whole))]
    share = result.decided_share
    ratio = share / firing if firing else 1.0
    point = Point(0.0, 1.0, 1.0, firing / share if share else 1.0, share, ratio)
    deciding = result.neurons * result.hidden
    return [Choice(result.layer, "exact", None, point, 0, deciding + share * (whole - deciding))]


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
