"""The choice of one predictor a layer, over all layers at once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from picompile.errors import UsageError
from picompile.output import reserve
from picompile.predictors import LayerPredictor, Predictors, load_predictors
from picompile.predictors.files import FACTS_FILE, write_predictors
from picompile.predictors.store import tensor_name
from picompile.predictors.train.candidates import SIGN_SCALE, LayerResult, load_result, load_weights
from picompile.predictors.train.curve import CurvePoint
from picompile.predictors.train.directory import TrainingDirectory


@dataclass(frozen=True)
class PredictorChoice:
    """What a layer may get. `candidate` is None for `exact` and `none`.

    `cost` counts weights that are read for a token, `excess` neurons that are computed beyond the limit on them.
    """

    layer: int
    kind: str
    candidate: int | None
    point: CurvePoint
    parameters: int
    cost: float
    excess: float


# Parameters; excess and cost; the choices of the layers so far.
_Entry = tuple[int, tuple[float, float], tuple[PredictorChoice, ...]]


@dataclass(frozen=True)
class ChoiceLimits:
    """What a choice must keep to: `parameters` of all predictors; `computed_ratio` as far as these allow it."""

    parameters: int
    computed_ratio: float
    exact: bool


def choose(results: Sequence[LayerResult], targets: Mapping[int, float], limits: ChoiceLimits) -> list[PredictorChoice]:
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


def _front(options: Sequence[Sequence[PredictorChoice]]) -> list[_Entry]:
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


def options_of(result: LayerResult, target: float, limits: ChoiceLimits) -> list[PredictorChoice]:
    """What the layer may get for its target: its candidates, and a lossless kind.

    Nothing that reads more than the whole block, unless all do: many neurons of a SiLU model can hardly be told apart.
    """
    every = [_trained_option(result, number, target, limits) for number in range(len(result.candidates))]
    if limits.exact or result.decided_share is None:
        every.append(_lossless_option(result, limits))
    whole = result.neurons * result.neuron_parameters
    return [option for option in every if option.cost <= whole] or every


def _trained_option(result: LayerResult, number: int, target: float, limits: ChoiceLimits) -> PredictorChoice:
    candidate = result.candidates[number]
    point = candidate.curve.at(target)
    read = candidate.parameters
    if candidate.kind == "sign":
        # One bit of each weight that decides.
        read = result.neurons * result.hidden // 16
    cost = read + point.computed_share * result.neurons * result.neuron_parameters
    excess = _excess(result, point, limits)
    return PredictorChoice(result.layer, candidate.kind, number, point, candidate.parameters, cost, excess)


def _excess(result: LayerResult, point: CurvePoint, limits: ChoiceLimits) -> float:
    """Neurons a token that are computed beyond the limit."""
    share_beyond = 1 - limits.computed_ratio / max(point.computed_ratio, limits.computed_ratio)
    return share_beyond * point.computed_share * result.neurons


def _lossless_option(result: LayerResult, limits: ChoiceLimits) -> PredictorChoice:
    firing = result.candidates[0].curve.firing_share
    whole = result.neurons * result.neuron_parameters
    if result.decided_share is None:
        point = CurvePoint(0.0, 1.0, 1.0, firing, 1.0, 1 / firing if firing else 1.0)
        return PredictorChoice(result.layer, "none", None, point, 0, float(whole), _excess(result, point, limits))
    share = result.decided_share
    ratio = share / firing if firing else 1.0
    point = CurvePoint(0.0, 1.0, 1.0, firing / share if share else 1.0, share, ratio)
    deciding = result.neurons * result.hidden
    cost = deciding + share * (whole - deciding)
    return PredictorChoice(result.layer, "exact", None, point, 0, cost, _excess(result, point, limits))


def described(result: LayerResult, choice: PredictorChoice) -> LayerPredictor:
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


# Which share of the contribution each layer's predictor must find, and what follows from it.


_CHOICE_FILE = "choice.json"


@dataclass(frozen=True)
class Selection:
    """`targets` by layer, what a choice must keep to, and the perplexities that were measured of choices."""

    targets: Mapping[int, float]
    limits: ChoiceLimits
    measured: dict[str, float] = field(default_factory=dict)

    @classmethod
    def first(
        cls, layers: Sequence[int], recall: float, limits: ChoiceLimits, measured: dict[str, float]
    ) -> "Selection":
        """The same target for all layers."""
        return cls(dict.fromkeys(layers, recall), limits, measured)

    @classmethod
    def read(cls, place: TrainingDirectory) -> "Selection | None":
        """What `write` wrote; None where nothing was, or where it is damaged: then it is made again."""
        content = place.read(_CHOICE_FILE)
        try:
            targets = {int(layer): float(target) for layer, target in content["targets"].items()}
            measured = {str(key): float(perplexity) for key, perplexity in content["measured"].items()}
            return cls(targets, ChoiceLimits(**content["limits"]), measured)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return None

    def write(self, place: TrainingDirectory, gate: Mapping[str, Any] | None = None) -> None:
        """Notes the selection, and what the gate found of it."""
        targets = {str(layer): target for layer, target in self.targets.items()}
        content = {"targets": targets, "limits": asdict(self.limits), "measured": self.measured, "gate": gate}
        place.write(_CHOICE_FILE, content)

    def choices(self, results: Sequence[LayerResult]) -> list[PredictorChoice]:
        """The cheapest choice for these targets. Raises `UsageError` where there is none within the budget."""
        return choose(results, self.targets, self.limits)

    def tightened(self, layers: Sequence[int]) -> "Selection":
        """The same, but `layers` may miss half of what they might."""
        halved = {layer: 1 - (1 - self.targets[layer]) / 2 for layer in layers}
        return replace(self, targets={**self.targets, **halved})

    def changes(self, other: "Selection", results: Sequence[LayerResult]) -> bool:
        """Whether `other` leads to another choice."""
        pairs = zip(self.choices(results), other.choices(results), strict=True)
        return any(
            (mine.kind, mine.candidate, mine.point) != (theirs.kind, theirs.candidate, theirs.point)
            for mine, theirs in pairs
        )


# From a choice to predictors: the files of the result.


class _ChosenTensors(Mapping[str, Tensor]):
    """The tensors of chosen candidates, read from the layers' files when they are asked for."""

    def __init__(self, places: Mapping[int, Path], choices: Sequence[PredictorChoice]) -> None:
        self._places = places
        self._numbers = {choice.layer: choice.candidate for choice in choices if choice.candidate is not None}
        self._held: tuple[int, Mapping[str, Tensor]] = (-1, {})

    def __getitem__(self, name: str) -> Tensor:
        _, layer, part = name.split(".")
        number = int(layer)
        if self._held[0] != number:
            self._held = number, load_weights(self._places[number], self._numbers[number])
        return self._held[1][part]

    def __iter__(self) -> Iterator[str]:
        return (tensor_name(layer, part) for layer in self._numbers for part in ("fc1", "fc2", "bias"))

    def __len__(self) -> int:
        return 3 * len(self._numbers)


