"""Timelines of a plan: which device does what when, for the first layers of each kind that the plan has."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from picompile.placement.plan import Plan, PlanLayer
from picompile.report import numbers
from picompile.report.blocks import Picture
from picompile.report.drawing import FAINT, Canvas, draw
from picompile.report.plan_colours import DEVICES, STEPS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from picompile.placement.schedule import Step

_MOST_LAYERS = 3
_MOST_KINDS = 4


def timeline_pictures(name: str, plan: Plan) -> tuple[list[Picture], int]:
    """A picture for each kind of layer, of the first of them that follow one another, and how many kinds have none.

    Those of the most layers are drawn.
    """
    steps, windows = plan_schedule(plan), list(_windows(plan.layers))
    common = sorted(windows, key=lambda window: -window[1])[:_MOST_KINDS]
    drawn = [window for window in windows if window in common]
    pictures = [_picture(f"{name}-{i}", plan, window, count, steps) for i, (window, count) in enumerate(drawn)]
    return pictures, len(windows) - len(drawn)


def plan_schedule(plan: Plan) -> "list[Step]":
    """The steps of a token by the plan, each with its start and end; of devices that there are."""
    from picompile.placement.schedule import plan_graph, schedule

    graph = plan_graph(plan.layers, (plan.head, plan.head_s), plan.switch_s)
    return [step for step in schedule(graph) if step.device in DEVICES and step.part in STEPS]


def _kind(layer: PlanLayer) -> tuple[str, str, str, bool, bool]:
    """What makes two layers alike: which devices do what."""
    return layer.attention, layer.kv_cache, layer.predictor, bool(layer.hot_s), bool(layer.cold_s)


def _windows(layers: Sequence[PlanLayer]) -> Iterator[tuple[range, int]]:
    """Per kind the places of its first layers that follow one another, and how many layers are of the kind."""
    kinds = [_kind(layer) for layer in layers]
    for kind in dict.fromkeys(kinds):
        first = last = kinds.index(kind)
        while last + 1 < min(len(kinds), first + _MOST_LAYERS) and kinds[last + 1] == kind:
            last += 1
        yield range(first, last + 1), kinds.count(kind)


def _picture(name: str, plan: Plan, window: range, count: int, steps: "Sequence[Step]") -> Picture:
    # Of a model this small the output head is shown as well.
    whole = len(window) == len(plan.layers)
    shown = [step for step in steps if step.layer in window or (whole and step.layer is None)]
    lanes = [device for device in DEVICES if any(step.device == device for step in shown)]
    start = min((step.start_s for step in shown), default=0.0)
    unit, factor = numbers.time_unit(max((step.end_s for step in shown), default=0.0) - start)

    def paint(canvas: Canvas) -> None:
        axes = canvas.axes(x=f"predicted time ({unit})", y="")
        for number in window:
            if began := [step.start_s for step in shown if step.layer == number]:
                _begin_layer(axes, (min(began) - start) * factor, f" layer {plan.layers[number].layer}")
        for (title, colour), alike in _by_title(shown).items():
            widths = [(step.end_s - step.start_s) * factor for step in alike]
            starts = [(step.start_s - start) * factor for step in alike]
            places = [lanes.index(step.device) for step in alike]
            # An edge of its own colour, so that the shortest steps are seen as well.
            style: dict[str, Any] = {"color": colour, "edgecolor": colour, "linewidth": 0.4, "label": title}
            for bar, step in zip(axes.barh(places, widths, left=starts, height=0.6, **style), alike, strict=True):
                canvas.hover(bar, _step_text(plan, step))
        axes.set_yticks(range(len(lanes)), [DEVICES[lane] for lane in lanes])
        axes.set_ylim(max(len(lanes), 1) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        if shown:
            canvas.figure.legend(loc="outside lower center", ncols=3)

    title = f"One token in {_layers_text(plan, window)}"
    description = ", ".join(_step_text(plan, step) for step in shown) or "Nothing takes time"
    size = (440, 150 + 42 * max(len(lanes), 1))
    svg = draw(paint, name=name, title=title, description=f"{description}.", size=size)
    return Picture(title, svg, f"{_kind_text(plan.layers[window[0]])} {_count_text(count, len(plan.layers))}")


def _begin_layer(axes: "Axes", place: float, text: str) -> None:
    axes.axvline(place, color=FAINT, linewidth=1.2)
    axes.annotate(text, (place, 1), xycoords=("data", "axes fraction"), va="bottom")


def _by_title(steps: "Sequence[Step]") -> "dict[tuple[str, str], list[Step]]":
    """(name, colour) → steps, in the order of `STEPS`."""
    found: dict[tuple[str, str], list[Step]] = {}
    for step in sorted(steps, key=lambda step: list(STEPS).index(step.part)):
        found.setdefault(STEPS[step.part], []).append(step)
    return found


def _layers_text(plan: Plan, window: range) -> str:
    first, last = plan.layers[window[0]].layer, plan.layers[window[-1]].layer
    return f"layer {first}" if first == last else f"layers {first} to {last}"


def _step_text(plan: Plan, step: "Step") -> str:
    title, duration = STEPS[step.part][0], numbers.seconds(step.end_s - step.start_s)
    where = "" if step.layer is None else f"layer {plan.layers[step.layer].layer}: "
    return f"{where}{title}, {duration} on the {DEVICES[step.device]}"


def _kind_text(layer: PlanLayer) -> str:
    kv_cache = (
        "with its KV cache" if layer.kv_cache == layer.attention else f"KV cache on the {DEVICES[layer.kv_cache]}"
    )
    predictor = "" if layer.predictor == "none" else f", predictor on the {DEVICES[layer.predictor]}"
    sides = {(True, True): "both", (True, False): "the GPU", (False, True): "the host", (False, False): "neither"}
    neurons = f"neurons on {sides[bool(layer.hot_s), bool(layer.cold_s)]}"
    return f"Attention on the {DEVICES[layer.attention]}, {kv_cache}{predictor}; {neurons}."


def _count_text(count: int, layers: int) -> str:
    if count == layers:
        return "So are all layers." if layers > 1 else "It is the only layer."
    return f"So {'is' if count == 1 else 'are'} {count} of {layers} layers."
