"""Pictures of a profile: which neurons make the firings, and how many neurons fire in each layer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from picompile.report.blocks import Picture
from picompile.report.drawing import INK, SERIES, TALL, Canvas, draw, from_zero, layer_axis, ramp
from picompile.report.firing import Counts, Firing, firing_curve, sampled, share_for
from picompile.report.numbers import counted, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMED_LAYERS = 8


def curves_picture(name: str, counts: Mapping[int, Counts]) -> Picture:
    """Share of the neurons against share of the firings: a line for each layer and one for the model."""
    model = firing_curve(np.concatenate([np.asarray(layer).ravel() for layer in counts.values()]))
    mark = share_for(model, 0.8)

    def paint(canvas: Canvas) -> None:
        axes = canvas.axes(x="neurons, most active first (%)", y="share of all firings (%)")
        named = _named(list(counts))
        for position, (layer, values) in enumerate(counts.items()):
            curve = firing_curve(values)
            label = f"layer {layer}" if layer in named else None
            (line,) = axes.plot(*sampled(curve), color=ramp(position, len(counts)), linewidth=1.2, label=label)
            canvas.hover(line, f"layer {layer}: {_makers(share_for(curve, 0.8))}")
        (line,) = axes.plot(*sampled(model), color=INK, linewidth=2.6, label="whole model")
        canvas.hover(line, f"whole model: {_makers(mark)}")
        if mark is not None:
            _mark(axes, 100 * mark)
        axes.set(xlim=(0, 100), ylim=(0, 101))
        axes.legend(loc="lower right", bbox_to_anchor=(1, 0.16))

    words = (
        "The neurons of a layer, or of the whole model, stand in the order of how often they fire. The line says what "
        "share of all firings the first of them make. The steeper it begins, the fewer neurons do most of the work; on "
        "the diagonal all would fire alike."
    )
    shares = {layer: share_for(firing_curve(values), 0.8) for layer, values in counts.items()}
    description = f"Whole model: {_makers(mark)}"
    if extremes := _extremes({layer: share for layer, share in shares.items() if share is not None}):
        description += f"; by layer from {extremes[0]} to {extremes[1]}"
    title = "Who makes the firings"
    return Picture(title, draw(paint, name=name, title=title, description=f"{description}.", size=TALL), words)


def layers_picture(name: str, layers: Mapping[int, Firing]) -> Picture:
    """Share of the neurons that fire for a token, and of those that never fired, per layer."""
    shares = {layer: figures.firing_share for layer, figures in layers.items()}
    never = {layer: figures.never_fired / figures.neurons for layer, figures in layers.items()}
    mean = sum(f.firing_share * f.neurons for f in layers.values()) / sum(f.neurons for f in layers.values())

    def paint(canvas: Canvas) -> None:
        above, below = canvas.figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        for axes, values, colour, what in (
            (above, shares, SERIES[0], "fire"),
            (below, never, SERIES[1], "never fired"),
        ):
            bars = axes.bar(list(values), [100 * share for share in values.values()], color=colour, width=0.75)
            for bar, (layer, share) in zip(bars, values.items(), strict=True):
                canvas.hover(bar, f"layer {layer}: {percent(share, 2)} of the neurons {what}")
            from_zero(axes, max(values.values()), 1.0)
        above.axhline(100 * mean, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        above.set_title(f"mean {percent(mean)}", loc="right")
        above.set_ylabel("fire for a token (%)")
        below.set_ylabel("never fired (%)")
        layer_axis(canvas, above, below)

    words = (
        "Above: the share of a layer's neurons that fire for a token, on average; the dashed line is the mean of all "
        "neurons. Below: the share that fired for no token of the calibration text at all."
    )
    least, most = _extremes(shares) or ("", "")
    lost = counted(sum(figures.never_fired for figures in layers.values()), "neuron")
    description = f"From {least} to {most} of the neurons fire for a token; {lost} never fired."
    title = "How many fire"
    return Picture(title, draw(paint, name=name, title=title, description=description, size=TALL), words)


def _mark(axes: "Axes", place: float) -> None:
    """Points out which percentage of the neurons makes 80 % of the firings."""
    axes.plot([0, place, place], [80, 80, 0], color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.plot(place, 80, "o", color=INK, markersize=6)
    right = place < 50
    text = f"{percent(place / 100)} of the neurons\nmake 80 % of the firings"
    axes.annotate(text, (place + (2 if right else -2), 3), ha="left" if right else "right")


def _makers(share: float | None) -> str:
    return "nothing fired" if share is None else f"{percent(share)} of the neurons make 80 % of the firings"


def _named(layers: list[int]) -> set[int]:
    """The layers that the legend names: all, or a few from the first to the last."""
    if len(layers) <= _NAMED_LAYERS:
        return set(layers)
    return {layers[round(place * (len(layers) - 1) / 4)] for place in range(5)}


def _extremes(shares: Mapping[int, float]) -> tuple[str, str] | None:
    """The least and the most of the shares, each with its layer; None where there are none."""
    if not shares:
        return None
    least, most = min(shares, key=lambda layer: shares[layer]), max(shares, key=lambda layer: shares[layer])
    return f"{percent(shares[least])} (layer {least})", f"{percent(shares[most])} (layer {most})"
