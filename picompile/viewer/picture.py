"""Boxes and arrows of one section of a graph, with their places. Lengths in pixels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from picompile.viewer.boxes import Box, Chip, Panel, Row
from picompile.viewer.changes import SAME
from picompile.viewer.layers import HEAD, TAIL
from picompile.viewer.layout import Place, Point, Route, lay_out
from picompile.viewer.listing import layers_text

PADDING = 9.0
TITLE_HEIGHT = 19.0
NAME_HEIGHT = 15.0
ROW_HEIGHT = 15.0
STEP_HEIGHT = 18.0
PORT_HEIGHT = 22.0
MARGIN = 6.0

# Text is measured before any font is known: monospaced ones are 0.6 em wide, bold sans-serif ones about as much.
_MONO = 0.602
TITLE_SIZE, NAME_SIZE, ROW_SIZE = 13.0, 11.0, 10.5
_STEP_PADDING = 5.0
_STEP_GAP = 12.0


@dataclass(frozen=True)
class PlacedStep:
    """One operator on a weight, from the left edge of its box."""

    chip: Chip
    x: float
    width: float


@dataclass(frozen=True)
class PlacedRow:
    """A row, from the upper edge of its box; `label` is empty where there is but one row."""

    row: Row
    label: str
    y: float
    steps: tuple[PlacedStep, ...]


@dataclass(frozen=True)
class PlacedBox:
    """A box at its place."""

    box: Box
    place: Place
    rows: tuple[PlacedRow, ...]


@dataclass(frozen=True)
class Port:
    """Where a value comes in from another section, or goes out to one."""

    text: str
    place: Place
    name: str
    status: str


@dataclass(frozen=True)
class Arrow:
    """An edge as an SVG path; `label` is the argument it is passed for, where the box reads several."""

    source: str
    target: str
    path: str
    status: str
    label: str
    end: Point


@dataclass(frozen=True)
class Picture:
    """One section of one graph."""

    width: float
    height: float
    boxes: tuple[PlacedBox, ...]
    ports: tuple[Port, ...]
    arrows: tuple[Arrow, ...]


def draw(panel: Panel, section: int) -> Picture:
    """The picture of a section; without boxes where the graph has no nodes there."""
    boxes = list(panel.boxes(section))
    own = {box.name for box in boxes}
    entries = list(dict.fromkeys(name for box in boxes for name in box.inputs if name not in own))
    exits = {box.name: text for box in boxes if (text := _exit_text(panel, box.name, section))}
    sizes = {_entry(name): _port_size(name) for name in entries}
    sizes |= {box.name: _size(box) for box in boxes}
    sizes |= {_exit(name): _port_size(text) for name, text in exits.items()}
    edges = [(name if name in own else _entry(name), box.name) for box in boxes for name in box.inputs]
    edges += [(name, _exit(name)) for name in exits]
    layout = lay_out(sizes, edges)
    ports = [Port(name, layout.boxes[_entry(name)], name, panel.status(name)) for name in entries]
    ports += [Port(text, layout.boxes[_exit(name)], name, panel.status(name)) for name, text in exits.items()]
    placed = tuple(PlacedBox(box, layout.boxes[box.name], tuple(_rows(box))) for box in boxes)
    arrows = tuple(_arrow(panel, route, boxes) for route in layout.routes)
    return Picture(layout.width + 2 * MARGIN, layout.height + 2 * MARGIN, placed, tuple(ports), arrows)


def _entry(name: str) -> str:
    return f"in {name}"


def _exit(name: str) -> str:
    return f"out {name}"


def _exit_text(panel: Panel, name: str, section: int) -> str:
    """Who else reads a value: the next section, or, for one of the head, which layers."""
    readers = {panel.section[user] for user in panel.users[name]} - {section}
    if not readers or name in panel.constants:
        return ""
    if section != HEAD:
        return "out"
    return layers_text(readers - {HEAD, TAIL}) if readers - {TAIL} else "after the layers"


def _port_size(text: str) -> tuple[float, float]:
    return _mono(text, NAME_SIZE) + 2 * PADDING, PORT_HEIGHT


def _mono(text: str, size: float) -> float:
    return len(text) * size * _MONO


def _size(box: Box) -> tuple[float, float]:
    title = len(box.title) * TITLE_SIZE * 0.6 + _mono(f"  {box.detail}", ROW_SIZE) + _mono(box.badge, ROW_SIZE) + 26
    name = _mono(f"{box.name}  {box.shape}", NAME_SIZE)
    rows = list(_rows(box))
    widths = [_row_width(row) for row in rows]
    bottom = rows[-1].y + (STEP_HEIGHT if rows[-1].steps else 0.0) + 4 if rows else TITLE_HEIGHT + NAME_HEIGHT
    return max(title, name, *widths) + 2 * PADDING, bottom + PADDING


def _row_width(row: PlacedRow) -> float:
    first = _mono(f"{row.label} {row.row.chip.text} {row.row.shape}".strip(), ROW_SIZE)
    return max([first, *(step.x + step.width - PADDING for step in row.steps)])


def _rows(box: Box) -> Iterable[PlacedRow]:
    """Rows from top to bottom; `y` is the baseline of a row's text."""
    y = TITLE_HEIGHT + NAME_HEIGHT + PADDING
    for row in box.rows:
        y += ROW_HEIGHT
        label = row.label if len(box.rows) > 1 and row.label != row.chip.text else ""
        yield PlacedRow(row, label, y, tuple(_steps(row.steps)))
        y += STEP_HEIGHT if row.steps else 0.0


def _steps(chips: Sequence[Chip]) -> Iterable[PlacedStep]:
    x = PADDING + _STEP_GAP
    for chip in chips:
        width = _mono(chip.text, ROW_SIZE - 1) + 2 * _STEP_PADDING
        yield PlacedStep(chip, x, width)
        x += width + _STEP_GAP


def _arrow(panel: Panel, route: Route, boxes: Iterable[Box]) -> Arrow:
    source, target = (name.removeprefix("in ").removeprefix("out ") for name in route.edge)
    status, label = panel.status(source) if source == target else panel.edge_status(source, target), ""
    if source == target and status == "changed":
        status = SAME
    for box in boxes:
        if box.name == route.edge[1] and len(box.inputs) > 1:
            label = box.inputs[source]
    label = "" if label in ("self", "other", "tensors", "input") else label
    return Arrow(source, target, path_text(route.points), status, label, route.points[-1])


def path_text(points: Sequence[Point]) -> str:
    """An SVG path: straight down where two points share x, else a curve that leaves and arrives vertically."""
    (x, y), *rest = points
    parts = [f"M{x:.1f} {y:.1f}"]
    for next_x, next_y in rest:
        if abs(next_x - x) < 0.5:
            parts.append(f"V{next_y:.1f}")
            next_x = x
        else:
            middle = (y + next_y) / 2
            parts.append(f"C{x:.1f} {middle:.1f} {next_x:.1f} {middle:.1f} {next_x:.1f} {next_y:.1f}")
        x, y = next_x, next_y
    return "".join(parts)
