"""Pictures of predictors, layer by layer: their accuracy, the energy that they miss, and their ranks."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from picompile.report import numbers
from picompile.report.drawing import HEIGHT, INK, SERIES, WIDTH, Canvas, from_zero, layer_axis, picture, ramp
from picompile.report.layer_figures import LayerFigures
from picompile.report.numbers import PagePicture

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Layers = Sequence[LayerFigures]


def accuracy_picture(name: str, layers: Layers) -> PagePicture | None:
    """Return the picture of recall, recall by contribution and precision; None if nothing was measured."""
    series = {
        "by contribution": [layer.weighted_recall for layer in layers],
        "recall": [layer.recall for layer in layers],
        "precision": [layer.precision for layer in layers],
    }
    if not any(value is not None for values in series.values() for value in values):
        return None

    def paint(canvas: Canvas) -> None:
        above, below = canvas.figure.subplots(2, 1, sharex=True)
        for axes, what, marker, colour in (
            (above, "by contribution", "o", SERIES[0]),
            (above, "recall", "s", SERIES[1]),
            (below, "precision", "D", SERIES[2]),
        ):
            _dots(canvas, axes, layers, values=series[what], what=what, marker=marker, colour=colour)
        lowest = min((v for key in ("by contribution", "recall") for v in series[key] if v is not None), default=0.0)
        above.set_ylim(100 - 112 * max(1 - lowest, 0.001), 100 + 12 * max(1 - lowest, 0.001))
        above.set_ylabel("recall (%)")
        below.set_ylabel("precision (%)")
        below.set_ylim(0, 105)
        above.legend(loc="lower center", bbox_to_anchor=(0.5, 0.98), ncols=2)
        layer_axis(canvas, above, below)

    words = (
        "Recall: of the neurons that fire, the share that is computed. By contribution: the same, but each firing "
        "counts by what it adds to the layer's output, |h| times the length of its row of the down matrix, since "
        "missing a weak one costs little. Precision: of the neurons that are computed, the share that fires."
    )
    description = "; ".join(
        f"{what} from {numbers.recall(min(known))} to {numbers.recall(max(known))}"
        for what, values in series.items()
        if (known := [value for value in values if value is not None])
    )
    return picture(paint, name, title="Recall and precision", description=f"{description}.", words=words)


def computed_picture(name: str, layers: Layers) -> PagePicture | None:
    """Return the picture of computed against firing neurons; None if nothing was measured."""
    rows = [
        (layer.layer, layer.firing_share, layer.computed_share)
        for layer in layers
        if layer.firing_share is not None and layer.computed_share is not None
    ]
    if not rows:
        return None

    def paint(canvas: Canvas) -> None:
        axes = canvas.axes(x="layer", y="neurons, per token (%)")
        for layer, firing, computed in rows:
            (line,) = axes.plot([layer, layer], [100 * firing, 100 * computed], color=INK, linewidth=1, zorder=1)
            canvas.hover(line, _computed_text(layer, firing, computed))
        for number, what, marker, place in ((0, "fire", "o", 1), (1, "are computed", "s", 2)):
            for position, row in enumerate(rows):
                label = what if position == 0 else None
                (dot,) = axes.plot(row[0], 100 * row[place], marker, color=SERIES[number], label=label, zorder=2)
                canvas.hover(dot, _computed_text(*row))
        from_zero(axes, max(max(row[1:]) for row in rows))
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 0.98), ncols=2)
        layer_axis(canvas, axes)

    words = (
        "The share of a layer's neurons that fire for a token, and the share that its predictor has computed for it. "
        "What lies between is computed in vain, but for the firings that are missed."
    )
    ratios = [ratio for _, firing, computed in rows if (ratio := numbers.ratio(computed, firing)) is not None]
    description = "Neurons that are computed against those that fire"
    if ratios:
        description += f": from {numbers.times(min(ratios))} to {numbers.times(max(ratios))}"
    return picture(paint, name, title="Computed against firing", description=f"{description}.", words=words)


def missed_picture(name: str, layers: Layers) -> PagePicture | None:
    """Return the missed share of each block's output; None if it was not measured, or is zero everywhere."""
    rows = [(layer.layer, layer.missed_energy) for layer in layers if layer.missed_energy is not None]
    if not any(missed for _, missed in rows):
        return None

    def paint(canvas: Canvas) -> None:
        axes = canvas.axes(x="layer", y="missed energy (%)")
        bars = axes.bar([layer for layer, _ in rows], [100 * missed for _, missed in rows], color=SERIES[3], width=0.75)
        for bar, (layer, missed) in zip(bars, rows, strict=True):
            canvas.hover(bar, f"layer {layer}: {numbers.percent(missed, 3)} of the energy is missed")
        layer_axis(canvas, axes)

    words = (
        "What the neurons that fired but were left out would have added to the output of their block: its squared "
        "length, as a share of that of the whole output. The highest bars are the layers in which most "
        "of the perplexity is lost."
    )
    worst, most = max(rows, key=lambda row: row[1])
    description = f"Most is missed in layer {worst}: {numbers.percent(most, 3)}."
    return picture(paint, name, title="What is missed", description=description, words=words)


