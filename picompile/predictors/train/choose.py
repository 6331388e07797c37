"""The choice of one predictor a layer, over all layers at once, and its result as a predictor set."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from picompile.errors import UsageError
from picompile.output import reserve
from picompile.predictors.files import FACTS_FILE, load_predictors, write_predictors
from picompile.predictors.store import PARTS, LayerPredictor, Predictors, TensorsOnAccess, tensor_name
from picompile.predictors.train.candidates import SIGN_SCALE, LayerResult, load_result, load_weight
from picompile.predictors.train.data import CurvePoint
from picompile.predictors.train.directory import TrainingDirectory


@dataclass(frozen=True)
class PredictorChoice:
    """A predictor that a layer may get. `candidate` is None for the kinds `exact` and `none`.

    `cost` is the number of weights read per token, `excess` the number of neurons computed per token beyond the limit.
    """

    layer: int
    kind: str
    candidate: int | None
    point: CurvePoint
    parameters: int
    cost: float
    excess: float


# Parameters; excess and cost; the choices for the layers so far.
_Entry = tuple[int, tuple[float, float], tuple[PredictorChoice, ...]]


@dataclass(frozen=True)
class ChoiceLimits:
    """Limits of a choice: `parameters` of all predictors together, and `computed_ratio` as far as these allow it."""

    parameters: int
    computed_ratio: float
    exact: bool


def choose(results: Sequence[LayerResult], targets: Mapping[int, float], limits: ChoiceLimits) -> list[PredictorChoice]:
    """Return the best choice in which every layer reaches its target.

    The best choice has the fewest neurons beyond the computed ratio (none, if the budget has room for that), and among
    such choices it reads the fewest weights.

    Args:
        results: The candidates of each layer.
        targets: By layer, the share of the contribution of firing neurons that its predictor must find.
        limits: Limits on parameters and computed neurons.

    Raises:
        UsageError: Even the smallest predictors together exceed the budget.
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
    """Return the Pareto front of all combinations: no other one is better with as few parameters.

    A combination that is dominated in its first layers stays dominated, so few are kept from layer to layer.
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
    """Return the entries by rising parameters, each better than those before it."""
    kept: list[_Entry] = []
    for entry in sorted(entries, key=lambda entry: entry[:2]):
        if not kept or entry[1] < kept[-1][1]:
            kept.append(entry)
    return kept


def options_of(result: LayerResult, target: float, limits: ChoiceLimits) -> list[PredictorChoice]:
    """Return the predictors that the layer may get for its target: its candidates, and a lossless kind.

    Options that read more weights than the whole block are left out, unless all of them do: in SiLU models many neurons
    can hardly be told apart.
    """
    every = [_trained_option(result, number, target, limits) for number in range(len(result.candidates))]
    if limits.exact or result.decided_share is None:
        every.append(_lossless_option(result, limits))
    whole = result.token_neurons * result.neuron_parameters
    return [option for option in every if option.cost <= whole] or every


def _trained_option(result: LayerResult, number: int, target: float, limits: ChoiceLimits) -> PredictorChoice:
    candidate = result.candidates[number]
    point = candidate.curve.at(target)
    read = candidate.read(result.hidden, result.chosen_share)
    if candidate.kind == "sign":
        # One bit of each weight of the gating matrix.
        read = result.token_neurons * result.hidden / 16
    cost = read + point.computed_share * result.token_neurons * result.neuron_parameters
    excess = _excess(result, point, limits)
    return PredictorChoice(
        result.layer,
        candidate.kind,
        candidate=number,
        point=point,
        parameters=candidate.parameters,
        cost=cost,
        excess=excess,
    )


def _excess(result: LayerResult, point: CurvePoint, limits: ChoiceLimits) -> float:
    """Return how many neurons are computed per token beyond the limit."""
    share_beyond = 1 - limits.computed_ratio / max(point.computed_ratio, limits.computed_ratio)
    return share_beyond * point.computed_share * result.token_neurons


def _lossless_option(result: LayerResult, limits: ChoiceLimits) -> PredictorChoice:
    firing = result.candidates[0].curve.firing_share
    whole = result.token_neurons * result.neuron_parameters
    if result.decided_share is None:
        point = CurvePoint(
            0.0,
            recall=1.0,
            weighted_recall=1.0,
            precision=firing,
            computed_share=1.0,
            computed_ratio=1 / firing if firing else 1.0,
        )
        return PredictorChoice(
            result.layer,
            kind="none",
            candidate=None,
            point=point,
            parameters=0,
            cost=float(whole),
            excess=_excess(result, point, limits),
        )
    share = result.decided_share
    ratio = share / firing if firing else 1.0
    point = CurvePoint(
        0.0,
        recall=1.0,
        weighted_recall=1.0,
        precision=firing / share if share else 1.0,
        computed_share=share,
        computed_ratio=ratio,
    )
    gating = result.token_neurons * result.hidden
    cost = gating + share * (whole - gating)
    return PredictorChoice(
        result.layer,
        kind="exact",
        candidate=None,
        point=point,
        parameters=0,
        cost=cost,
        excess=_excess(result, point, limits),
    )


def layer_entry(result: LayerResult, choice: PredictorChoice) -> LayerPredictor:
    """Return the entry of a choice in `predictors.json`."""
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


_CHOICE_FILE = "choice.json"


@dataclass(frozen=True)
class Selection:
    """The share of the contribution that each layer's predictor must find, and what follows from it.

    `limits` are those of the choice; `measured` holds the perplexities of choices measured so far, by `choice_key`.
    """

    targets: Mapping[int, float]
    limits: ChoiceLimits
    measured: dict[str, float] = field(default_factory=dict)

    @classmethod
    def first(
        cls, layers: Sequence[int], recall: float, limits: ChoiceLimits, measured: dict[str, float]
    ) -> "Selection":
        """Return a selection with one target for all layers."""
        return cls(dict.fromkeys(layers, recall), limits, measured)

    @classmethod
    def read(cls, directory: TrainingDirectory) -> "Selection | None":
        """Return the selection that `write` wrote; None if there is none or it is damaged, so that it is made again."""
        content = directory.read(_CHOICE_FILE)
        try:
            targets = {int(layer): float(target) for layer, target in content["targets"].items()}
            measured = {str(key): float(perplexity) for key, perplexity in content["measured"].items()}
            return cls(targets, ChoiceLimits(**content["limits"]), measured)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return None

    def write(self, directory: TrainingDirectory, accuracy: Mapping[str, Any] | None = None) -> None:
        """Write the selection, and the facts that the accuracy check found about it."""
        targets = {str(layer): target for layer, target in self.targets.items()}
        content = {"targets": targets, "limits": asdict(self.limits), "measured": self.measured, "accuracy": accuracy}
        directory.write(_CHOICE_FILE, content)

    def choices(self, results: Sequence[LayerResult]) -> list[PredictorChoice]:
        """Return the cheapest choice for these targets. Raise `UsageError` if none is within the budget."""
        return choose(results, self.targets, self.limits)

    def tightened(self, layers: Sequence[int]) -> "Selection":
        """Return a selection in which `layers` may miss half as much."""
        halved = {layer: 1 - (1 - self.targets[layer]) / 2 for layer in layers}
        return replace(self, targets={**self.targets, **halved})

    def changes(self, other: "Selection", results: Sequence[LayerResult]) -> bool:
        """Return whether `other` leads to another choice."""
        pairs = zip(self.choices(results), other.choices(results), strict=True)
        return any(
            (mine.kind, mine.candidate, mine.point) != (theirs.kind, theirs.candidate, theirs.point)
            for mine, theirs in pairs
        )


def assemble(
    folder: Path,
    results: Sequence[LayerResult],
    choices: Sequence[PredictorChoice],
    files: Mapping[int, Path],
    model: Mapping[str, Any],
    accuracy: Mapping[str, Any],
) -> Predictors:
    """Write the chosen predictors to `folder`, `predictors.json` last, and return them as read back.

    `files` are the layers' candidate files, `accuracy` the facts of the accuracy check.
    """
    layers = [layer_entry(result, choice) for result, choice in zip(results, choices, strict=True)]
    (folder / FACTS_FILE).unlink(missing_ok=True)
    tensors = {
        tensor_name(choice.layer, part): partial(load_weight, files[choice.layer], choice.candidate, part)
        for choice in choices
        if choice.candidate is not None
        for part in PARTS
    }
    write_predictors(
        folder, layers, tensors=TensorsOnAccess(tensors), model=model, accuracy=accuracy, curves=curves(results)
    )
    return load_predictors(folder)


def curves(results: Sequence[LayerResult]) -> list[dict[str, Any]]:
    """Return the trade-off curves of all candidates, for reports."""
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


def choice_key(layers: Sequence[LayerPredictor]) -> str:
    """Return a text that is equal for equal choices."""
    return "|".join(f"{layer.layer}:{layer.kind}:{layer.rank}:{layer.threshold:.9g}" for layer in layers)


def tighten(folder: Path, layers: Sequence[int]) -> Predictors | None:
    """Choose predictors that miss half as much in `layers`, in the folder that `train_predictors` made.

    Nothing is trained. Within the budget of that training, the predictors of other layers may become smaller; their
    targets stay.

    Returns:
        The new predictors; None if nothing changes, because the layers are exact already, or because the folder's
        candidates are gone.

    Raises:
        UsageError: The folder holds no predictors, or a layer is unknown.
    """
    directory, current = TrainingDirectory(folder), load_predictors(folder)
    selection = Selection.read(directory)
    if selection is None or not all(directory.layer_file(layer.layer).is_file() for layer in current.layers):
        return None
    if unknown := sorted(set(layers) - selection.targets.keys()):
        raise UsageError(f"{folder}: has no layer {unknown[0]}")
    with reserve(folder.resolve(), overwrite=True) as reserved:
        results = [load_result(directory.layer_file(layer.layer)) for layer in current.layers]
        tighter = selection.tightened(layers)
        try:
            if not selection.changes(tighter, results):
                return None
        except UsageError:
            return None
        tighter.write(directory, current.accuracy)
        files = {result.layer: directory.layer_file(result.layer) for result in results}
        model = {"fingerprint": current.fingerprint, "name": current.name, "parameters": current.model_parameters}
        # The facts of the accuracy check are about the earlier choice, so they are left out.
        targets = {"targets": [tighter.targets[result.layer] for result in results]}
        with directory.publishing(reserved) as new:
            assemble(new, results, choices=tighter.choices(results), files=files, model=model, accuracy=targets)
    return load_predictors(folder)
