"""Picture of a plan's memory: what it takes of each device's budget."""

from typing import TYPE_CHECKING, Any

from picompile.placement.plan import Plan
from picompile.report import numbers
from picompile.report.blocks import Picture
from picompile.report.drawing import INK, Canvas, draw
from picompile.report.plan_colours import DEVICES, kind_of_memory

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def devices_of(plan: Plan) -> list[str]:
    """The devices that have a budget, or that something lies on."""
    return [device for device in ("gpu", "host") if plan.budget_bytes(device) or plan.taken_bytes(device)]


def memory_picture(name: str, plan: Plan) -> Picture:
    """A bar for each device, by kind, up to what it may take and what it has."""
    devices = devices_of(plan)

    def paint(canvas: Canvas) -> None:
        axes, named = canvas.axes(x="share of the budget (%)", y=""), set[str]()
        largest = max([100.0, *(_draw_device(canvas, axes, plan, each, i, named) for i, each in enumerate(devices))])
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
    title, size = "What it takes of the memory", (440, 170 + 75 * max(len(devices), 1))
    return Picture(title, draw(paint, name=name, title=title, description=f"{description}.", size=size), words)


def _draw_device(canvas: Canvas, axes: "Axes", plan: Plan, device: str, place: int, named: set[str]) -> float:
    """Draws the bar of a device and returns where it ends; `named` are the kinds that the legend has already."""
    percent, left = 100 / (plan.budget_bytes(device) or plan.taken_bytes(device)), 0.0
    for (title, colour), taken in _stack(plan, device).items():
        # An edge of its own colour, so that the smallest are seen as well.
        style: dict[str, Any] = {
            "color": colour,
            "edgecolor": colour,
            "linewidth": 0.4,
            "label": None if title in named else title,
        }
        (bar,) = axes.barh(place, percent * taken, left=left, height=0.5, **style)
        canvas.hover(bar, f"{DEVICES[device]}: {title} {numbers.size(taken)}")
        named.add(title)
        left += percent * taken
    capacity = percent * plan.capacity_bytes(device)
    (line,) = axes.plot([capacity] * 2, [place - 0.36, place + 0.36], color=INK, linestyle=(0, (4, 2)))
    canvas.hover(line, f"{DEVICES[device]}: {numbers.size(plan.capacity_bytes(device))} may be taken")
    axes.annotate(_text(plan, device), (0, place - 0.38), va="bottom")
    return left


def _stack(plan: Plan, device: str) -> dict[tuple[str, str], int]:
    """(kind, colour) → bytes, the largest first."""
    found: dict[tuple[str, str], int] = {}
    for what, sizes in plan.bytes_by_kind().items():
        if taken := sizes.get(device):
            kind = kind_of_memory(what)
            found[kind] = found.get(kind, 0) + taken
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))


def _text(plan: Plan, device: str) -> str:
    return f"{numbers.size(plan.taken_bytes(device))} of {numbers.size(plan.budget_bytes(device))}"


def _description(plan: Plan, device: str) -> str:
    parts = ", ".join(f"{title} {numbers.size(taken)}" for (title, _), taken in _stack(plan, device).items())
    of = f"of which {numbers.size(plan.capacity_bytes(device))} may be taken"
    return f"{DEVICES[device]}: {_text(plan, device)}, {of}: {parts or 'nothing'}"