def _computed_text(layer: int, firing: float, computed: float) -> str:
    ratio = numbers.times(numbers.ratio(computed, firing))
    return f"layer {layer}: {numbers.percent(firing)} fire, {numbers.percent(computed)} are computed, {ratio}"


def _dots(
    canvas: Canvas,
    axes: "Axes",
    layers: Layers,
    values: Sequence[float | None],
    what: str,
    marker: str,
    colour: str,
) -> None:
    """A faint line over the layers, and a dot with its figure for each of them."""
    known = [(layer.layer, value) for layer, value in zip(layers, values, strict=True) if value is not None]
    axes.plot([layer for layer, _ in known], [100 * value for _, value in known], color=colour, linewidth=0.8)
    for position, (layer, value) in enumerate(known):
        label = what if position == 0 else None
        (dot,) = axes.plot(layer, 100 * value, marker, color=colour, markersize=6, label=label)
        canvas.hover(dot, f"layer {layer}: {what} {numbers.recall(value)}")


_NUMBERED_LAYERS = 16


def rank_pictures(name: str, layers: Sequence[LayerFigures]) -> list[PagePicture]:
    """Return pictures of rank against sparsity and skewness; none if no predictor has a rank."""
    found = []
    for key, measure, axis, words in (
        (
            "sparsity",
            lambda layer: None if layer.firing_share is None else 1 - layer.firing_share,
            "neurons that stay silent (%)",
            "Sparsity is the share of its neurons that do not fire for a token, on average. The "
            "rank is the width of the predictor in the middle: its size grows with it.",
        ),
        (
            "skewness",
            lambda layer: layer.skewness,
            "firings made by the most active fifth (%)",
            "Skewness is the share of its firings that the most active fifth of its neurons makes: "
            "20 % where all fire alike, 100 % where a few make all. Where the same neurons fire for every token, less "
            "is left to predict.",
        ),
    ):
        found.append(
            _rank_picture(f"{name}-{key}", layers, measure, title=f"Rank against {key}", axis=axis, words=words)
        )
    return [each for each in found if each is not None]


def _rank_picture(
    name: str,
    layers: Sequence[LayerFigures],
    measure: Callable[[LayerFigures], float | None],
    title: str,
    axis: str,
    words: str,
) -> PagePicture | None:
    points = [
        (position, layer, value, layer.rank)
        for position, layer in enumerate(layers)
        if (value := measure(layer)) is not None and layer.rank is not None
    ]
    if not points:
        return None

    def paint(canvas: Canvas) -> None:
        axes = canvas.axes(x=axis, y="rank of the predictor")
        for position, layer, value, rank in points:
            (dot,) = axes.plot(100 * value, rank, "o", color=ramp(position, len(layers)), markersize=8)
            canvas.hover(dot, f"layer {layer.layer}: rank {rank}, {numbers.percent(value)}")
            if len(layers) <= _NUMBERED_LAYERS:
                axes.annotate(
                    str(layer.layer), (100 * value, rank), xytext=(6, 4), textcoords="offset points", fontsize=11
                )
        axes.set_ylim(0, 1.15 * max(rank for *_, rank in points))
        axes.margins(x=0.12)

    ranks = [rank for *_, rank in points]
    description = f"{len(points)} layers; ranks from {min(ranks)} to {max(ranks)}; in numbers in the table of layers."
    numbered = " The number beside it is the layer's." if len(layers) <= _NUMBERED_LAYERS else ""
    words = f"A point is a layer.{numbered} {words}"
    return picture(paint, name, title, description, words, size=(WIDTH, HEIGHT))
