"""Draw pictures for an HTML page with matplotlib: SVG whose colours, fonts and titles are the page's.

matplotlib draws with stand-in colours. In the SVG each becomes a CSS variable of `report.css`, so that a picture
follows the reader's light or dark mode. The same figure gives the same bytes: no dates, no random ids.
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from markupsafe import Markup

from picompile.errors import UsageError
from picompile.report.numbers import PagePicture
from picompile_passes.extras import install_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 440, 320
TALL = 440, 360
RAMP_STEPS = 12

INK, FAINT, MUTED = "#000001", "#000002", "#000003"
RAMP = tuple(f"#0000{0x10 + step:02x}" for step in range(RAMP_STEPS))
"""Colours from the first layer to the last, or from the smallest predictor to the largest."""
SERIES = tuple(f"#0000{0x40 + number:02x}" for number in range(6))
"""Quantities that have no order."""

_VARIABLES = {
    INK: "currentColor",
    FAINT: "var(--faint)",
    MUTED: "var(--muted)",
    **{colour: f"var(--ramp-{step})" for step, colour in enumerate(RAMP)},
    **{colour: f"var(--series-{number})" for number, colour in enumerate(SERIES)},
}
_STYLE = {
    "svg.fonttype": "none",
    "font.size": 12,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.use_mathtext": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 11,
    "lines.linewidth": 1.6,
    "text.parse_math": False,
    "grid.color": FAINT,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}
_NAMESPACES = re.compile(r' xmlns(:\w+)?="[^"]*"|\bxlink:(?=href=)')
_REFERENCE = re.compile(r'(?:url\(|href=")#([\w-]+)')
_NUMBER = re.compile(r"-?\d+\.\d+")
_COLOUR = re.compile(r"#0000[0-9a-f]{2}")
_FONT = re.compile(r"font-family:[^;]*;?\s*")


@dataclass
class Canvas:
    """A figure to draw on. `hover` gives an artist of matplotlib the text that pointing at it shows."""

    figure: "Figure"
    hovers: dict[str, str] = field(default_factory=dict)

    def hover(self, artist: Any, text: str) -> None:
        """Note `text` for a line, a bar or a collection of points."""
        name = f"hover-{len(self.hovers)}"
        artist.set_gid(name)
        self.hovers[name] = text

    def axes(self, *, x: str, y: str) -> "Axes":
        """Return the only axes of the figure, with their labels."""
        axes = self.figure.add_subplot()
        axes.set(xlabel=x, ylabel=y)
        return axes


def require_matplotlib() -> None:
    """Raise `UsageError` if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(f"pictures need matplotlib, which is not installed: {install_extra('report')}") from error


def draw(
    paint: Callable[[Canvas], None],
    *,
    name: str,
    title: str,
    description: str,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    margins: Mapping[str, float] | None = None,
) -> Markup:
    """Return the picture that `paint` draws as SVG. `name` is unique on the page; `size` is in CSS pixels.

    `margins`, as shares of the size, are found by trying unless they are given: half the work of drawing. `title` and
    `description` are what a reader hears who does not see the picture.
    """
    from matplotlib.figure import Figure

    with _style(name):
        # 72 dots per inch: then matplotlib's points, which the SVG counts in, are the page's pixels.
        figure = Figure(figsize=(size[0] / 72, size[1] / 72), dpi=72, layout="constrained" if margins is None else None)
        if margins is not None:
            figure.subplots_adjust(**margins)
        canvas = Canvas(figure)
        paint(canvas)
        buffer = io.BytesIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    root = _clean(buffer.getvalue().decode(), canvas.hovers)
    root.attrib = {
        "viewBox": root.attrib["viewBox"],
        "role": "img",
        "aria-labelledby": f"{name}-title {name}-description",
        "style": f"max-width:{size[0] * 1.2:.0f}px",
    }
    for position, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = Element(tag, id=f"{name}-{'title' if tag == 'title' else 'description'}")
        element.text = text
        root.insert(position, element)
    return Markup(ElementTree.tostring(root, encoding="unicode", method="html"))


def picture(
    paint: Callable[[Canvas], None],
    name: str,
    title: str,
    description: str,
    words: str,
    size: tuple[int, int] = TALL,
) -> PagePicture:
    """Draw a picture for the page; `words` describe it, the other arguments are as in `draw`."""
    return PagePicture(title, draw(paint, name=name, title=title, description=description, size=size), words)


@contextmanager
def _style(salt: str) -> Iterator[None]:
    """Set the style of the pictures inside the block, whatever the user's matplotlib is set to."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        settings: Any = matplotlib.rcParams
        settings.update({**_STYLE, "svg.hashsalt": salt})
        yield


def _clean(svg: str, hovers: Mapping[str, str]) -> Element:
    """Return matplotlib's SVG without metadata and styles, with the page's colours and `hovers`.

    Identifiers that something refers to are hashes, salted with the picture's name; others go.
    """
    root = ElementTree.fromstring(_NAMESPACES.sub("", svg))
    referred = set(_REFERENCE.findall(svg))
    for element in list(root.iter()):
        for child in list(element):
            if child.tag in ("metadata", "style"):
                element.remove(child)
        kept = element.attrib
        identity = kept.pop("id", "")
        if identity in referred:
            kept["id"] = identity
        # A hundredth of a pixel is enough, and the page a third of the size.
        for key in {"d", "x", "y", "transform"} & kept.keys():
            kept[key] = " ".join(_NUMBER.sub(_rounded, kept[key]).split())
        if "style" in kept:
            kept["style"] = _COLOUR.sub(lambda found: _VARIABLES[found[0]], _FONT.sub("", kept["style"]))
        element.text, element.tail = (element.text or "").strip(), None
        if identity in hovers:
            kept["class"] = "hover"
            title = Element("title")
            title.text = hovers[identity]
            element.insert(0, title)
    return root


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def layer_axis(canvas: Canvas, *axes: "Axes") -> None:
    """Set up the axis of layers that `axes`, one below another, share: whole numbers only, even for one layer."""
    from matplotlib.ticker import MaxNLocator

    axes[-1].set_xlabel("layer")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for each in axes:
        each.margins(x=0.06)
        each.grid(axis="x", visible=False)
    canvas.figure.align_ylabels(list(axes))


def from_zero(axes: "Axes", largest: float, least: float = 0.1) -> None:
    """Let the vertical axis of percentages begin at zero, with room above `largest`; at least up to `least`."""
    axes.set_ylim(0, max(115 * largest, least))


def drawable(text: str, most: int = 24) -> str:
    """Return a name out of a file as fonts have it: printable ASCII, not too long."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:most])


def ramp(number: int, count: int) -> str:
    """Return the colour of one of `count` things that have an order."""
    return RAMP[round(number * (RAMP_STEPS - 1) / max(count - 1, 1))]