def assemble(
    folder: Path,
    results: Sequence[LayerResult],
    choices: Sequence[PredictorChoice],
    places: Mapping[int, Path],
    model: Mapping[str, Any],
    gate: Mapping[str, Any],
) -> Predictors:
    """Writes the chosen predictors to `folder`, `predictors.json` last, and reads them back."""
    layers = [described(result, choice) for result, choice in zip(results, choices, strict=True)]
    (folder / FACTS_FILE).unlink(missing_ok=True)
    write_predictors(folder, layers, _ChosenTensors(places, choices), model, gate, curves(results))
    return load_predictors(folder)


def curves(results: Sequence[LayerResult]) -> list[dict[str, Any]]:
    """The trade-offs of all candidates, for reports."""
    return [
        {
            "layer": result.layer,
            "kind": candidate.kind,
            "input": candidate.input,
            "rank": candidate.rank,
            "parameters": candidate.parameters,
            "firing_share": candidate.curve.firing_share,
            "points": candidate.curve.shown(),
        }
        for result in results
        for candidate in result.candidates
    ]


def key_of(layers: Sequence[LayerPredictor]) -> str:
    """A text that is the same for the same choice."""
    return "|".join(f"{layer.layer}:{layer.kind}:{layer.rank}:{layer.threshold:.9g}" for layer in layers)


# Larger predictors for some layers, from the candidates that training kept.


def tighten(folder: Path, layers: Sequence[int]) -> Predictors | None:
    """Chooses predictors that miss half as much in `layers`, in the folder that `train_predictors` made.

    Nothing is trained. Within the budget that training was given, the predictors of other layers may become smaller;
    their targets stay. None where that changes nothing: the layers are exact already, or the folder's candidates are
    gone. Raises `UsageError` for a folder that holds no predictors.
    """
    place, current = TrainingDirectory(folder), load_predictors(folder)
    selection = Selection.read(place)
    if selection is None or not all(place.layer_file(layer.layer).is_file() for layer in current.layers):
        return None
    if unknown := sorted(set(layers) - selection.targets.keys()):
        raise UsageError(f"{folder}: has no layer {unknown[0]}")
    with reserve(folder.resolve(), overwrite=True) as reserved:
        results = [load_result(place.layer_file(layer.layer)) for layer in current.layers]
        tighter = selection.tightened(layers)
        try:
            if not selection.changes(tighter, results):
                return None
        except UsageError:
            return None
        tighter.write(place, current.gate)
        places = {result.layer: place.layer_file(result.layer) for result in results}
        model = {"fingerprint": current.fingerprint, "name": current.name, "parameters": current.model_parameters}
        # What the gate found was of the choice before.
        targets = {"targets": [tighter.targets[result.layer] for result in results]}
        with place.publishing(reserved) as new:
            assemble(new, results, tighter.choices(results), places, model, targets)
    return load_predictors(folder)
