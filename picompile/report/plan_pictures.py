"""Pictures of a plan by layer: what lies on the GPU, and where the time of a token is expected to go."""

from picompile.placement.plan import Plan, PlanLayer
from picompile.report import numbers
from picompile.report.blocks import Picture
from picompile.report.drawing import INK, SERIES, TALL, Canvas, draw, layer_axis
from picompile.report.plan_colours import DEVICES, PARTS

# A layer's parts from the axis outwards; the neurons first, so that hot and cold ones can be compared across it.
_ABOVE = ("attention", "kv_cache", "predict", "exchange")


def split_picture(name: str, plan: Plan) -> Picture:
    """Per layer, the share of the neurons on the GPU, and of those that are computed."""
    shares = {layer.layer: hot_share(layer) for layer in plan.layers}
    computed = {layer.layer: share for layer in plan.layers if (share := hot_computed_share(layer)) is not None}
    texts = {layer.layer: _split_text(layer) for layer in plan.layers}

    def paint(canvas: Canvas) -> None:
        axes = canvas.axes(x="", y="on the GPU (%)")
        heights = [100 * share for share in shares.values()]
        bars = axes.bar(list(shares), heights, color=SERIES[1], width=0.75, label="of the neurons")
        for bar, text in zip(bars, texts.values(), strict=True):
            canvas.hover(bar, text)
        for number, share in computed.items():
            label = "of the computed neurons" if number == next(iter(computed)) else None
            (point,) = axes.plot(number, 100 * share, "o", color=INK, markersize=_mark_size(len(shares)), label=label)
            canvas.hover(point, texts[number])
        largest = max([*shares.values(), *computed.values()])
        axes.set_ylim(0, min(105, max(115 * largest, 1)))
        layer_axis(canvas, axes)
        canvas.figure.legend(loc="outside lower center", ncols=2, reverse=True)

    words = (
        "Bars: the share of a layer's neurons that lie on the GPU, the most active first. Points: the share of the "
        "neurons computed for a token that are among them. The further the point is above its bar, the more the choice "
        "of the neurons gains."
    )
    title = "What is on the GPU"
    return Picture(title, draw(paint, name=name, title=title, description=_split_description(plan), size=TALL), words)


def time_picture(name: str, plan: Plan) -> Picture:
    """Per layer, the expected seconds of each part; what another part hides is below the axis."""
    unit, factor = numbers.time_unit(max((layer.total_s for layer in plan.layers), default=0.0))
    shown = [part for part in PARTS if any(seconds_of(layer, part) for layer in plan.layers)]

    def paint(canvas: Canvas) -> None:
        axes = canvas.axes(x="", y=f"predicted time ({unit})")
        for part in shown:
            title, colour = PARTS[part]
            places = {layer.layer: (layer, *place) for layer in plan.layers if (place := _stack(layer).get(part))}
            heights = [factor * height_s for _, _, height_s in places.values()]
            starts = [factor * start_s for _, start_s, _ in places.values()]
            bars = axes.bar(list(places), heights, bottom=starts, color=colour, width=0.75, label=title)
            for bar, (layer, _, _) in zip(bars, places.values(), strict=True):
                canvas.hover(bar, _part_text(layer, part))
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
        layer_axis(canvas, axes)
        if shown:
            canvas.figure.legend(loc="outside lower center", ncols=3)

    words = (
        "What a layer is expected to take of a token's time, by part. Hot neurons, on the GPU, and cold ones, on the "
        "host, are computed at the same time: the slower of them counts and is above the axis, the other below."
    )
    title = "Where a token's time goes"
    return Picture(title, draw(paint, name=name, title=title, description=_time_description(plan), size=TALL), words)


def seconds_of(layer: PlanLayer, part: str) -> float:
    """The expected seconds of a part in `PARTS`."""
    return float(getattr(layer, f"{part}_s"))


def hot_share(layer: PlanLayer) -> float:
    """Of the layer's neurons."""
    return numbers.ratio(layer.hot_neurons, layer.neurons) or 0.0


def hot_computed_share(layer: PlanLayer) -> float | None:
    """Of the neurons that are computed; None where none is."""
    return numbers.ratio(layer.hot_computed, layer.computed)


def hot_shares(plan: Plan) -> tuple[float | None, float | None]:
    """Of all neurons of the model, and of those that are computed."""
    layers = plan.layers
    hot, neurons = sum(layer.hot_neurons for layer in layers), sum(layer.neurons for layer in layers)
    computed = sum(layer.hot_computed for layer in layers), sum(layer.computed for layer in layers)
    return numbers.ratio(hot, neurons), numbers.ratio(*computed)


def device_of(layer: PlanLayer, part: str) -> str:
    """Where a part of a layer is computed, in words."""
    places = {"hot": "gpu", "cold": "host", "exchange": "link", "predict": layer.predictor}
    place = places.get(part) or (layer.kv_cache if part == "kv_cache" else layer.attention)
    return DEVICES.get(place, place)


def _stack(layer: PlanLayer) -> dict[str, tuple[float, float]]:
    """Part → (start, height) of its bar, in seconds: from the axis upwards, what is hidden downwards."""
    slower, quicker = ("hot", "cold") if layer.hot_s >= layer.cold_s else ("cold", "hot")
    bars, top = {}, 0.0
    for part in (slower, *_ABOVE):
        if height := seconds_of(layer, part):
            bars[part] = top, height
            top += height
    if hidden := seconds_of(layer, quicker):
        bars[quicker] = 0.0, -hidden
    return bars


def _mark_size(layers: int) -> float:
    return 7 if layers <= 12 else 4.5 if layers <= 48 else 3


def _split_text(layer: PlanLayer) -> str:
    computed = (
        "" if (share := hot_computed_share(layer)) is None else f", {numbers.percent(share)} of the computed ones"
    )
    hot, neurons = f"{layer.hot_neurons:,}", f"{layer.neurons:,}"
    return f"layer {layer.layer}: {hot} of {neurons} neurons ({numbers.percent(hot_share(layer))}){computed}"


def _part_text(layer: PlanLayer, part: str) -> str:
    title, duration = PARTS[part][0], numbers.seconds(seconds_of(layer, part))
    place = f" on the {device_of(layer, part)}" if part in ("attention", "kv_cache", "predict") else ""
    return f"layer {layer.layer}: {title}{place}, {duration} of {numbers.seconds(layer.total_s)}"


def _split_description(plan: Plan) -> str:
    hot, computed = map(numbers.percent, hot_shares(plan))
    return f"{hot} of the neurons are on the GPU, among them {computed} of those computed for a token."


def _time_description(plan: Plan) -> str:
    sums = {part: sum(seconds_of(layer, part) for layer in plan.layers) for part in PARTS}
    parts = ", ".join(f"{PARTS[part][0]} {numbers.seconds(taken)}" for part, taken in sums.items() if taken)
    return f"Of {numbers.seconds(plan.token_s)} for a token, all layers together: {parts or 'nothing'}."
