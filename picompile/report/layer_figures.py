"""The figures of a layer's predictor, read from predictors.json or from an artifact."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from picompile.predictors.store import LayerPredictor, Predictors
from picompile.report.numbers import NOTHING, count, measured, percent, ratio, share, whole
from picompile.report.profile import FiringSummary, imported_counts, summarize


@dataclass(frozen=True)
class LayerFigures:
    """One layer's predictor, and its measured figures; None stands for an unknown figure.

    `firing_share` and `computed_share` are shares of all neurons, per token. `skewness` is the share of the firings
    that the most active fifth of the neurons makes; `missed_energy` the share of the block's output, in squared length,
    that the left-out neurons would have added. `target` is the recall by contribution that was asked for.
    """

    layer: int
    kind: str
    input: str | None = None
    rank: int | None = None
    threshold: float | None = None
    parameters: int | None = None
    bytes_f16: int | None = None
    recall: float | None = None
    weighted_recall: float | None = None
    precision: float | None = None
    firing_share: float | None = None
    computed_share: float | None = None
    skewness: float | None = None
    missed_energy: float | None = None
    target: float | None = None

    @property
    def computed_ratio(self) -> float | None:
        """Computed neurons / firing neurons."""
        return ratio(self.computed_share, self.firing_share)


def of_predictors(predictors: Predictors, firing: Mapping[int, FiringSummary] | None = None) -> list[LayerFigures]:
    """Return the layers of predictors.json, with their figures of the accuracy check.

    Firing shares and skewness that are not recorded are taken from `firing`, or from imported counts.
    """
    skewness = {layer: summarize([counts], 1).skewness for layer, counts in imported_counts(predictors).items()}
    known: dict[int, tuple[float | None, float | None]] = {layer: (None, value) for layer, value in skewness.items()}
    known |= {layer: (figures.firing_share, figures.skewness) for layer, figures in (firing or {}).items()}
    found = [of_predictor(layer, *known.get(layer.layer, (None, None))) for layer in predictors.layers]
    missed = {
        entry.get("layer"): measured(entry.get("missed_energy"))
        for entry in _sequence(predictors.accuracy.get("layers"))
        if isinstance(entry, Mapping) and isinstance(entry.get("layer"), int)
    }
    targets: Sequence[Any] = _sequence(predictors.accuracy.get("targets"))
    if len(targets) != len(found):
        targets = [None] * len(found)
    return [
        replace(layer, missed_energy=missed.get(layer.layer), target=share(target))
        for layer, target in zip(found, targets, strict=True)
    ]


def _sequence(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def of_predictor(
    layer: LayerPredictor, firing_share: float | None = None, skewness: float | None = None
) -> LayerFigures:
    """Return a layer of predictors.json; `firing_share` and `skewness` are used if it has none of its own."""
    found, own_skewness = of_entry(layer.layer, layer.kind, vars(layer)), share(layer.skewness)
    return replace(
        found,
        input=layer.input if layer.learned else None,
        threshold=measured(layer.threshold) if layer.learned or layer.kind == "sign" else None,
        parameters=whole(layer.parameters) or None,
        bytes_f16=whole(layer.bytes_f16) or None,
        firing_share=firing_share if found.firing_share is None else found.firing_share,
        skewness=skewness if own_skewness is None else own_skewness,
    )


_READ: Mapping[str, Callable[[object], Any]] = {
    "rank": whole,
    **dict.fromkeys(("recall", "weighted_recall", "precision", "firing_share", "computed_share"), share),
    "missed_energy": measured,
}


def of_entry(layer: int, kind: str, entry: Mapping[str, Any]) -> LayerFigures:
    """Return the measured figures in an entry of predictors.json, or of `accuracy` in an artifact's report.json."""
    return LayerFigures(layer, kind, **{name: read(entry.get(name)) for name, read in _READ.items()})


def parameters_text(predictors: Predictors, *, brief: bool = False) -> str:
    """Return the parameters of all predictors and their share of the model's, `139,712 (4.00 %)`; `brief`: `4.00 %`."""
    own = sum(whole(layer.parameters) or 0 for layer in predictors.layers)
    if not own:
        return NOTHING
    of_model = ratio(own, whole(predictors.model_parameters))
    if of_model is None:
        return count(own)
    return percent(of_model, 2) if brief else f"{count(own)} ({percent(of_model, 2)})"
