"""The section of predictors: what they cost, how large they are, and how well they tell which neurons fire."""

from collections.abc import Sequence

from picompile.predictors import Predictors
from picompile.report import numbers
from picompile.report.blocks import UNFOLDED, Part, Picture, Pictures, Section, Table
from picompile.report.firing_pictures import curves_picture
from picompile.report.gate import gate_table
from picompile.report.imported import imported_counts
from picompile.report.layers import LayerFigures, of_predictors, parameters_text
from picompile.report.numbers import NOTHING
from picompile.report.predictor_pictures import accuracy_picture, computed_picture, missed_picture
from picompile.report.profile import FiringProfile
from picompile.report.rank_pictures import rank_pictures
from picompile.report.tradeoff import read_candidates, tradeoff_pictures

_COLUMNS = (
    "layer",
    "kind",
    "input",
    "rank",
    "parameters",
    "in f16",
    "threshold",
    "fire",
    "computed",
    "computed / fire",
    "recall",
    "by contribution",
    "target",
    "precision",
    "skewness",
    "missed energy",
)
_TRADEOFF_WORDS = (
    "Each line is a predictor that was trained for the layer, of the rank that the legend gives; moving its threshold "
    "moves along it. To the right: how many neurons are computed for one that fires. Upwards: the share of the firing "
    "neurons' contribution that is missed. Lower and further left is better. The ring is what was taken; where nothing "
    "is missed it stands at 0.001 %."
)


_SAMPLES_WORDS = (
    "Shares of neurons, recall and precision were measured on samples that training did not see. The target is the "
    "recall by contribution that was asked for. Missed energy was measured on held-out text, with the predictors of "
    "all layers in place."
)


def predictors_section(anchor: str, predictors: Predictors, profiles: Sequence[FiringProfile]) -> Section:
    """Gate, sizes, accuracy and trade-offs. A profile of the same model knows how layers fire where nobody noted it."""
    known = [profile for profile in profiles if profile.of.fingerprint == predictors.fingerprint]
    firing = known[0].figures() if known else {}
    layers = of_predictors(predictors, firing)
    facts = [
        ("model", str(predictors.name or NOTHING)),
        ("fingerprint", str(predictors.fingerprint or NOTHING)[:16]),
        ("kinds", kinds_text([layer.kind for layer in layers])),
        ("parameters", parameters_text(predictors)),
        ("in f16", numbers.size(sum(layer.bytes_f16 or 0 for layer in layers) or None)),
    ]
    parts: list[Part | None] = [gate_table(predictors.gate, layers)]
    counts = imported_counts(predictors)
    pictures = [curves_picture(f"{anchor}-curves", counts)] if counts else []
    pictures += [*rank_pictures(f"{anchor}-rank", layers), *accuracy_pictures(anchor, layers)]
    parts.append(Pictures(pictures) if pictures else None)
    parts.append(layers_table(layers, _SAMPLES_WORDS))
    tradeoffs = tradeoff_pictures(f"{anchor}-tradeoff", read_candidates(predictors.curves), layers)
    folded = len(tradeoffs) > UNFOLDED
    title = "Trade-off of each layer"
    parts.append(Pictures(tradeoffs, title, _TRADEOFF_WORDS, small=True, folded=folded) if tradeoffs else None)
    found = [part for part in parts if part is not None]
    return Section(anchor, "predictors", str(predictors.path), facts, found)


def accuracy_pictures(anchor: str, layers: Sequence[LayerFigures]) -> list[Picture]:
    """Recall, precision, computed against firing, and what is missed, as far as they were measured."""
    found = (
        accuracy_picture(f"{anchor}-accuracy", layers),
        computed_picture(f"{anchor}-computed", layers),
        missed_picture(f"{anchor}-missed", layers),
    )
    return [picture for picture in found if picture is not None]


def layers_table(layers: Sequence[LayerFigures], words: str) -> Table:
    """All that is known of each layer's predictor."""
    rows = [_row(layer) for layer in layers]
    texts = frozenset({"kind", "input"})
    return Table("Each layer", _COLUMNS, rows, texts, words, folded=len(rows) > UNFOLDED).without_empty(NOTHING)


def _row(layer: LayerFigures) -> tuple[str, ...]:
    return (
        str(layer.layer),
        layer.kind,
        layer.input or NOTHING,
        numbers.count(layer.rank),
        numbers.count(layer.parameters),
        numbers.size(layer.bytes_f16),
        numbers.decimal(layer.threshold),
        numbers.percent(layer.firing_share, 2),
        numbers.percent(layer.computed_share, 2),
        numbers.times(layer.computed_ratio),
        numbers.recall(layer.recall),
        numbers.recall(layer.weighted_recall),
        numbers.recall(layer.target),
        numbers.percent(layer.precision, 1),
        numbers.percent(layer.skewness, 1),
        numbers.percent(layer.missed_energy, 3),
    )


def kinds_text(kinds: Sequence[str]) -> str:
    """`exact × 1, learned × 5`."""
    return ", ".join(f"{kind} × {kinds.count(kind)}" for kind in dict.fromkeys(kinds)) or NOTHING
