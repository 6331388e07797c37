"""Pictures of a plan: its split, its times and memory, with the same colours in all of them."""

from typing import TYPE_CHECKING, Any

from picompile.placement.plan import Plan, PlanLayer
from picompile.report import numbers
from picompile.report.drawing import FAINT, INK, MUTED, SERIES, WIDTH, Canvas, drawable, layer_axis, picture
from picompile.report.numbers import PagePicture

if TYPE_CHECKING:
    from matplotlib.axes import Axes


PARTS = {
    "hot": ("hot neurons", SERIES[1]),
    "cold": ("cold neurons", SERIES[0]),
    "attention": ("attention", SERIES[2]),
    "kv_cache": ("KV cache", SERIES[3]),
    "predict": ("predictor", SERIES[4]),
    "exchange": ("transfer", MUTED),
}
"""The parts of a layer's time → (name, colour)."""

DEVICES = {"accelerator": "GPU", "host": "host"}

_KINDS = {
    "hot neurons": ("hot neurons", SERIES[1]),
    "cold neurons": ("cold neurons", SERIES[0]),
    "attention": ("attention", SERIES[2]),
    "kv cache": ("KV cache", SERIES[3]),
    "predictors": ("predictors", SERIES[4]),
    "output head": ("embedding, output head", SERIES[5]),
    "embedding": ("embedding, output head", SERIES[5]),
    "workspace": ("workspace, tables", MUTED),
    "tables": ("workspace, tables", MUTED),
    "staging": ("workspace, tables", MUTED),
}


def kind_of_memory(what: str) -> tuple[str, str]:
    """Return (name in the legend, colour) for a kind of memory; several kinds may share one."""
    return _KINDS.get(what) or (drawable(what), FAINT)


# A layer's parts from the axis outwards; the neurons first, so that hot and cold ones can be compared across it.
_ABOVE = ("attention", "kv_cache", "predict", "exchange")


def split_picture(name: str, plan: Plan) -> PagePicture:
    """Return the picture of each layer's share of neurons on the GPU, and of computed ones."""
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
    return picture(paint, name, title="What is on the GPU", description=_split_description(plan), words=words)


def time_picture(name: str, plan: Plan) -> PagePicture:
    """Return the picture of each layer's predicted times, with a part that another one hides below the axis."""
    unit, factor = numbers.time_unit(max((layer.total_s for layer in plan.layers), default=0.0))
    shown = [part for part in PARTS if any(part in _stack(layer) for layer in plan.layers)]

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
        "Each layer's predicted share of a token's time, by part. Hot neurons, on the GPU, and cold ones, on the host, "
        "are computed at once: the slower of them counts and is above the axis, the other below. A predictor's time "
        "does not include the part that passes while the layer before waits for the host."
    )
    return picture(paint, name, title="Where a token's time goes", description=_time_description(plan), words=words)


def seconds_of(layer: PlanLayer, part: str) -> float:
    """Return the expected seconds of a part in `PARTS`."""
    return float(getattr(layer, f"{part}_s"))


def hot_share(layer: PlanLayer) -> float:
    """Return the share of a layer's neurons that is hot."""
    return numbers.ratio(layer.hot_neurons, layer.neurons) or 0.0


def hot_computed_share(layer: PlanLayer) -> float | None:
    """Return the share of a layer's computed neurons that is hot; None if none is computed."""
    return numbers.ratio(layer.hot_computed, layer.computed)


def hot_shares(plan: Plan) -> tuple[float | None, float | None]:
    """Return the hot share of the model's neurons, and the hot share of its computed neurons."""
    layers = plan.layers
    hot, neurons = sum(layer.hot_neurons for layer in layers), sum(layer.neurons for layer in layers)
    computed = sum(layer.hot_computed for layer in layers), sum(layer.computed for layer in layers)
    return numbers.ratio(hot, neurons), numbers.ratio(*computed)


def _stack(layer: PlanLayer) -> dict[str, tuple[float, float]]:
    """Return (start, height) of each part's bar in seconds; the hidden part's bar goes downwards."""
    slower, quicker = ("hot", "cold") if layer.hot_s >= layer.cold_s else ("cold", "hot")
    bars, top = {}, 0.0
    for part in (slower, *_ABOVE):
        if height := seconds_of(layer, part) - (layer.predict_hidden_s if part == "predict" else 0.0):
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
    places = {"attention": layer.attention, "kv_cache": layer.kv_cache, "predict": layer.predictor}
    place = f" on the {DEVICES.get(places[part], places[part])}" if part in places else ""
    hidden = ""
    if part == "predict" and layer.predict_hidden_s:
        hidden = f", {numbers.seconds(layer.predict_hidden_s)} of it in the layer before,"
    return f"layer {layer.layer}: {title}{place}, {duration}{hidden} of {numbers.seconds(layer.total_s)}"


