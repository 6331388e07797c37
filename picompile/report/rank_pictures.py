"""Pictures of predictors' sizes: rank against how a layer fires."""

from collections.abc import Callable, Sequence

from picompile.report import numbers
from picompile.report.blocks import Picture
from picompile.report.drawing import Canvas, draw, ramp
from picompile.report.layers import LayerFigures

_NUMBERED_LAYERS = 16


def rank_pictures(name: str, layers: Sequence[LayerFigures]) -> list[Picture]:
    """Rank against sparsity and against skewness; none where no predictor has a rank."""
    found = []
    for key, measure, axis, words in (
        (
            "sparsity",
            lambda layer: None if layer.firing_share is None else 1 - layer.firing_share,
            "neurons that stay silent (%)",
            "A point is a layer. Sparsity is the share of its neurons that do not fire for a token, on average. The "
            "rank is the width of the predictor in the middle: its size grows with it.",
        ),
        (
            "skewness",
            lambda layer: layer.skewness,
            "firings made by the most active fifth (%)",
            "A point is a layer. Skewness is the share of its firings that the most active fifth of its neurons makes: "
            "20 % where all fire alike, 100 % where a few make all. Where the same neurons fire for every token, less "
            "is left to predict.",
        ),
    ):
        picture = _rank_picture(f"{name}-{key}", layers, measure, f"Rank against {key}", axis, words)
        found += [] if picture is None else [picture]
    return found


def _rank_picture(
    name: str,
    layers: Sequence[LayerFigures],
    measure: Callable[[LayerFigures], float | None],
    title: str,
    axis: str,
    words: str,
) -> Picture | None:
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
    first, rest = words.split(". ", 1)
    words = f"{first}.{numbered} {rest}"
    return Picture(title, draw(paint, name=name, title=title, description=description), words)
