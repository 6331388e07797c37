"""The trade-off of each layer: missed against computed neurons, for predictors of several ranks.

It is read from the `curves` of predictors.json. Each trained candidate is a line, each threshold a point on it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from picompile.predictors.store import Predictors
from picompile.report import numbers
from picompile.report.artifact_facts import accuracy_table
from picompile.report.drawing import INK, Canvas, draw, drawable, ramp
from picompile.report.layer_figures import LayerFigures, of_predictors, parameters_text
from picompile.report.numbers import NOTHING, UNFOLDED, PagePicture, PageSection, Part, Pictures, Table
from picompile.report.predictor_pictures import accuracy_picture, computed_picture, missed_picture, rank_pictures
from picompile.report.profile import FiringProfile, curves_picture, imported_counts

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# There may be a hundred of these pictures, with labels of the same sizes.
_MARGINS = {"left": 0.19, "right": 0.97, "bottom": 0.18, "top": 0.97}

# A line style for each kind and input that was tried.
_STYLES = {"solid": "-", "dashed": (0, (5, 2)), "dotted": (0, (1, 2)), "dashed and dotted": (0, (5, 2, 1, 2))}

# What is missed is drawn on a logarithmic axis, which has no place for nothing.
_LEAST_MISSED = 1e-5

# Points beyond are of no use, and would squeeze the others.
_MOST_COMPUTED = 10.0


@dataclass(frozen=True)
class TradeoffPoint:
    """The figures at one threshold: computed / fired neurons, and recall by contribution."""

    computed_ratio: float
    weighted_recall: float


@dataclass(frozen=True)
class TradeoffCandidate:
    """A predictor that was trained for a layer, whether or not it was taken."""

    layer: int
    label: str
    rank: int | None
    points: tuple[TradeoffPoint, ...]


def read_candidates(curves: Iterable[Any]) -> list[TradeoffCandidate]:
    """Return the candidates in `curves`, by layer and rank; entries of another form are passed over."""
    found = []
    for entry in curves:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("points"), Sequence):
            continue
        layer, rank = numbers.whole(entry.get("layer")), numbers.whole(entry.get("rank"))
        points = tuple(sorted(_points(entry["points"]), key=lambda point: point.computed_ratio))
        if layer is not None and points:
            label = ", ".join(drawable(entry[key]) for key in ("kind", "input") if isinstance(entry.get(key), str))
            found.append(TradeoffCandidate(layer, label or "of unknown kind", rank, points))
    return sorted(found, key=lambda candidate: (candidate.layer, candidate.label, candidate.rank or 0))


def _points(rows: Iterable[Any]) -> Iterable[TradeoffPoint]:
    for row in rows:
        if not isinstance(row, Mapping):
            continue
        ratio, recall = numbers.measured(row.get("computed_ratio")), numbers.share(row.get("weighted_recall"))
        if ratio is not None and 0 <= ratio <= _MOST_COMPUTED and recall is not None:
            yield TradeoffPoint(ratio, recall)


def tradeoff_pictures(
    name: str, candidates: Sequence[TradeoffCandidate], layers: Sequence[LayerFigures]
) -> list[PagePicture]:
    """Return a picture for each layer that has candidates; the chosen one is marked."""
    taken = {layer.layer: layer for layer in layers}
    by_layer: dict[int, list[TradeoffCandidate]] = {}
    for candidate in candidates:
        by_layer.setdefault(candidate.layer, []).append(candidate)
    return [_picture(f"{name}-{layer}", layer, found, taken.get(layer)) for layer, found in by_layer.items()]


def _picture(name: str, layer: int, candidates: Sequence[TradeoffCandidate], taken: LayerFigures | None) -> PagePicture:
    ranks = sorted({candidate.rank or 0 for candidate in candidates})
    styles, labels = list(_STYLES.values()), list(dict.fromkeys(candidate.label for candidate in candidates))

    def paint(canvas: Canvas) -> None:
        axes = canvas.axes(x="computed / fire", y="missed contribution (%)")
        for candidate in candidates:
            x = [point.computed_ratio for point in candidate.points]
            y = [100 * max(1 - point.weighted_recall, _LEAST_MISSED) for point in candidate.points]
            colour = ramp(ranks.index(candidate.rank or 0), len(ranks))
            style = styles[labels.index(candidate.label) % len(styles)]
            label = _rank_text(candidate) if candidate.label == labels[0] else None
            (line,) = axes.plot(x, y, color=colour, linestyle=style, linewidth=1.4, label=label)
            canvas.hover(line, f"layer {layer}: {_candidate_text(candidate)}")
        _mark_taken(canvas, axes, taken)
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")
        axes.legend(loc="upper right", fontsize=10, handlelength=1.4, labelspacing=0.25)

    chosen = f"; taken: {_taken_text(taken)}" if taken is not None else ""
    description = f"Layer {layer}: {len(candidates)} candidates, {', '.join(map(_rank_text, candidates))}{chosen}."
    title = f"layer {layer}"
    svg = draw(
        paint, name=name, title=f"Trade-off of {title}", description=description, size=(360, 270), margins=_MARGINS
    )
    return PagePicture(title, svg, " · ".join(filter(None, (_taken_text(taken), _styles_text(labels)))))


def _styles_text(labels: Sequence[str]) -> str:
    """Return the legend of predictor kinds and inputs, if there are several."""
    return ", ".join(f"{style}: {label}" for style, label in zip(_STYLES, labels, strict=False)) if labels[1:] else ""


def _rank_text(candidate: TradeoffCandidate) -> str:
    return candidate.label if candidate.rank is None else f"rank {candidate.rank}"


def _candidate_text(candidate: TradeoffCandidate) -> str:
    return candidate.label if candidate.rank is None else f"rank {candidate.rank}, {candidate.label}"


def _mark_taken(canvas: Canvas, axes: "Axes", taken: LayerFigures | None) -> None:
    if taken is None or taken.computed_ratio is None or taken.weighted_recall is None:
        return
    missed = 100 * max(1 - taken.weighted_recall, _LEAST_MISSED)
    (ring,) = axes.plot(
        taken.computed_ratio, missed, "o", markersize=9, markeredgewidth=2, markerfacecolor="none", color=INK, zorder=5
    )
    canvas.hover(ring, f"taken: {_taken_text(taken)}")


def _taken_text(taken: LayerFigures | None) -> str:
    if taken is None:
        return ""
    rank = "" if taken.rank is None else f", rank {taken.rank}"
    if taken.weighted_recall is None:
        return f"{taken.kind}{rank}"
    recall, ratio = numbers.recall(taken.weighted_recall), numbers.times(taken.computed_ratio)
    return f"{taken.kind}{rank}: {recall} by contribution, {ratio}"


_COLUMNS: Mapping[str, Callable[[LayerFigures], str]] = {
    "layer": lambda layer: str(layer.layer),
    "kind": lambda layer: layer.kind,
    "input": lambda layer: layer.input or NOTHING,
    "rank": lambda layer: numbers.count(layer.rank),
    "parameters": lambda layer: numbers.count(layer.parameters),
    "in f16": lambda layer: numbers.size(layer.bytes_f16),
    "threshold": lambda layer: numbers.decimal(layer.threshold),
    "fire": lambda layer: numbers.percent(layer.firing_share, 2),
    "computed": lambda layer: numbers.percent(layer.computed_share, 2),
    "computed / fire": lambda layer: numbers.times(layer.computed_ratio),
    "recall": lambda layer: numbers.recall(layer.recall),
    "by contribution": lambda layer: numbers.recall(layer.weighted_recall),
    "target": lambda layer: numbers.recall(layer.target),
    "precision": lambda layer: numbers.percent(layer.precision, 1),
    "skewness": lambda layer: numbers.percent(layer.skewness, 1),
    "missed energy": lambda layer: numbers.percent(layer.missed_energy, 3),
}
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


def predictors_section(anchor: str, predictors: Predictors, profiles: Sequence[FiringProfile]) -> PageSection:
    """Return the section: accuracy check, sizes, accuracy and trade-offs. A profile may add how layers fire."""
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
    parts: list[Part | None] = [accuracy_table(predictors.accuracy, layers)]
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
    return PageSection(anchor, kind="predictors", name=str(predictors.path), facts=facts, parts=found)


def accuracy_pictures(anchor: str, layers: Sequence[LayerFigures]) -> list[PagePicture]:
    """Return the pictures of recall and precision, computed neurons, and missed energy, if measured."""
    found = (
        accuracy_picture(f"{anchor}-accuracy", layers),
        computed_picture(f"{anchor}-computed", layers),
        missed_picture(f"{anchor}-missed", layers),
    )
    return [picture for picture in found if picture is not None]


def layers_table(layers: Sequence[LayerFigures], words: str) -> Table:
    """Return the known facts about each layer's predictor."""
    return Table.of("Each layer", layers, _COLUMNS, frozenset({"kind", "input"}), words).without_empty()


def kinds_text(kinds: Sequence[str]) -> str:
    """`exact × 1, learned × 5`."""
    return ", ".join(f"{kind} × {kinds.count(kind)}" for kind in dict.fromkeys(kinds)) or NOTHING