def _split_description(plan: Plan) -> str:
    hot, computed = map(numbers.percent, hot_shares(plan))
    return f"{hot} of the neurons are on the GPU, among them {computed} of those computed for a token."


def _time_description(plan: Plan) -> str:
    sums = {part: sum(seconds_of(layer, part) for layer in plan.layers) for part in PARTS}
    parts = ", ".join(f"{PARTS[part][0]} {numbers.seconds(taken)}" for part, taken in sums.items() if taken)
    return f"Of {numbers.seconds(plan.token_s)} for a token, all layers together: {parts or 'nothing'}."


def devices_of(plan: Plan) -> list[str]:
    """Return the devices that have a budget, or that something lies on."""
    return [device for device in DEVICES if plan.budget_bytes(device) or plan.taken_bytes(device)]


def memory_picture(name: str, plan: Plan) -> PagePicture:
    """Return a bar for each device, by kind of use, up to its budget and its memory."""
    devices = devices_of(plan)

    def paint(canvas: Canvas) -> None:
        axes, named = canvas.axes(x="share of the budget (%)", y=""), set[str]()
        largest = max(
            [
                100.0,
                *(
                    _draw_device(canvas, axes, plan, device=each, place=i, named=named)
                    for i, each in enumerate(devices)
                ),
            ]
        )
        axes.axvline(100, color=INK, linewidth=1.2)
        axes.set_yticks(range(len(devices)), [DEVICES[device] for device in devices])
        axes.set(xlim=(0, 1.03 * largest), ylim=(len(devices) - 0.45, -0.75))
        axes.grid(axis="y", visible=False)
        if named:
            canvas.figure.legend(loc="outside lower center", ncols=2)

    words = (
        "What the plan puts on each device, as a share of the device's budget. Dashed: the budget less its margin, up "
        "to which the plan may fill it. Solid: the budget."
    )
    description = "; ".join(_description(plan, device) for device in devices) or "Nothing is taken"
    size = (WIDTH, 170 + 75 * max(len(devices), 1))
    return picture(
        paint, name, title="What it takes of the memory", description=f"{description}.", words=words, size=size
    )


def _bar_style(colour: str, label: str | None) -> dict[str, Any]:
    """Return the style of a bar; an edge of its own colour makes the smallest bars visible."""
    return {"color": colour, "edgecolor": colour, "linewidth": 0.4, "label": label}


def _draw_device(canvas: Canvas, axes: "Axes", plan: Plan, device: str, place: int, named: set[str]) -> float:
    """Draw the bar of a device and return where it ends; `named` are the kinds that the legend has already."""
    percent, left = 100 / (plan.budget_bytes(device) or plan.taken_bytes(device)), 0.0
    for (title, colour), taken in _bytes_by_title(plan, device).items():
        style = _bar_style(colour, None if title in named else title)
        (bar,) = axes.barh(place, percent * taken, left=left, height=0.5, **style)
        canvas.hover(bar, f"{DEVICES[device]}: {title} {numbers.size(taken)}")
        named.add(title)
        left += percent * taken
    capacity = percent * plan.capacity_bytes(device)
    (line,) = axes.plot([capacity] * 2, [place - 0.36, place + 0.36], color=INK, linestyle=(0, (4, 2)))
    canvas.hover(line, f"{DEVICES[device]}: {numbers.size(plan.capacity_bytes(device))} may be taken")
    axes.annotate(budget_text(plan, device), (0, place - 0.38), va="bottom")
    return left


def _bytes_by_title(plan: Plan, device: str) -> dict[tuple[str, str], int]:
    """Return the bytes by (name in the legend, colour), the largest first."""
    found: dict[tuple[str, str], int] = {}
    for what, sizes in plan.bytes_by_kind().items():
        if taken := sizes.get(device):
            kind = kind_of_memory(what)
            found[kind] = found.get(kind, 0) + taken
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))


def budget_text(plan: Plan, device: str) -> str:
    """Return the part of a device's budget that a plan takes: `17.2 GB of 24 GB`."""
    return f"{numbers.size(plan.taken_bytes(device))} of {numbers.size(plan.budget_bytes(device))}"


def _description(plan: Plan, device: str) -> str:
    parts = ", ".join(f"{title} {numbers.size(taken)}" for (title, _), taken in _bytes_by_title(plan, device).items())
    of = f"of which {numbers.size(plan.capacity_bytes(device))} may be taken"
    return f"{DEVICES[device]}: {budget_text(plan, device)}, {of}: {parts or 'nothing'}"
